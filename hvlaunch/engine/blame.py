"""Which of the workers that failed is the cause, where others ended only because of it. Pure."""

from collections.abc import Iterable

from hvlaunch.job import WorkerExit

__all__ = ["cause_of", "first_failed", "may_be_consequence"]

_OWN, _OWN_WHEN_STOPPED, _UNCLEAR, _CONSEQUENCE = range(4)


def may_be_consequence(end: WorkerExit) -> bool:
    """Whether another worker may be the cause of this failure, by what its end looks like."""
    return _weight(end) > _OWN


def first_failed(ends: Iterable[WorkerExit]) -> WorkerExit | None:
    """By the time of its end, not by when the news came: hosts are at different distances."""
    return min(_failures(ends), key=lambda end: (end.when, end.rank), default=None)


def cause_of(ends: Iterable[WorkerExit]) -> WorkerExit | None:
    """The first of those whose own error it was, even if hvlaunch had stopped it; else the first that failed."""
    ends = tuple(ends)
    suspects = _failures(ends)
    if suspects:
        suspects += [end for end in ends if end.stopped and end.look in ("cause", "unclear")]
    return min(suspects, key=lambda end: (_weight(end), end.when, end.rank), default=None)


def _failures(ends: Iterable[WorkerExit]) -> list[WorkerExit]:
    return [end for end in ends if not end.ok and not end.stopped]


def _weight(end: WorkerExit) -> int:
    if end.oom_killed or end.port_taken_by is not None:
        return _OWN
    match end.look:
        case "consequence":
            return _CONSEQUENCE
        case "unclear":
            return _UNCLEAR
        case "cause":
            return _OWN_WHEN_STOPPED if end.stopped or end.was_told else _OWN
        case _:
            return _CONSEQUENCE if end.was_told else _OWN
