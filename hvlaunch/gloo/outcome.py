"""How a job ended, or how its workers are meanwhile. Pure."""

from hvlaunch.gloo.policy import Ending
from hvlaunch.gloo.round import Round, RoundState
from hvlaunch.job import JobResult

__all__ = ["group_state", "outcome"]


def outcome(ending: Ending, last: Round | None, interrupted: int | None, ended_at: float) -> JobResult:
    """The result of a job whose last round, if there was any, is `last`. `interrupted` is a signal's number."""
    failure = None
    if interrupted is not None:
        code = 128 + interrupted
    elif ending.error is not None:
        code = ending.error.exit_code  # workers that failed then lost their peers: no causes
    else:
        failure = (last.first_failure if last is not None else None) or ending.failure
        code = failure.exit_code if failure is not None else 0
    return JobResult(
        exit_code=code,
        elapsed=ended_at - last.started_at if last is not None else 0.0,
        exits=tuple(last.exits[rank] for rank in sorted(last.exits)) if last is not None else (),
        failure=failure,
        error=ending.error,
        interrupted=interrupted,
    )


def group_state(current: Round | None, *, has_workers: bool) -> str:
    """How the workers of a job that goes on are, in torch.distributed.elastic's words."""
    if current is None:
        return "INIT"
    if not has_workers:
        return "STOPPED"
    if current.state is not RoundState.BROKEN:
        return "HEALTHY"
    return "UNKNOWN" if current.is_unknown else "UNHEALTHY"
