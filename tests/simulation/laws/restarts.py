"""Restarts: exactly --max-restarts failures lead to another round; a job with progress is not given up."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from tests.simulation.laws.law import Law

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Restarts"]

_FAILURES = (
    why.WorkerEnded,
    why.WorkerHangs,
    why.WorkerLeft,
    why.NoCommit,
    why.JobHung,
    why.NotMet,
    why.HostProblem,
)


class Restarts(Law):
    def __init__(self, world: "ElasticWorld") -> None:
        super().__init__(world)
        self._failed: set[int] = set()
        self._unclear: set[int] = set()
        self._ended: set[int] = set()
        self._total = 0

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        limit = self.world.options.max_restarts
        for action in actions:
            if isinstance(action, do.Break | tell.RoundEnding):
                self._ended.add(action.round)
                if isinstance(action.cause, _FAILURES):
                    self._failed.add(action.round)
                elif action.round not in self._failed:
                    self._unclear.add(action.round)
            elif isinstance(action, tell.RoundStarting) and self.ledger.current is not None:
                before = self.ledger.current.number
                if before not in self._ended:  # all had ended of themselves
                    self._failed.add(before)
            elif isinstance(action, tell.JobEnding) and isinstance(action.cause, why.RestartsUsedUp):
                assert limit is not None, "there is no limit"
                assert action.cause.limit == limit, f"{action.cause.limit} restarts, and {limit} were allowed"
                least, most = len(self._failed), len(self._failed | self._unclear) + self._doubtful
                assert least <= limit <= most, f"{least} restarts, and {limit} were allowed"
            elif isinstance(action, tell.JobEnding) and isinstance(action.cause, why.NoProgress):
                last = sorted(self.ledger.rounds.items())[-action.cause.times :]
                fruitful = [number for number, failed_round in last if failed_round.best > failed_round.base]
                assert not fruitful, f"the job gets nowhere, and has got on in round {fruitful[0]}"
        if limit is not None:
            assert len(self._failed) <= limit, f"{len(self._failed)} failures are made up for, of {limit}"

    @property
    def _doubtful(self) -> int:
        """Failures without an action: of a round that was changing already, or had no workers left."""
        return sum(number not in self._ended for number in self.ledger.rounds) - 1
