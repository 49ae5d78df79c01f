"""Turns in which nothing happens come to little, and one event can stand for any number of them. Pure."""

from hvlaunch.engine.events import Lull, Sign
from hvlaunch.engine.health import Health
from hvlaunch.engine.pool import Pool
from hvlaunch.engine.rounds import Rounds

__all__ = ["lull", "pass_over", "tally"]


def tally(rounds: Rounds, pool: Pool) -> tuple[int, int]:
    """What a Tick may change before anything is due: then its turn is not idle."""
    return sum(worker.drain_until is not None for worker in rounds.workers), pool.resting


def lull(rounds: Rounds, health: Health | None, due: float | None, deadline: float | None) -> Lull:
    """All that idle turns can have changed."""
    current = rounds.round
    if current is None or health is None:
        return Lull(due=due, deadline=deadline)
    signs = tuple(Sign(worker.host, worker.slot, worker.commit, worker.beat_at) for worker in rounds.workers)
    return Lull(signs, current.commit, current.commit_at, health.next_check, due, deadline)


def pass_over(event: Lull, rounds: Rounds, health: Health | None) -> None:
    """Be as after the turns that the event stands for."""
    for sign in event.signs:
        for worker in rounds.workers.of([(sign.host, sign.slot)]):
            worker.commit, worker.beat_at = sign.commit, sign.beat_at
    if rounds.round is not None and health is not None:
        rounds.round.commit, rounds.round.commit_at = event.commit, event.commit_at
        health.next_check = event.next_check
