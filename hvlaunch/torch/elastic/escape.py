"""The way out of a collective that nothing can end: the process starts over, and takes along what it had saved.

NCCL's collectives end with their communicators; but while a communicator is being made, there is none to end yet. When a connection ends, Gloo tells those who wait for messages that it has not begun to send or to receive. It
forgets whoever waits for one that is half sent or half received (Pair::signalException in gloo/transport/tcp/pair.cc
passes over `rx_.ubuf`, and over `ubuf` of what is in `tx_`), and nothing reaches that thread any more. So the process
replaces its program by the same one (exec): same process, same pipes, its last commit in a file in memory.
"""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch

from hvlaunch.torch.elastic.state import Snapshot

__all__ = ["Baggage", "Escape", "can_start_over", "start_over", "unpack"]

_LOOK = 1.0
_VARIABLE = "HVLAUNCH_BAGGAGE"
_TORCH = Path(torch.__file__).parent
_WAITING = (
    *(f"{_TORCH / part}" for part in ("distributed/", "autograd/", "nn/parallel/", "_ops.py")),
    *(f"{Path(__file__).parents[1] / part}" for part in ("handles.py", "sharing.py")),
)
"""Where in torch's Python, and in ours, a thread stands that waits for a collective."""
_FILES = str(_TORCH / "distributed" / "checkpoint"), str(_TORCH / "serialization.py")
_GPU_LOOKS = 5
_SPINS = 0.25
"""Of the time, on a busy machine."""
_CWD = Path.cwd()
_STDERR = 2


@dataclass(frozen=True)
class Baggage:
    """What a process takes along when it starts over."""

    last_round: int
    """The round that it can't leave in any other way."""
    commits: int
    saved: Snapshot | None
    cause: str


@dataclass(frozen=True)
class _Standing:
    """Where exactly a thread stands, and its CPU time."""

    place: tuple[tuple[int, int], ...]
    """Of each call, the innermost first, which frame and instruction it is at."""
    cpu: float
    waits: bool
    """For a collective, by the line's file."""
    may_spin: bool
    """For a GPU."""

    def has_spun_since(self, before: "_Standing", seconds: float) -> bool:
        """Whether it has computed at one place, as who waits for a GPU does."""
        return self.may_spin and self.place == before.place and self.cpu - before.cpu > _SPINS * seconds


class Escape:
    """Sees that the thread which makes it gets out of a round that breaks; a context, which is the round.

    `press` ends what its collectives wait for; it is called when the round breaks, and again and again while the
    thread stays. `start_over` is for a thread that stays all the same, stuck in a collective; it is called once.
    Neither is called when the context has been left. `look` is seconds between two looks; if nothing has moved, the
    thread is stuck. Who waits for a GPU (`uses_gpu`) spins, in whatever line: it is stuck after some looks.
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
        """Who has it knows whether the thread is out."""
        self.has_begun = False
        """Whether anything has been pressed: then what collectives on a GPU have brought may be garbage."""

    def __enter__(self) -> "Escape":  # noqa: PYI034 (typing.Self came with Python 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self._is_out.set()

    def begin(self) -> None:
        """The round is broken, and the thread should be leaving it. From any thread; only the first time counts."""
        with self._turn:
            if not (self._is_out.is_set() or self.has_begun):
                self.has_begun = True
                self._press()
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
    where = frame.f_code.co_filename
    return where.startswith(_WAITING) and not where.startswith(_FILES)


def can_start_over() -> bool:
    """Whether the command line of this process is its own: a fork of multiprocessing has its parent's."""
    is_own = len(sys.orig_argv) > 1 and multiprocessing.parent_process() is None
    return is_own and bool(sys.executable) and hasattr(os, "memfd_create")


def start_over(baggage: Baggage) -> NoReturn:
    """Run this process' program from its beginning, in this process, with its first working directory.

    Its environment is what it is now. Children of multiprocessing, loaders of data say, are killed: they would wait
    for ever. Raises OSError, and what pickling the baggage raises; then nothing has happened.
    """
    file = os.memfd_create("hvlaunch", 0)
    with os.fdopen(file, "wb", closefd=False) as stream:
        torch.save(baggage, stream)
    os.lseek(file, 0, os.SEEK_SET)
    sys.stderr.write(f"hvlaunch: stuck in a collective ({baggage.cause}): this worker starts over\n")
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():
        child.kill()
    for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 (one of them is gone again at once)
        if descriptor > _STDERR and descriptor != file:
            with suppress(OSError):
                os.set_inheritable(descriptor, False)
    os.chdir(_CWD)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, _VARIABLE: str(file)})


def unpack() -> Baggage | None:
    """What this process took along, once; None where it did not start over."""
    file = os.environ.pop(_VARIABLE, None)
    if file is None:
        return None
    with os.fdopen(int(file), "rb") as stream:
        baggage = torch.load(stream, weights_only=False)  # what this very process wrote
    if not isinstance(baggage, Baggage):
        raise TypeError(f"{_VARIABLE} has a {type(baggage).__name__}")
    return baggage
