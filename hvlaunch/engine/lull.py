"""Turns in which nothing happens come to little, and one event can stand for any number of them. Pure."""

from hvlaunch.engine.events import Lull, Sign
from hvlaunch.engine.rounds import Rounds
from hvlaunch.engine.waits import Wait, Waits

__all__ = ["lull", "pass_over", "tally"]


def tally(waits: Waits) -> tuple[int, int]:
    """What a Tick may change before anything is due: then its turn is not idle."""
    return len(waits.all_of(Wait.DRAINING)), len(waits.all_of(Wait.COOLDOWN))


def lull(rounds: Rounds, waits: Waits, due: float | None, deadline: float | None) -> Lull:
    """All that idle turns can have changed."""
    current = rounds.round
    commit_at = waits.since(Wait.COMMIT)
    if current is None or commit_at is None:
        return Lull(due=due, deadline=deadline)
    signs = tuple(Sign(worker.host, worker.slot, worker.commit, worker.beat_at) for worker in rounds.workers)
    return Lull(signs, current.commit, commit_at, waits.until(Wait.SILENCE_LOOK), due, deadline)


def pass_over(event: Lull, rounds: Rounds, waits: Waits, commit_timeout: float) -> None:
    """Be as after the turns that the event stands for."""
    for sign in event.signs:
        for worker in rounds.workers.of([(sign.host, sign.slot)]):
            worker.commit, worker.beat_at = sign.commit, sign.beat_at
    if rounds.round is None or not waits.has(Wait.COMMIT):
        return
    rounds.round.committed(event.commit)
    waits.begin(Wait.COMMIT, None, event.commit_at, commit_timeout)
    if event.next_check is None:
        waits.end(Wait.SILENCE_LOOK)
    else:
        waits.begin(Wait.SILENCE_LOOK, None, event.next_check)
