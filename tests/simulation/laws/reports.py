"""Reports: what users are told of the pool is true, and they are told in time."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.lifecycle import AT_WORK
from hvlaunch.job import JobResult
from tests.simulation.laws.law import Law

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Reports"]

_EPSILON = 1e-6
_SOON = 1.0


class Reports(Law):
    def __init__(self, world: "ElasticWorld") -> None:
        super().__init__(world)
        self._has_discovery_failed = False
        self._short_since = math.inf
        self._short_in: int | None = None
        """Round after which a lack of slots was reported."""
        self._ended_at = math.inf
        self._well_at_end: list[str] = []
        """Hosts that were well when the job's end began: its error is made then."""

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        options = self.world.options
        for action in actions:
            if isinstance(action, tell.SlotsLacking):
                assert action.least == options.min_np, f"{action.least} workers are not the least"
                assert action.available < action.least, f"{action} names slots enough"
                assert action.seconds == options.elastic_timeout
                self._short_in = self._number
            elif isinstance(action, tell.HostNotUsable):
                assert isinstance(action.goes_on, bool), f"{action} is no report of a host"
        if isinstance(event, on.HostsDiscovered):
            self._has_discovery_failed = False
        elif isinstance(event, on.DiscoveryFailed) and self.ledger.is_pool_known:
            is_told = any(isinstance(action, tell.KeepingHosts) for action in actions)
            assert is_told is not self._has_discovery_failed, "a failure of discovery is not told once"
            self._has_discovery_failed = True

    @property
    def _number(self) -> int:
        return -1 if self.ledger.current is None else self.ledger.current.number

    def after(self) -> None:
        world, ledger = self.world, self.ledger
        if world.engine.phase not in AT_WORK:
            if self._ended_at == math.inf:
                self._ended_at = ledger.now
                self._well_at_end = [host.name for host in ledger.hosts.values() if host.is_well]
            return
        is_in_round = any(worker.round is not None or worker.is_told for worker in ledger.workers.values())
        slots = sum(host.slots for host in ledger.usable())
        # Workers of leaving hosts may be in another round, to hand their state over.
        slots = max(slots, sum(worker.has_asked for worker in ledger.living()))
        if ledger.current is None or is_in_round or slots >= world.options.min_np or world.is_late:
            self._short_since = math.inf
            return
        self._short_since = min(self._short_since, ledger.now)
        is_told = self._short_in == self._number or ledger.now <= self._short_since + _SOON
        assert is_told, f"there are only {slots} slots, and nobody is told"

    def end(self, result: JobResult) -> None:
        error = result.error
        if error is None:
            return
        if error.kind == "NotEnoughSlotsInTime":
            began = 0.0 if self.ledger.current is None else self.ledger.current.began_at
            short = min(self._ended_at, self.ledger.now) - began
            least = self.world.options.elastic_timeout - _EPSILON
            assert short >= least, f"slots were awaited for {short:g} s, not for {least:g}"
        named = {problem.host for problem in (error, *error.errors) if problem.kind != "Unreachable"}
        for name in self._well_at_end:
            # A pair without a path is named by the host that tried, and the other one may be left out.
            failures = error.cause.replace(f"\nhost {name}: can't connect to host ", "")
            is_named = name in named or f"\nhost {name}: " in failures
            assert not is_named, f"{name} is well again, and its old failure is named"
