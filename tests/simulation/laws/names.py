"""Names: every named host or rank has a fault."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from tests.simulation.laws.law import Law

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Names"]

_PROBING = 16.0
"""Seconds of probing between hosts that answer."""
_ROUNDING = 1e-6
_ON_ITS_WAY = 2.0
"""Seconds that a request takes at most to a driver that the host can reach."""


class Names(Law):
    def __init__(self, world: "ElasticWorld") -> None:
        super().__init__(world)
        self._probing_since = math.inf
        """Time when hosts were first asked to probe each other for the next round."""

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        now = self.ledger.now
        for action in actions:
            match action:
                case do.Probe():
                    self._probing_since = min(self._probing_since, now)
                case tell.RoundFormed() | tell.RoundStarting():
                    self._probing_since = math.inf
                case tell.HostExcluded(name, _, cause):
                    self._check_excluded(name, cause)
                case tell.HostNotUsable(problem):
                    assert problem.host is not None
                    self._check_faulty(problem.host)
                case tell.HostNotClosing(name) if not isinstance(event, on.Interrupted):
                    self._check_faulty(name)
                case tell.WorkerKilled(why.WorkerHangs(_, name, "stopped")):
                    workers = (worker for worker in self.ledger.workers.values() if worker.host == name)
                    has_hung = any(str(worker) in self.world.workers.hung for worker in workers)
                    assert has_hung or name in self.world.faulty, f"a worker of {name} is killed for nothing"
                case tell.WorkerKilled(why.WorkerHangs(_, name, "late")):
                    self._check_late(name)
                case tell.WorkerStartFailed(end):
                    same = [
                        other
                        for other in self.ledger.ends
                        if (other.host, other.code) == (end.host, end.code)
                    ]
                    assert same, f"no worker of {end.host} ended so"

    def _check_late(self, name: str) -> None:
        members = [
            worker
            for worker in self.ledger.workers.values()
            if worker.host == name and worker.round is not None
        ]
        processes = [self.world.workers.find(worker.host, worker.slot, worker.start) for worker in members]
        has_asked = [
            process is not None
            and process.asked_after == process.last_round
            and (
                process.told_after == process.last_round or process.asked_at <= self.ledger.now - _ON_ITS_WAY
            )
            for process in processes
        ]
        is_late = not has_asked or not all(has_asked) or self._is_waited_out(name)
        assert is_late, f"{name}'s workers are killed as late, and have asked"
        current = self.ledger.current
        broken_at = -math.inf if current is None or not current.is_broken else current.broken_at
        had_time = self.ledger.now >= broken_at + self.world.options.reset_timeout - _ROUNDING
        assert had_time, f"{name}'s workers are killed as late before they had time to ask"

    def _is_waited_out(self, name: str) -> bool:
        """True if the host could not report requests for the longest time that a broken round lasts."""
        now, current, reset_timeout = self.ledger.now, self.ledger.current, self.world.options.reset_timeout
        could_tell = self.ledger.host(name).answers_since <= now - reset_timeout
        broken_at = math.inf if current is None else current.broken_at
        return not could_tell and now - broken_at >= self.world.spec.lease + 2 * reset_timeout

    def _check_excluded(self, name: str, cause: why.Cause) -> None:
        if isinstance(cause, why.WorkersFail):
            assert cause.cause.host == name, f"{name} is excluded for {cause.cause.host}"
        elif isinstance(cause, why.HostProblem):
            pair = {cause.problem.host, cause.problem.other or cause.problem.host}
            assert name in pair, f"{name} is excluded for {pair}"
            assert pair & self.world.faulty, f"{name} has no fault, and is named"
            if cause.problem.kind == "Unreachable":
                self._check_kept(name, pair)
                is_cut = frozenset(pair) in self.world.cut_pairs | self.world.healed_pairs
                has_time = self.ledger.now < self._probing_since + self.world.spec.lease + _PROBING
                is_silent = self.ledger.host(name).answers_since == math.inf and not has_time
                is_excused = is_cut or is_silent or self.world.is_late
                assert is_excused, f"{name} is excluded for a cut of {pair}, which heals"

    def _check_kept(self, name: str, pair: set[str | None]) -> None:
        """Check that the better host of a pair is kept: the only one with the state, or else one that answers."""
        living = list(self.ledger.living())
        assert {worker.host for worker in living if worker.commit >= 0} != {name}, (
            f"only {name} has the state"
        )
        silent = {other for other in pair if other and self.ledger.host(other).is_silent}
        holders = {worker.host for worker in living if worker.commit >= 0}
        assert not silent or name in silent or holders == silent, (
            f"{silent} is silent, and {name} is left out"
        )

    def _check_faulty(self, name: str) -> None:
        assert name in self.world.faulty, f"{name} has no fault, and is named"
