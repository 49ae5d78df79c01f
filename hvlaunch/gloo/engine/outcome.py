"""How a job ended, or how its workers are meanwhile. Pure."""

from hvlaunch.errors import GaveUp, Problem
from hvlaunch.gloo.engine.blame import cause_of, first_failed
from hvlaunch.gloo.engine.causes import NoProgress, RestartsUsedUp
from hvlaunch.gloo.engine.policy import Ending
from hvlaunch.gloo.engine.round import Round, RoundState
from hvlaunch.job import JobResult

__all__ = ["final_state", "group_state", "outcome"]


def outcome(
    ending: Ending,
    last: Round | None,
    interrupted: int | None,
    elapsed: float,
    *,
    last_rank: int | None = None,
) -> JobResult:
    """The result of a job whose last round, if there was any, is `last`. `interrupted` is a signal's number.

    Where the job ends with `last_rank`, what others do after its end does not count.
    """
    exits = last.exits if last is not None else {}
    end = exits.get(last_rank) if last_rank is not None else None
    counting = [one for one in exits.values() if end is None or not end.ok or one.when <= end.when]
    failed, first = cause_of(counting) or ending.failure, first_failed(counting)
    error = ending.error
    if error is None and failed is None:
        error = _gave_up(ending)
    if interrupted is not None:
        code, failure = 128 + interrupted, None
    elif error is not None:
        code, failure = error.exit_code, None  # workers that failed then lost their peers: no causes
    else:
        code, failure = failed.exit_code if failed is not None else 0, failed
        if failed is not None and failed.stopped and first is not None:
            code = first.exit_code  # the signal was ours
    return JobResult(
        exit_code=code,
        elapsed=elapsed,
        exits=tuple(exits[rank] for rank in sorted(exits)),
        failure=failure,
        first_victim=first if failure is not None and first is not failure else None,
        never_started=last.never_started if last is not None else (),
        error=error,
        interrupted=interrupted,
    )


def _gave_up(ending: Ending) -> Problem | None:
    match ending.cause:
        case RestartsUsedUp(limit):
            return GaveUp(restarts=limit).problem
        case NoProgress(times):
            return GaveUp(times=times).problem
        case _:
            return None


def group_state(current: Round | None, *, has_workers: bool) -> str:
    """How the workers of a job that goes on are, in torch.distributed.elastic's words."""
    if current is None:
        return "INIT"
    if not has_workers:
        return "STOPPED"
    if current.state is not RoundState.BROKEN:
        return "HEALTHY"
    return "UNKNOWN" if current.is_unknown else "UNHEALTHY"


def final_state(result: JobResult) -> str:
    """The same, when the job has ended."""
    if result.interrupted is not None:
        return "STOPPED"
    return "SUCCEEDED" if result.exit_code == 0 else "FAILED"
