"""How a job ended, or how its workers are meanwhile. Pure."""

from hvlaunch.errors import GaveUp, Problem
from hvlaunch.gloo.engine.causes import NoProgress, RestartsUsedUp
from hvlaunch.gloo.engine.policy import Ending
from hvlaunch.gloo.engine.round import Round, RoundState
from hvlaunch.job import JobResult

__all__ = ["final_state", "group_state", "outcome"]


def outcome(
    ending: Ending,
    last: Round | None,
    interrupted: int | None,
    ended_at: float,
    *,
    last_rank: int | None = None,
) -> JobResult:
    """The result of a job whose last round, if there was any, is `last`. `interrupted` is a signal's number.

    Where the job ends with `last_rank`, what others do after its end does not count.
    """
    failed = (last.first_failure if last is not None else None) or ending.failure
    end = last.exits.get(last_rank) if last is not None and last_rank is not None else None
    if end is not None and end.ok and failed is not None and end.when <= failed.when:
        failed = None
    error = ending.error
    if error is None and failed is None:
        error = _gave_up(ending)
    if interrupted is not None:
        code, failure = 128 + interrupted, None
    elif error is not None:
        code, failure = error.exit_code, None  # workers that failed then lost their peers: no causes
    else:
        code, failure = failed.exit_code if failed is not None else 0, failed
    return JobResult(
        exit_code=code,
        elapsed=ended_at - last.started_at if last is not None else 0.0,
        exits=tuple(last.exits[rank] for rank in sorted(last.exits)) if last is not None else (),
        failure=failure,
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
