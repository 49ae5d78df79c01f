"""Bounds: longest times from a cause to its effect."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.lifecycle import AT_WORK, Phase
from tests.simulation.laws.law import Law
from tests.simulation.ledger import End, Worker

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Bounds"]

_SLACK = 1.0
_PROBING = 8.0
_PATIENCE = 30.0
_KILLING = 17.0
"""Seconds from SIGKILL until the host of a surviving worker is given up."""
_CHECKED = 7.0
"""The same from the host's newest answer."""
_CLOSING = 25.0
_RESUMING = 5.0
"""Extra seconds for a driver that was stopped, to hear old news."""

Check = Callable[[], bool]


class Bounds(Law):
    """`_due` maps each expected effect to its time limit."""

    def __init__(self, world: "ElasticWorld") -> None:
        super().__init__(world)
        self._due: list[tuple[float, float, str, Check]] = []
        self._next = float("inf")
        self._is_ending = False
        self._stands_since: float | None = None
        self._usable: dict[str, int] = {}
        self._usable_since = 0.0
        self._last_end: End | None = None

    def _want(self, seconds: float, text: str, check: Check) -> None:
        due = self.ledger.now + seconds + _SLACK
        self._due.append((due, seconds + _SLACK, text, check))
        self._next = min(self._next, due)

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        options, ledger = self.world.options, self.ledger
        for action in actions:
            if isinstance(action, do.Break):
                text, most = "a broken round is not left", self.world.spec.lease + 2 * options.reset_timeout
                self._want(options.reset_timeout, text, partial(self._is_left, action.round, excuse=True))
                self._want(most, text, partial(self._is_left, action.round, excuse=False))
            elif isinstance(action, tell.RoundFormed):
                self._want(
                    2 * options.reset_timeout + _SLACK,
                    "a round begins, and its workers never meet",
                    partial(self._has_met, action.round),
                )
            elif isinstance(action, do.Stop):
                last = action.steps[-1].after
                ordered = [
                    worker
                    for worker in ledger.workers.values()
                    if worker.host == action.host and (action.slots is None or worker.slot in action.slots)
                ]
                for most, excuse in ((_KILLING, True), (_KILLING + self.world.spec.lease, False)):
                    self._want(
                        last + most,
                        f"a worker of {action.host} does not end, and the host is kept",
                        partial(self._are_gone, ordered, excuse=excuse),
                    )
        if (
            isinstance(event, on.HostParting)
            and (parted_at := ledger.host(event.host).parted_at) == ledger.now
        ):
            host = ledger.host(event.host)
            self._want(
                self.world.spec.grace + _CLOSING,
                f"the agent of {host.name} ends, and is waited for",
                lambda: host.parted_at != parted_at or host.link != "ready",
            )
        if isinstance(event, on.WorkerExited) and ledger.ends and ledger.current is not None:
            end, current = ledger.ends[-1], ledger.current
            is_news, self._last_end = end is not self._last_end, end
            if is_news and end.is_failure and end.was_member and end.heard_at == ledger.now:
                self._want(
                    self.world.spec.settle,
                    "a worker's failure leads to nothing",
                    lambda: current.is_broken or current is not ledger.current or not any(ledger.living()),
                )

    def _are_gone(self, workers: Sequence[Worker], *, excuse: bool) -> bool:
        """Check that workers are gone; hosts that can't report their ends, or could not until now, are excused."""
        since = self.ledger.now - _CHECKED if excuse else math.inf
        reporting = (worker for worker in workers if self._is_there(worker))
        return not any(self.ledger.host(worker.host).answers_since < since for worker in reporting)

    def _may_go_on(self, since: float, *, excuse: bool) -> bool:
        """Check a job that has been ending for long while hosts could not report their workers' ends."""
        return excuse and any(host.answers_since > since for host in self.ledger.hosts.values())

    def _is_there(self, worker: Worker) -> bool:
        return self.ledger.workers.get((worker.host, worker.slot)) is worker

    def _is_left(self, number: int, *, excuse: bool) -> bool:
        """Check that the round is left; silent hosts, or hosts that answer again only now, are excused."""
        since = self.ledger.now - self.world.options.reset_timeout if excuse else math.inf
        living = (worker for worker in self.ledger.living() if worker.round == number)
        return not any(self.ledger.host(worker.host).answers_since < since for worker in living)

    def _has_met(self, number: int) -> bool:
        current = self.ledger.current
        if current is None or current.number != number or current.is_broken:
            return True
        members = [worker for worker in current.members if worker.round == number and self._is_there(worker)]
        processes = [self.world.workers.find(worker.host, worker.slot, worker.start) for worker in members]
        return all(process is None or process.met >= number for process in processes)

    def after(self) -> None:
        world, ledger = self.world, self.ledger
        phase = world.engine.phase
        if phase not in AT_WORK and phase is not Phase.DONE and not self._is_ending:
            self._is_ending = True
            grace = world.options.exit_grace if phase is Phase.FINISHING else 0.0
            most = grace + world.spec.grace + _KILLING + _CLOSING
            for longer, excuse in ((0.0, True), (world.spec.lease, False)):
                text = "the job does not end"
                self._want(most + longer, text, partial(self._may_go_on, ledger.now, excuse=excuse))
        self._check_standstill()
        if ledger.now < self._next or world.is_late:
            return
        remaining: list[tuple[float, float, str, Check]] = []
        for due, seconds, text, check in self._due:
            if ledger.now < due:
                remaining.append((due, seconds, text, check))
            elif ledger.now - seconds < world.asleep_until:  # the driver was stopped: from then on
                remaining.append((world.asleep_until + _RESUMING + seconds, seconds, text, check))
            elif phase in AT_WORK or text == "the job does not end":
                assert check(), f"{text} within {seconds:g} s"
        self._due = remaining
        self._next = min((due for due, *_ in remaining), default=float("inf"))

    def _check_standstill(self) -> None:
        """Check that a round begins if enough workers can be in one; other hosts have to be probed first."""
        world, ledger = self.world, self.ledger
        usable = {host.name: host.slots for host in ledger.usable()}
        if usable != self._usable:
            self._usable, self._usable_since = usable, ledger.now
        if world.engine.phase not in AT_WORK or world.is_late:
            self._stands_since = None
            return
        if ledger.is_asking:
            living = list(ledger.living())
            able = sum(worker.has_asked and worker.slot < usable.get(worker.host, 0) for worker in living)
            stands = able >= world.options.min_np and all(worker.round is None for worker in living)
        else:
            stands = sum(usable.values()) >= world.options.min_np and not ledger.workers
        if not stands:
            self._stands_since = None
        elif self._stands_since is None:
            self._stands_since = ledger.now
        else:
            since = max(self._stands_since, world.asleep_until)
            most = max(since + _PATIENCE, self._usable_since) + 2 * _PROBING + 3 * _SLACK - since
            answers_since = max(ledger.host(name).answers_since for name in usable)
            most += 0.0 if answers_since < since else world.spec.lease
            assert ledger.now <= since + most, f"enough workers wait for {most:g} s, and no round begins"
