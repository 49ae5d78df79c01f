"""The signals of the driver's process, as events."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hvlaunch.gloo.driver.inquiry import Inquiry, StacksWanted
from hvlaunch.gloo.engine.events import Event, Interrupted, UserSignal

__all__ = ["signals_as_events"]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def signals_as_events(
    post: Callable[[Event | Inquiry | StacksWanted], None],
    hangup: Event | Inquiry | None = None,
    wanted: StacksWanted | None = None,
) -> Iterator[None]:
    """While in the block, SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are events; SIGHUP is `hangup`, and SIGQUIT
    (Ctrl and the backslash) is `wanted`, if they are given.

    What is ignored already stays ignored (nohup, jobs in the background of a shell script). Reading
    stdin in the background of a terminal is an error, and does not stop the process. Outside the
    main thread, Python lets nobody handle signals, and nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _frame: object) -> None:
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
            signal.signal(number, handle)
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
