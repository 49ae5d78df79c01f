"""torch's backends, Gloo and NCCL: their presence, their errors, the end of their collectives, and the newest collectives for the host's agent.

Gloo can't end a running collective: its abort() returns at once and changes nothing. But when the kernel reports the end of a
connection, every operation on that connection fails at once, in any thread. Therefore GroupSockets notes the sockets that appear
while a round's groups are made, and shuts them down when the round breaks. NCCL's collectives end with their communicators.

The recorder of Gloo's groups (torch 2.13 and newer) numbers a group's collectives alike on all ranks. A group's own
sequence number does not serve: with Gloo it also counts messages between two ranks. The agent asks over a socket in the
job's private directory, only while the job is silent; a process whose Python is stuck does not answer.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed as dist

from hvlaunch.rendezvous.client import keep_alive
from hvlaunch.torch.group_errors import CollectiveFailed, NotOffered

__all__ = [
    "Abortable",
    "Aborts",
    "GroupSockets",
    "abort_groups",
    "answer_agent",
    "as_failed",
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "gpu_backends",
    "has_timed_out",
    "is_groups",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "newest_collectives",
    "rocm_built",
    "start_timeline",
    "stop_timeline",
    "tcp_sockets",
    "wait_until_idle",
]


def mpi_enabled() -> bool:
    """Return False: collectives never use MPI."""
    return False


def mpi_built() -> bool:
    """Return False: MPI is not used."""
    return False


def mpi_threads_supported() -> bool:
    """Return False: MPI is not used."""
    return False


def gloo_enabled() -> bool:
    """Return True if collectives use Gloo. Before init(): True if a plain init() would choose Gloo."""
    return not torch.cuda.is_available() if not dist.is_initialized() else dist.get_backend() == "gloo"


def gloo_built() -> bool:
    """Return True if torch has Gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """Return torch's version of NCCL, as 22105 for 2.21.5; 0 without NCCL."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def ddl_built() -> bool:
    """Return False: DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Return True if torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return True if torch was built for ROCm."""
    return torch.version.hip is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Raise NotOffered: torch's profiler writes such files."""
    del file_path, mark_cycles
    raise NotOffered("start_timeline()", "torch.profiler.profile() and its export_chrome_trace()")


def stop_timeline() -> None:
    """Raise NotOffered, like start_timeline()."""
    raise NotOffered("stop_timeline()", "torch.profiler.profile() and its export_chrome_trace()")


_NAME = "pt_gloo_runloop"
_LIMIT = 5.0
_TASKS = Path("/proc/self/task")


def wait_until_idle(
    *, tasks: Path = _TASKS, sleep: Callable[[float], object] = time.sleep, limit: float = _LIMIT
) -> bool:
    """Wait up to `limit` seconds until Gloo's threads are idle; return True if they are.

    Returns True at once without /proc. A thread that waits for Python's lock wakes in each switch interval of Python. A sleeping thread
    that did not wake over several intervals waits for work.
    """
    # Several intervals: a thread that waits for the lock wakes once in each and must be seen awake.
    pause = 4 * sys.getswitchinterval()
    before = None
    for _ in range(round(limit / pause)):
        now = _wakes(tasks)
        if not now or (now == before and None not in now.values()):
            return True
        before = now
        sleep(pause)
    return False


def _wakes(tasks: Path) -> dict[str, int | None]:
    """Return the number of voluntary sleeps of each of Gloo's threads, or None for a running one."""
    wakes: dict[str, int | None] = {}
    for task in tasks.glob("*/status"):
        try:
            lines = task.read_text().splitlines()
        # The thread has ended meanwhile.
        except OSError:
            continue
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if status["Name"] == _NAME:
            sleeps = status["State"].startswith("S")
            wakes[task.parent.name] = int(status["voluntary_ctxt_switches"]) if sleeps else None
    return wakes


_PATIENCE = 5.0


class Abortable(Protocol):
    """A group's backend, as far as aborting needs it. With torch 2.6 the group itself can't abort."""

    def abort(self) -> None:
        """Abort the backend's communicators."""


class Aborts:
    """Aborts groups by their backends, from any thread, each once. `patience` is the number of seconds that a call waits.

    Each gets a thread of its own: its communicator waits for the device, perhaps busy with another group's collective. torch's
    `_abort_process_group` aborts one group after the other, and removes the groups from torch's tables while another thread uses them.
    """

    def __init__(self, patience: float = _PATIENCE) -> None:
        self._patience = patience
        self._threads: dict[Abortable, threading.Thread] = {}

    def abort(self, backends: Iterable[Abortable]) -> None:
        """End every running collective of these backends now, and forget those of earlier calls."""
        # A second abort() of a backend would block behind the first, so its thread is kept.
        self._threads = {backend: self._threads.get(backend) or _ending(backend) for backend in backends}
        deadline = time.monotonic() + self._patience
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))


_aborts = Aborts()


def abort_groups() -> None:
    """End every running collective of this process on GPUs now. A repeated call takes groups made since.

    An aborted collective returns garbage to a waiting GPU; the next collective raises torch's DistBackendError.
    """
    _aborts.abort(gpu_backends())


def has_timed_out() -> bool:
    """Return True if a collective of this process on a GPU exceeded its timeout.

    torch's watchdog notices the timeout, and reports it since torch 2.7.
    """
    return any(_has_timed_out(backend) for backend in gpu_backends())


def _ending(backend: Abortable) -> threading.Thread:
    # A daemon: abort() may never return if the device hangs, and the process must still be able to end.
    thread = threading.Thread(target=backend.abort, name="hvlaunch abort", daemon=True)
    thread.start()
    return thread


def gpu_backends() -> list[Any]:
    """Return every group's backends for GPUs whose collectives end by abort(): NCCL's and XCCL's.

    A backend is known by its functions: torch's version and TORCH_DIST_USE_NCCL2 decide its class, and the classes have only the base
    class of every backend in common. Gloo takes tensors of GPUs too, and ends with its sockets.
    """
    # A copy, because another thread may make a group at this moment.
    groups = list(dist.distributed_c10d._world.pg_map)  # noqa: SLF001
    # A group's name does not tell: a group may have one backend per device type.
    backends = [
        _unwrapped(group._get_backend(device))  # noqa: SLF001
        for group in groups
        for device in group._device_types  # noqa: SLF001
        if device.type != "cpu"
    ]
    return [
        backend for backend in backends if hasattr(backend, "abort") and backend.name() != dist.Backend.GLOO
    ]


def _unwrapped(backend: Any) -> Any:
    """Remove the wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL. In torch 2.6 the wrapper has no abort()."""
    return getattr(backend, "wrapped_pg", backend)


def _has_timed_out(backend: Any) -> bool:
    if not hasattr(backend, "get_error"):
        return False
    # Every backend has the function since torch 2.14, and some raise.
    with suppress(RuntimeError):
        return bool(backend.get_error().name == "TIMEOUT")
    return False


_WRONG_CALL = "ProcessGroupGloo::"
"""Beginning of torch's message if a collective got wrong arguments."""


@contextmanager
def as_failed() -> Iterator[None]:
    """Raise CollectiveFailed in place of torch's error of a collective that peers have left."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CollectiveFailed) or not is_groups(error):
            raise
        raise CollectiveFailed(str(error)) from error


def is_groups(error: BaseException) -> bool:
    """Return True for an error of a group: Gloo has no error class, other backends have torch's."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    # Gloo's errors quote their C++ source file. Wrong arguments are the script's mistake, and no peer's end.
    is_gloos = "gloo/" in text or "Gloo" in text
    return isinstance(error, RuntimeError) and is_gloos and not text.startswith(_WRONG_CALL)


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


_dump: Callable[[bool, bool], bytes] | None = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)  # noqa: SLF001
_MOST_GROUPS = 32
_SEND_WITHIN = 1.0
"""Seconds for the agent to take an answer."""
_PAUSE = 1.0
"""Seconds to wait when the process has no descriptor left for a connection."""


def newest_collectives(since: float) -> list[dict[str, str | int]]:
    """Return the name of each living group, and number and kind of its newest collective since this time (time.time()).

    Returns nothing if torch has no recorder, or a group is on GPUs: torch has other recorders for those, and NCCL tells its counts
    itself. Returns nothing with TORCH_DISTRIBUTED_DEBUG=DETAIL, whose records have no names of groups.
    """
    if _dump is None or gpu_backends():
        return []
    records = json.loads(_dump(True, False)).get(
        "entries", ()
    )  # every collective, not the running ones alone
    # A process may live through many rounds, whose groups have the same names.
    living = set(dist.distributed_c10d._world.pg_names.values())  # noqa: SLF001
    by_group: dict[str, dict[str, str | int]] = {}
    for record in records:
        group = record["process_group"][0]
        if group in living and record["time_created_ns"] >= since * 1e9:
            kind = record["profiling_name"].rpartition(":")[2]
            # Groups stay in the order of their newest collectives: the last are the ones that matter.
            by_group.pop(group, None)
            by_group[group] = {"group": group, "number": record["collective_seq_id"], "kind": kind}
    return list(by_group.values())[-_MOST_GROUPS:]


class _Answers:
    """Answers the agent, each time that it connects, with newest_collectives() as JSON."""

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self.pid = os.getpid()
        self.since = 0.0
        # The pid may have been another worker's.
        with suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108 (as cheap as can be)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        # An agent that got no answer comes again: its earlier connections must not pile up.
        self._socket.listen(1)
        threading.Thread(target=self._run, name="hvlaunch collectives", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection = self._socket.accept()[0]
            except OSError:
                time.sleep(_PAUSE)
                continue
            # Torch's record is no stable interface: whatever is wrong with it, the agent gets no answer.
            with connection, suppress(Exception):
                connection.settimeout(_SEND_WITHIN)
                connection.sendall(json.dumps(newest_collectives(self.since)).encode("ascii"))


_answers: _Answers | None = None


def answer_agent() -> None:
    """Answer the host's agent about collectives from now on, if this process is a worker."""
    global _answers  # noqa: PLW0603 (a process has one)
    scratch = os.environ.get("HVLAUNCH_SCRATCH")
    if scratch is None:
        return
    # A forked child has the variable, and not the thread.
    if _answers is None or _answers.pid != os.getpid():
        # The directory is gone, or its path is too long for a socket.
        try:
            _answers = _Answers(os.path.join(scratch, f"collectives.{os.getpid()}"))  # noqa: PTH118 (as above)
        except OSError:
            return
    _answers.since = time.time()
