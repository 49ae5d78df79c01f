"""Breaks: all workers of an ended round have left it before the next one begins."""

from collections.abc import Sequence

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from tests.simulation.laws.law import Law

__all__ = ["Breaks"]


class Breaks(Law):
    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        stopped: set[tuple[str, int]] = set()
        given_up = {action.host for action in actions if isinstance(action, do.Abandon | tell.HostSetAside)}
        for action in actions:
            if isinstance(action, do.Stop) and action.slots is not None:
                stopped.update((action.host, slot) for slot in action.slots)
            elif isinstance(action, tell.RoundFormed):
                living = (
                    worker for worker in self.ledger.living() if (worker.host, worker.slot) not in stopped
                )
                late = [
                    worker for worker in living if worker.round is not None and worker.host not in given_up
                ]
                assert not late, f"round {action.round} begins, and {late[0]} is still in its round"
            elif isinstance(action, tell.RoundStarting):
                late = [worker for worker in self.ledger.workers.values() if worker.host not in given_up]
                assert not late, f"round {action.round} begins, and {late[0]} lives"
