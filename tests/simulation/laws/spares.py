"""Spares: workers are started in free slots while more are useful."""

import math
from typing import TYPE_CHECKING

from hvlaunch.engine.lifecycle import AT_WORK
from tests.simulation.laws.law import Law

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Spares"]

_SOON = 0.5


class Spares(Law):
    def __init__(self, world: "ElasticWorld") -> None:
        super().__init__(world)
        self._since: float | None = None

    def after(self) -> None:
        world, ledger = self.world, self.ledger
        if not ledger.is_asking or world.engine.phase not in AT_WORK or world.is_late:
            self._since = None
            return
        most = world.options.max_np
        living = sum(worker.host != ledger.moving for worker in ledger.living())
        room = (math.inf if most is None else most + world.options.spares) - living
        free = None if room < 1 else self._free()
        if free is None:
            self._since = None
        elif self._since is None:
            self._since = ledger.now
        else:
            assert ledger.now <= max(self._since, world.asleep_until) + _SOON, (
                f"no worker is started in {free}"
            )

    def _free(self) -> tuple[str, int] | None:
        ledger = self.ledger
        for host in ledger.hosts.values():
            is_leaving = host.name == ledger.moving or host.is_suspected
            if host.has_rendezvous and host.is_usable(ledger.now) and not is_leaving:
                for slot in range(host.slots):
                    seat = host.name, slot
                    if seat not in ledger.workers and ledger.now >= ledger.slot_waits.get(seat, 0.0):
                        return seat
        return None
