"""Leaving a broken round: ending the collectives that wait for a lost peer, and replacing a process that stays stuck in one.

Gloo can't end a running collective: its abort() returns at once and changes nothing. But when the kernel reports the end of a
connection, every operation on that connection fails at once, in any thread. Therefore GroupSockets notes the sockets that appear
while a round's groups are made, and shuts them down when the round breaks.

NCCL's collectives end with their communicators, but a communicator that is still being made can't be ended. And Gloo forgets a
thread whose message is half sent or half received (Pair::signalException in gloo/transport/tcp/pair.cc skips `rx_.ubuf`, and
`ubuf` of the entries of `tx_`), and no call reaches such a thread any more. Therefore the process replaces its program by the
same program (exec): same process, same pipes, the last commit in a file in memory.
"""

import multiprocessing
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch

from hvlaunch.rendezvous.client import keep_alive
from hvlaunch.torch.elastic.state import Snapshot

__all__ = ["Baggage", "Escape", "GroupSockets", "can_start_over", "start_over", "tcp_sockets", "unpack"]

_TIMES = 20
"""Unanswered keepalive probes, one every 3 s: a peer that is silent for a minute is gone."""

_Identity = tuple[int, int]


class GroupSockets:
    """The TCP connections of this process to the other workers of a round.

    Groups that the script makes later, by `torch.distributed.new_group`, are recognised by their peers: a connection that is younger
    than the round and leads to an address that the round's own groups use. A connection to the rendezvous may be among them; its
    client then opens another.
    """

    def __init__(self) -> None:
        self._older: set[_Identity] = set()
        self._peers: set[str] | None = None
        """Addresses of peers; None while the groups are made, when any peer may be one of theirs."""
        self._held: dict[_Identity, socket.socket] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note the sockets that appear inside the block, which makes the round's groups.

        Gloo waits for ever on a connection that was reset at the other end alone, while the other end waits for a third worker that waits
        for this one. Keepalive ends such a wait.
        """
        self._older = {identity for identity, _ in _connections()}
        yield
        self._peers = set()
        for fd, (host, _) in tcp_sockets():
            with socket.socket(fileno=fd) as sock:
                if _identity(fd) not in self._older:
                    self._peers.add(host)
                    keep_alive(sock, times=_TIMES)

    def shut_down(self) -> int:
        """Shut down every connection of the round's groups and return their number. A repeated call takes later connections.

        Only reading is shut down. Gloo reads what has arrived, answers, and then fails all pending operations. If Gloo could not answer, it
        would forget threads that wait for the answer to be sent. Peers, too, must be able to answer what they still have to read, so
        the connections stay open until release(), although Gloo closes its side.
        """
        count = 0
        # Held sockets cost descriptors that the script needs too, so at most half of them are held.
        room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        for fd, peer in tcp_sockets():
            identity = _identity(fd)
            sock = socket.socket(fileno=fd)
            if identity in self._held or not self._is_ours(identity, peer):
                sock.close()
                continue
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RD)
                count += 1
            if fd < room:
                self._held[identity] = sock
            else:
                sock.close()
        return count

    def release(self) -> None:
        """Close the sockets that were shut down, after all living peers have left the round."""
        while self._held:
            self._held.popitem()[1].close()

    def _is_ours(self, identity: _Identity, peer: tuple[str, int]) -> bool:
        return identity not in self._older and (self._peers is None or peer[0] in self._peers)


def _connections() -> Iterator[tuple[_Identity, tuple[str, int]]]:
    for fd, peer in tcp_sockets():
        identity = _identity(fd)
        os.close(fd)
        yield identity, peer


def _identity(fd: int) -> _Identity:
    about = os.fstat(fd)
    return about.st_dev, about.st_ino


def tcp_sockets() -> Iterator[tuple[int, tuple[str, int]]]:
    """Yield a new descriptor of each connected TCP socket of this process, with its peer. The caller closes the descriptor.

    A duplicate can't be closed by the socket's owner and given to another file while the caller looks at it.
    """
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (one name of it is gone again at once)
        try:
            fd = os.dup(int(name))
        except OSError:
            continue
        # From here on the duplicate is ours: each branch closes it or hands it to the caller.
        peer = _peer(fd)
        if peer is None:
            os.close(fd)
        else:
            yield fd, peer


def _peer(fd: int) -> tuple[str, int] | None:
    if not Path(f"/proc/self/fd/{fd}").readlink().name.startswith("socket:"):
        return None
    taken = socket.socket(fileno=fd)
    try:
        if taken.family not in (socket.AF_INET, socket.AF_INET6) or taken.type != socket.SOCK_STREAM:
            return None
        host, port, *_ = taken.getpeername()
    except OSError:
        return None
    finally:
        taken.detach()
    return host, port


_LOOK = 1.0
_VARIABLE = "HVLAUNCH_BAGGAGE"
# Compared with the file names of stack frames, so the paths must be those that the interpreter recorded at
# import.
_TORCH = Path(torch.__file__).parent
_WAITING = (
    *(f"{_TORCH / part}" for part in ("distributed/", "autograd/", "nn/parallel/", "_ops.py")),
    *(f"{Path(__file__).parents[1] / part}" for part in ("collectives.py", "sharing.py")),
)
"""Files of torch and of hvlaunch in which a thread waits for a collective."""
# Threads in these files read or write checkpoints: slow, but not stuck.
_FILES = str(_TORCH / "distributed" / "checkpoint"), str(_TORCH / "serialization.py")
_GPU_LOOKS = 5
_SPINS = 0.25
"""Share of the time that a spinning thread computes on a busy machine."""
_CWD = Path.cwd()
_STDERR = 2


@dataclass(frozen=True)
class Baggage:
    """State that a process keeps when it starts over."""

    last_round: int
    """The round that the process could leave only by starting over."""
    commits: int
    saved: Snapshot | None
    cause: str


@dataclass(frozen=True)
class _Standing:
    """Position and CPU time of a thread."""

    place: tuple[tuple[int, int], ...]
    """Frame and instruction of each call, innermost first."""
    cpu: float
    waits: bool
    """True if the line's file is one where threads wait for collectives."""
    may_spin: bool
    """True if the thread may be waiting for a GPU, which spins."""

    def has_spun_since(self, before: "_Standing", seconds: float) -> bool:
        """Return True if the thread computed in one place since `before`: waiting for a GPU looks like this."""
        return self.may_spin and self.place == before.place and self.cpu - before.cpu > _SPINS * seconds


class Escape:
    """Context of a round: gets the calling thread out of the round if the round breaks.

    `press` ends the operations that collectives wait for. It is called when the round breaks, and repeatedly while the thread
    stays. `start_over` is called once, if the thread stays stuck in a collective. Neither is called after the context was left.
    `look` is the number of seconds between two looks; a thread that has not moved in between is stuck. A thread that waits for a
    GPU (`uses_gpu`) spins in any line, so it counts as stuck only after several looks.
    """

    def __init__(
        self,
        press: Callable[[], object],
        start_over: Callable[[], object],
        *,
        look: float = _LOOK,
        uses_gpu: Callable[[], bool] = torch.cuda.is_initialized,
    ) -> None:
        self._press = press
        self._start_over = start_over
        self._look = look
        self._uses_gpu = uses_gpu
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._is_out = threading.Event()
        self._turn = threading.Lock()
        """Held while the thread's state (inside or out) is read or changed."""
        self.has_begun = False
        """True once `press` was called: results of collectives on a GPU may be garbage from then on."""

    def __enter__(self) -> "Escape":  # noqa: PYI034 (typing.Self came with Python 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self._is_out.set()

    def begin(self) -> None:
        """Start to get the thread out of the broken round. Callable from any thread; only the first call counts."""
        with self._turn:
            if not (self._is_out.is_set() or self.has_begun):
                self.has_begun = True
                self._press()
                # A thread of its own: the caller may be the membership's thread, which must keep listening.
                threading.Thread(target=self._see_it_out, name="hvlaunch escape", daemon=True).start()

    def _see_it_out(self) -> None:
        before: _Standing | None = None
        looks = 0
        while not self._is_out.wait(self._look):
            with self._turn:
                if self._is_out.is_set():
                    return
                now = self._standing()
                spins = before is not None and now.has_spun_since(before, self._look)
                # A long kernel also spins for a look or two, so one look proves nothing on a GPU.
                looks = looks + 1 if spins else 0
                if (now.waits and now == before) or looks == _GPU_LOOKS:
                    self._start_over()
                    return
                before = now
                self._press()

    def _standing(self) -> _Standing:
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001 (documented)
        if frame is None:
            return _Standing((), 0.0, waits=False, may_spin=False)
        return _Standing(
            tuple((id(call), call.f_lasti) for call in _calls(frame)),
            time.clock_gettime(self._clock),
            waits=_waits(frame),
            may_spin=self._uses_gpu() and not frame.f_code.co_filename.startswith(_FILES),
        )


def _calls(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _waits(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_WAITING) and not file.startswith(_FILES)


def can_start_over() -> bool:
    """Return True if this process can run its own command line again. A fork of multiprocessing has its parent's."""
    is_own = len(sys.orig_argv) > 1 and multiprocessing.parent_process() is None
    return is_own and bool(sys.executable) and hasattr(os, "memfd_create")


def start_over(baggage: Baggage) -> NoReturn:
    """Run this process's program again from its beginning, in this process and in its first working directory.

    The environment is the present one. Children of multiprocessing, such as data loaders, are killed because they would wait for
    ever. Raises OSError, and errors of pickling the baggage; then nothing has changed.
    """
    # Memory instead of a file on disk: the disk may be full or slow, and nothing must be left behind.
    file = os.memfd_create("hvlaunch", 0)
    with os.fdopen(file, "wb", closefd=False) as stream:
        torch.save(baggage, stream)
    os.lseek(file, 0, os.SEEK_SET)
    sys.stderr.write(f"hvlaunch: stuck in a collective ({baggage.cause}): this worker starts over\n")
    sys.stdout.flush()
    sys.stderr.flush()
    # exec keeps children, but their queues and pipes belong to the old program.
    for child in multiprocessing.active_children():
        child.kill()
    # Sockets of the old groups must not live on in the new program: peers wait for their end.
    for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 (one of them is gone again at once)
        if descriptor > _STDERR and descriptor != file:
            with suppress(OSError):
                os.set_inheritable(descriptor, False)
    # The command line may have relative paths, and the script may have changed directory.
    os.chdir(_CWD)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, _VARIABLE: str(file)})


def unpack() -> Baggage | None:
    """Return the state that this process kept when it started over, once; None if it did not start over."""
    file = os.environ.pop(_VARIABLE, None)
    if file is None:
        return None
    with os.fdopen(int(file), "rb") as stream:
        # Unpickling is safe: this process wrote the file itself.
        baggage = torch.load(stream, weights_only=False)
    if not isinstance(baggage, Baggage):
        raise TypeError(f"{_VARIABLE} has a {type(baggage).__name__}")
    return baggage
