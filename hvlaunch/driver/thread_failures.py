"""No thread of the driver ends unheard: whatever one raises ends the job, with a report and exit code 70."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import ParamSpec

from hvlaunch.engine.events import Event, ThreadFailed
from hvlaunch.errors import Defect, Problem

__all__ = ["ThreadFailures", "failures_as_events", "loud"]

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
