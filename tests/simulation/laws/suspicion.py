"""Suspicion: the others go on at once without a host that gives no sign of life, if they can, and no failure is counted."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.lifecycle import Phase
from tests.simulation.laws.law import Law

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Suspicion"]

_AT_ONCE = 0.5
_RETURN = 1.0


class Suspicion(Law):
    def __init__(self, world: "ElasticWorld") -> None:
        super().__init__(world)
        self._since: dict[str, float] = {}
        """Times since which the others could do without a suspected host, and have not left it."""
        self._returned: dict[str, float] = {}
        """Times since which workers that were set aside should have asked."""

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        for action in actions:
            match action:
                case tell.HostSetAside(name):
                    host = self.ledger.host(name)
                    assert host.is_suspected, f"{name} is set aside, and answers"
                    assert self._others_can_do(), f"{name} is set aside, and the others can't go on"
                case tell.HostExcluded(name, _, why.HostSilent()):
                    raise AssertionError(f"{name} is excluded because it is silent")
                case do.Assign(_, launch):
                    assert not self.ledger.host(launch.seat[0]).is_suspected, (
                        f"{launch.seat} gets a place, and its host gives no sign of life"
                    )

    def _others_can_do(self) -> bool:
        """True if hosts that answer have enough slots, and the state of the training."""
        ledger = self.ledger
        others = [host for host in ledger.usable() if not (host.is_suspected or host.is_silent)]
        if sum(host.slots for host in others) < self.world.options.min_np:
            return False
        current = ledger.current
        least = -1 if current is None else max(current.base, min(current.best, 0))
        names = {host.name for host in others}
        return least < 0 or any(worker.commit >= least for worker in ledger.living() if worker.host in names)

    def after(self) -> None:
        world, ledger = self.world, self.ledger
        if world.is_late or world.engine.phase is not Phase.RUNNING or not ledger.is_asking:
            self._since.clear()
            self._returned.clear()
            return
        for host in ledger.hosts.values():
            workers = [worker for worker in ledger.living() if worker.host == host.name]
            is_held = any(worker.round is not None for worker in workers)
            if host.is_suspected and is_held and self._others_can_do():
                since = self._since.setdefault(host.name, ledger.now)
                assert ledger.now <= max(since, world.asleep_until) + _AT_ONCE, (
                    f"{host.name} gives no sign of life, and the others wait for it"
                )
            else:
                self._since.pop(host.name, None)
            if any(worker.is_aside for worker in workers) and not host.is_suspected:
                since = self._returned.setdefault(host.name, ledger.now)
                most = world.options.reset_timeout + _RETURN
                assert ledger.now <= max(since, world.asleep_until) + most, (
                    f"{host.name} answers again, and its workers neither ask for places nor are they stopped"
                )
            else:
                self._returned.pop(host.name, None)
