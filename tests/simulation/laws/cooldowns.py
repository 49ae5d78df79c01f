"""Cool-downs: no connection before the end, one after it if slots are needed, the right length, and a look at the end."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.lifecycle import AT_WORK
from tests.simulation.laws.law import Law

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Cooldowns"]

_EPSILON = 1e-6
_SOON = 0.5
_FOR_NEEDED = (5.0, 300.0)


class Cooldowns(Law):
    def __init__(self, world: "ElasticWorld") -> None:
        super().__init__(world)
        self._last: dict[str, tuple[float, float]] = {}
        """End and length of each host's newest cool-down."""
        self._has_lost = False
        """True if this turn has lost a host."""

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        self._has_lost = isinstance(event, on.HostGone)
        # Their cool-downs end within the turn.
        stay = {action.host for action in actions if isinstance(action, tell.HostStays) and action.was_moving}
        for action in actions:
            if isinstance(action, do.Connect) and action.host.name not in stay:
                until = self.ledger.host(action.host.name).until
                assert self.ledger.now >= until - _EPSILON, (
                    f"{action.host.name} is connected in its cool-down"
                )
            elif isinstance(action, tell.HostExcluded):
                self._check_length(action.host, action.seconds)
            elif isinstance(action, tell.HostNotUsable) and action.problem.host is not None:
                self._check_length(action.problem.host, action.retry_in)

    def _check_length(self, name: str, seconds: float | None) -> None:
        bounds = self.world.options.cooldown
        if bounds is None:
            assert seconds is None or _FOR_NEEDED[0] <= seconds <= _FOR_NEEDED[1], f"excluded for {seconds} s"
            return
        assert seconds is not None, "excluded for good"
        least, most = bounds
        until, last = self._last.get(name, (-math.inf, 0.0))
        right = least if self.ledger.now > until + 2 * most else min(most, 2 * last)
        assert seconds == right, f"{name} is excluded for {seconds} s, in place of {right}"
        self._last[name] = (self.ledger.now + seconds, seconds)

    def _check_lost(self) -> None:
        """Check that a lost host is not excluded for good while the job needs it, and that all are tried when the last one is lost."""
        listed = [host for host in self.ledger.hosts.values() if host.is_listed]
        lost = [host.name for host in listed if host.is_lost_for_good]
        able = self.ledger.usable() if self._has_lost else [host for host in listed if host.until < math.inf]
        self._has_lost = False
        slots = sum(host.slots for host in able)
        assert not lost or slots >= self.world.options.min_np, f"{lost[0]} is needed, and excluded for good"

    def _check_look(self) -> None:
        """Check that the engine looks again when the next cool-down of a host ends: nothing else may happen then."""
        ends = [
            host.until
            for host in self.ledger.hosts.values()
            if host.is_listed and host.link == "none" and self.ledger.now < host.until < math.inf
        ]
        deadline = self.world.engine.deadline
        assert not ends or (deadline is not None and deadline <= min(ends) + _EPSILON), (
            "the engine sleeps beyond the end of a cool-down"
        )

    def after(self) -> None:
        world, ledger = self.world, self.ledger
        if world.engine.phase not in AT_WORK or not ledger.is_pool_known:
            return
        # Old messages that a driver has not read yet change nothing in this.
        self._check_look()
        if world.is_late:
            return
        self._check_lost()
        idle = [
            host
            for host in ledger.hosts.values()
            if host.is_listed
            and host.link == "none"
            and ledger.now > max(host.until, host.idle_since, world.asleep_until) + _SOON
        ]
        if not idle:
            return
        most = world.options.max_np
        room = math.inf if most is None else most + world.options.spares
        connected = [host for host in ledger.hosts.values() if host.link in ("connecting", "ready")]
        slots = sum(host.slots for host in connected if host.is_listed and ledger.now >= host.until)
        others = sum(host.link == "connecting" and ledger.now < host.until for host in connected)
        assert slots >= room or others, f"nobody connects to {idle[0].name}, whose cool-down is over"
