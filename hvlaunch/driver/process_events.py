"""The signals of the driver's process, as events."""

import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import ParamSpec

from hvlaunch.driver.observing.inquiry import Inquiry, StacksWanted
from hvlaunch.engine.events import Event, Interrupted, ThreadFailed, UserSignal
from hvlaunch.errors import Defect, Problem

__all__ = ["ThreadFailures", "failures_as_events", "loud", "signals_as_events"]


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_READ_SIZE = 256
_SAME_WITHIN: dict[int, float] = {signal.SIGHUP: math.inf, signal.SIGTERM: 0.2}
"""Seconds in which a second one is the same: it came by two ways."""


@contextmanager
def signals_as_events(
    post: Callable[[Event | Inquiry | StacksWanted], None],
    hangup: Event | Inquiry | None = None,
    wanted: StacksWanted | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
    """While in the block, SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are events; SIGHUP is `hangup`, and SIGQUIT
    (Ctrl and the backslash) is `wanted`, if they are given.

    SIGHUP is heard once, since kernel and shell both send it, and SIGTERM once in 0.2 s: timeout(1) sends it to the process
    and again to its group. Each Ctrl-C counts.

    What is ignored already stays ignored (nohup, jobs in the background of a shell script). Reading
    stdin in the background of a terminal is an error, and does not stop the process. Outside the
    main thread, Python lets nobody handle signals, and nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    heard: dict[int, float] = {}

    def handle(number: int) -> None:
        now = clock()
        if now < heard.get(number, -math.inf) + _SAME_WITHIN.get(number, 0.0):
            return
        heard[number] = now
        if number == signal.SIGHUP and hangup is not None:
            post(hangup)
        elif number == signal.SIGQUIT and wanted is not None:
            post(wanted)
        else:
            post(Interrupted(number) if number in _ENDING else UserSignal(number))

    ours = (*_ENDING, *_PASSED_ON, *(() if wanted is None else (signal.SIGQUIT,)))
    before = {number: signal.getsignal(number) for number in (*ours, signal.SIGTTIN)}
    for number in ours:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, _heard_elsewhere)
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)
    try:
        with _heard(ours, handle):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _heard(numbers: Container[int], handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle` in a thread for each of these signals whose handler is _heard_elsewhere() when it comes.

    Python's handlers run in the main thread when that next does something, which may be long after: where the kernel has given
    the signal to another thread, it does not wake from its wait.
    """

    def hear() -> None:
        while came := reader.recv(_READ_SIZE):
            for number in came:
                if number in numbers and signal.getsignal(number) is _heard_elsewhere:
                    handle(number)

    reader, writer = socket.socketpair()
    writer.setblocking(False)
    thread = threading.Thread(target=hear, name="signals", daemon=True)
    thread.start()
    with reader:
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            writer.close()
            thread.join()


def _heard_elsewhere(_number: int, _frame: object) -> None:
    """What Python calls, late."""


P = ParamSpec("P")


class ThreadFailures:
    """What threads of the driver have raised, the first one first."""

    def __init__(self, post: Callable[[Event], None]) -> None:
        self._post = post
        self._errors: list[tuple[Problem, BaseException | None]] = []

    @property
    def first(self) -> Problem | None:
        return self._errors[0][0] if self._errors else None

    def hook(self, args: threading.ExceptHookArgs) -> None:
        """threading.excepthook, which the threads themselves call."""
        name = "of hvlaunch" if args.thread is None else args.thread.name
        what = " ".join(f"{args.exc_type.__name__}: {args.exc_value}".split())
        cause = f"internal error in thread {name}: {what}; this is a defect of hvlaunch"
        problem = Defect(cause, hint="the same with --verbose, and report it").problem
        self._errors.append((problem, args.exc_value))
        self._post(ThreadFailed(problem))

    def traceback(self) -> str:
        """Where the first came from."""
        import traceback  # noqa: PLC0415 (where something went wrong)

        error = self._errors[0][1] if self._errors else None
        return "" if error is None else "".join(traceback.format_exception(error))


@contextmanager
def failures_as_events(post: Callable[[Event], None]) -> Iterator[ThreadFailures]:
    """While in the block, what any thread raises and does not catch is an event."""
    failures = ThreadFailures(post)
    before, threading.excepthook = threading.excepthook, failures.hook
    try:
        yield failures
    finally:
        threading.excepthook = before


def loud(call: Callable[P, None]) -> Callable[P, None]:
    """The same for a call whose caller would swallow what it raises, such as an event loop."""

    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            call(*args, **kwargs)
        except Exception:  # noqa: BLE001 (whatever it is, it is told)
            kind, error, trace = sys.exc_info()
            _tell(kind, error, trace)

    return run


def _tell(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    if kind is not None:
        threading.excepthook(threading.ExceptHookArgs((kind, error, trace, threading.current_thread())))
