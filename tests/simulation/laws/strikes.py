"""Strikes: two failures without progress since its listing exclude a host; progress forgives."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from tests.simulation.laws.law import Law

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Strikes"]


class Strikes(Law):
    def __init__(self, world: "ElasticWorld") -> None:
        super().__init__(world)
        self._excluded: set[str] = set()
        """Hosts on probation: one failure excludes them."""
        self._struck: set[str] = set()
        """These and hosts that have failed since they were listed."""

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        ledger = self.ledger
        if isinstance(event, on.HostsDiscovered):
            for names in (self._excluded, self._struck):
                names -= {name for name in names if not ledger.host(name).is_listed}
        for action in actions:
            if isinstance(action, tell.HostExcluded):
                if isinstance(action.cause, why.WorkersFail):
                    self._check(action.host, action.cause.cause, actions)
                self._excluded.add(action.host)
                self._struck.add(action.host)

            elif isinstance(action, do.Break | tell.RoundEnding):
                self._check_probation(event, action.cause, actions)

    def _check_probation(self, event: on.Event, cause: why.Cause, actions: Sequence[do.Action]) -> None:
        """Check that a host is excluded again at its next failure, if the job can do without it."""
        if not (isinstance(cause, why.WorkerEnded) and isinstance(event, on.WorkerExited)):
            return
        ledger, name, current = self.ledger, cause.host, self.ledger.current
        # A good end, or a victim's, may also end the wait for the cause: the named failure is an older one then.
        is_named = (event.host, event.code, event.signal) == (name, cause.code, cause.signal)
        is_own = is_named and event.look != "consequence"
        if not is_own or current is None:
            return
        is_first = name not in self._struck
        self._struck.add(name)
        if is_first or current.is_fruitful(ledger.now):
            return
        suspected = {host.name for host in ledger.hosts.values() if host.is_suspected}
        slots = sum(host.slots for host in ledger.usable() if host.name not in suspected | {name})
        holders = {worker.host for worker in ledger.living() if worker.commit >= 0}
        is_excluded = any(isinstance(action, tell.HostExcluded) and action.host == name for action in actions)
        is_alone = bool(holders) and holders - {name} <= suspected
        is_needed = slots < self.world.options.min_np or is_alone
        assert is_excluded or is_needed or self.world.is_late, f"{name} fails again, and is not excluded"

    def _check(
        self, name: str, last: why.WorkerEnded | why.WorkerHangs, actions: Sequence[do.Action]
    ) -> None:
        host, current = self.ledger.host(name), self.ledger.current
        killed = sum(
            isinstance(action, tell.WorkerKilled) and action.cause.host == name for action in actions
        )
        failures = host.failures + killed + (name in self._excluded)
        assert failures > 1, f"{name} is excluded for {failures} failures since it was listed"
        is_start = any(isinstance(action, tell.WorkerStartFailed) for action in actions)
        failed = [end for end in self.ledger.ends if end.host == name and end.is_failure]
        was_member = isinstance(last, why.WorkerHangs) or (bool(failed) and failed[-1].was_member)
        if current is not None and was_member and not is_start and not self.world.is_late:
            assert not current.is_fruitful(self.ledger.now), f"{name} is excluded in spite of progress"
