"""Signals of the driver's process and uncaught exceptions of its threads, as events for the loop."""

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

from hvlaunch.engine.events import Event, Interrupted, ThreadFailed, UserSignal
from hvlaunch.errors import Defect, Problem

__all__ = ["ThreadFailures", "failures_as_events", "loud", "signals_as_events"]

P = ParamSpec("P")

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_READ_SIZE = 256
_SAME_WITHIN: dict[int, float] = {signal.SIGHUP: math.inf, signal.SIGTERM: 0.2}
"""Seconds within which a repeated signal counts once, because two senders delivered the same request."""


@contextmanager
def signals_as_events(
    post: Callable[[Event], None],
    on_hangup: Callable[[], None] | None = None,
    on_quit: Callable[[], None] | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
    """Post SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 as events while in the block.

    `on_hangup` is called for SIGHUP instead; `on_quit` is called for SIGQUIT (Ctrl and the backslash), which is left
    alone without it.

    SIGHUP counts once, since kernel and shell both send it, and SIGTERM once in 0.2 s: timeout(1) sends it to the process
    and again to its group. Each Ctrl-C counts.

    A signal that is ignored already stays ignored (nohup, jobs in the background of a shell script). Reading stdin in the
    background of a terminal becomes an error instead of stopping the process. Outside the main thread Python allows no
    signal handlers, and the block changes no signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    heard_at: dict[int, float] = {}

    def handle(number: int) -> None:
        now = clock()
        if now < heard_at.get(number, -math.inf) + _SAME_WITHIN.get(number, 0.0):
            return
        heard_at[number] = now
        if number == signal.SIGHUP and on_hangup is not None:
            on_hangup()
        elif number == signal.SIGQUIT and on_quit is not None:
            on_quit()
        else:
            post(Interrupted(number) if number in _ENDING else UserSignal(number))

    ours = (*_ENDING, *_PASSED_ON, *(() if on_quit is None else (signal.SIGQUIT,)))
    before = {number: signal.getsignal(number) for number in (*ours, signal.SIGTTIN)}
    for number in ours:
        # nohup and shells in scripts ignore signals on purpose.
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
    """Call `handle` in a thread for each of these signals whose handler is _heard_elsewhere() when it arrives."""
    # Python runs its own handlers in the main thread when that thread next executes bytecode, which may be long after: if
    # the kernel delivered the signal to another thread, the main thread does not wake from its wait. Python writes to the
    # wake-up descriptor at once, in whichever thread got the signal.

    def hear() -> None:
        while signals := reader.recv(_READ_SIZE):
            for number in signals:
                if number in numbers and signal.getsignal(number) is _heard_elsewhere:
                    handle(number)

    reader, writer = socket.socketpair()
    # A signal handler must never block, even if the thread below is behind.
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
    """Do nothing: the thread of _heard() has handled the signal already."""


class ThreadFailures:
    """The exceptions that threads of the driver have not caught, in their order.

    Each ends the job, with a report and exit code 70: no thread of the driver may end unnoticed.
    """

    def __init__(self, post: Callable[[Event], None]) -> None:
        self._post = post
        self._errors: list[tuple[Problem, BaseException | None]] = []

    @property
    def first(self) -> Problem | None:
        return self._errors[0][0] if self._errors else None

    def hook(self, args: threading.ExceptHookArgs) -> None:
        """Record the exception and post it; this is threading.excepthook, called in the failing thread."""
        name = "of hvlaunch" if args.thread is None else args.thread.name
        words = " ".join(f"{args.exc_type.__name__}: {args.exc_value}".split())
        cause = f"internal error in thread {name}: {words}; this is a defect of hvlaunch"
        problem = Defect(cause, hint="the same with --verbose, and report it").problem
        self._errors.append((problem, args.exc_value))
        self._post(ThreadFailed(problem))

    def traceback(self) -> str:
        """Return the traceback of the first exception; empty if no thread has failed."""
        import traceback  # noqa: PLC0415 (after a defect only)

        error = self._errors[0][1] if self._errors else None
        return "" if error is None else "".join(traceback.format_exception(error))


@contextmanager
def failures_as_events(post: Callable[[Event], None]) -> Iterator[ThreadFailures]:
    """Post each exception that a thread does not catch as an event while in the block."""
    failures = ThreadFailures(post)
    before, threading.excepthook = threading.excepthook, failures.hook
    try:
        yield failures
    finally:
        threading.excepthook = before


def loud(call: Callable[P, None]) -> Callable[P, None]:
    """Wrap `call` to report its exceptions to threading.excepthook, for callers that swallow exceptions (an event loop)."""

    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            call(*args, **kwargs)
        except Exception:  # noqa: BLE001 (every exception is a defect, and is reported)
            kind, error, trace = sys.exc_info()
            _report(kind, error, trace)

    return run


def _report(
    kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    if kind is not None:
        threading.excepthook(threading.ExceptHookArgs((kind, error, trace, threading.current_thread())))
