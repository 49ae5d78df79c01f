"""Restarts: exactly --max-restarts failures within --restart-window lead to another round; a job with progress is not given up."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.round import FRUITLESS_IN_A_ROW
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
        self._failed: dict[int, float] = {}
        """Times of the failures by round."""
        self._emptied: dict[int, float] = {}
        """Times when the last worker of a round ended or was lost."""
        self._unclear: set[int] = set()
        self._ended: set[int] = set()
        self._lost: set[int] = set()
        """Rounds that lost a host, which says nothing of their workers."""
        self._fruitless = 0
        """Failed rounds in a row without progress."""
        self._has_excluded = False
        """True if a host was excluded since the newest round began, so that the next one may go better."""

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        limit = self.world.options.max_restarts
        for action in actions:
            if isinstance(action, tell.RoundStarting | tell.RoundFormed):
                self._check_progress()
            self._has_excluded = self._has_excluded or isinstance(action, tell.HostExcluded)
            if isinstance(action, do.Break | tell.RoundEnding):
                self._ended.add(action.round)
                if isinstance(action.cause, _FAILURES):
                    self._failed[action.round] = self.ledger.now
                if isinstance(action.cause, why.HostProblem):
                    self._lost.add(action.round)
                elif action.round not in self._failed:
                    self._unclear.add(action.round)
            elif isinstance(action, tell.RoundStarting) and self.ledger.current is not None:
                before = self.ledger.current.number
                # With nobody left to stop, a round fails without an action, and long before another one may begin.
                if before not in self._ended:
                    self._failed[before] = self._emptied.get(before, self.ledger.now)
            elif isinstance(action, tell.JobEnding) and isinstance(action.cause, why.RestartsUsedUp):
                assert limit is not None, "there is no limit"
                assert action.cause.limit == limit, f"{action.cause.limit} restarts, and {limit} were allowed"
                failed = self._recent(self._failed)
                unclear = self._recent({number: self._left_at(number) for number in self._unclear})
                least, most = len(failed), len(failed | unclear) + self._doubtful
                assert least <= limit <= most, f"{least} restarts, and {limit} were allowed"
            elif isinstance(action, tell.JobEnding) and isinstance(action.cause, why.NoProgress):
                last = sorted(self.ledger.rounds.items())[-action.cause.times :]
                fruitful = [number for number, failed_round in last if failed_round.best > failed_round.base]
                assert not fruitful, f"the job gets nowhere, and has got on in round {fruitful[0]}"
                self._check_spares(event, action.cause)
        if limit is not None:
            failed = self._recent(self._failed)
            assert len(failed) <= limit, f"{len(failed)} failures are made up for, of {limit}"

    def _check_spares(self, event: on.Event, cause: why.NoProgress) -> None:
        """Check that the job does not end for a host that fails while one that could replace it is connecting."""
        ledger, name = self.ledger, cause.suspect
        is_own = isinstance(event, on.WorkerExited) and event.host == name and event.look != "consequence"
        if (
            not is_own
            or self.world.is_late
            or {one.host for one in ledger.living() if one.commit >= 0} == {name}
        ):
            return
        connecting = [
            host
            for host in ledger.hosts.values()
            if host.is_listed and host.link == "connecting" and ledger.now >= host.until
        ]
        ready = sum(host.slots for host in ledger.usable() if host.name != name)
        both = ready + sum(host.slots for host in connecting if host.name != name)
        assert not ready < self.world.options.min_np <= both, (
            f"the job ends for {name} before its spare is there"
        )

    def _check_progress(self) -> None:
        """Check that no other round begins after too many in a row that failed without progress."""
        last = self.ledger.current
        if last is not None and last.is_fruitful(self.ledger.now):
            self._fruitless = 0
        # An exclusion counts neither way: the round after it may go better.
        elif self._has_excluded:
            pass
        elif last is not None and last.number in self._failed and last.number not in self._lost:
            self._fruitless += 1
        self._has_excluded = False
        assert self._fruitless < FRUITLESS_IN_A_ROW, (
            f"{self._fruitless} rounds in a row made no progress, and another follows"
        )

    def after(self) -> None:
        current = self.ledger.current
        if current is not None and not self.ledger.workers:
            self._emptied.setdefault(current.number, self.ledger.now)

    def _recent(self, times: Mapping[int, float]) -> set[int]:
        """Return the rounds that failed within --restart-window."""
        since = self.ledger.now - self.world.options.restart_window
        return {number for number, at in times.items() if at >= since}

    @property
    def _doubtful(self) -> int:
        """Failures without an action: of a round that was changing already, or had no workers left."""
        since = self.ledger.now - self.world.options.restart_window
        doubtful = (number for number in self.ledger.rounds if number not in self._ended)
        return sum(self._left_at(number) >= since for number in doubtful) - 1

    def _left_at(self, number: int) -> float:
        """Return when the next round began: a round without an end of its own failed before."""
        later = [other.began_at for other in self.ledger.rounds.values() if other.number > number]
        return min(later, default=self.ledger.now)
