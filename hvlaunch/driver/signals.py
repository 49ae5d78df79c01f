"""The signals of the driver's process, as events."""

import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager

from hvlaunch.driver.observing.inquiry import Inquiry, StacksWanted
from hvlaunch.engine.events import Event, Interrupted, UserSignal

__all__ = ["signals_as_events"]

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
