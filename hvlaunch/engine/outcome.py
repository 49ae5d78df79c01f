"""How a job ended, or how its workers are meanwhile. Pure."""

from hvlaunch.engine.actions import Action, Finish, GroupState
from hvlaunch.engine.blame import cause_of, first_failed
from hvlaunch.engine.causes import NoProgress, RestartsUsedUp
from hvlaunch.engine.policy import Ending
from hvlaunch.engine.round import Round, RoundState
from hvlaunch.errors import GaveUp, Problem
from hvlaunch.job import JobResult

__all__ = ["GroupStates", "final_state", "outcome"]


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


class GroupStates:
    """How the workers of an elastic job are, in torch.distributed.elastic's words: told when it changes."""

    def __init__(self) -> None:
        self._told: tuple[str, int | None] = ("", None)

    def tell(
        self, actions: list[Action], final: str | None, current: Round | None, *, has_workers: bool
    ) -> None:
        """Add the state to a turn's actions, if it is news. Finish stays the last of them."""
        state = final or _group_state(current, has_workers=has_workers)
        if self._told != (state, None if current is None else current.number):
            self._told = state, None if current is None else current.number
            is_over = bool(actions) and isinstance(actions[-1], Finish)
            actions.insert(len(actions) - is_over, GroupState(*self._told))


def _group_state(current: Round | None, *, has_workers: bool) -> str:
    """Of a job that goes on."""
    if current is None:
        return "INIT"
    if not has_workers:
        return "STOPPED"
    if current.state is not RoundState.BROKEN:
        return "HEALTHY"
    return "UNKNOWN" if current.is_unknown else "UNHEALTHY"


def final_state(result: JobResult) -> str:
    """The same of one that has ended."""
    if result.interrupted is not None:
        return "STOPPED"
    return "SUCCEEDED" if result.exit_code == 0 else "FAILED"
