"""The workers of an elastic world: training processes, in-process or unmodified."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.hosts.placement import Placement
from hvlaunch.job import Look

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld, SimHost

__all__ = ["Process", "Workers"]

BEAT = 5.0
STEP = 2.0


@dataclass(eq=False)
class Process:
    """One worker. `place` is its assigned place, `round` the round that it is in."""

    host: SimHost
    slot: int
    start: int
    born: int
    agent: int
    live: bool = True
    round: int | None = None
    place: Placement | None = None
    last_round: int = -1
    met: int = -1
    """Newest round in which it has met the others."""
    commit: int = -1
    asked_after: int = -2
    """Its last round at its request for another."""
    is_waiting: bool = False
    is_silent: bool = False
    """True if it is stopped: it does nothing, and only SIGKILL ends it."""
    is_stuck: bool = False
    """True if it lives and does not leave its round."""
    is_stray: bool = False
    """True if it lives and beats, but never meets the others."""
    outlives_kill: bool = False
    orders: int = 0
    """Number of orders to end; only the newest counts."""

    def __str__(self) -> str:
        return f"{self.host.name}/{self.slot}/{self.start}"


class Workers:
    """All processes of a world, their rounds and newest checkpoint."""

    def __init__(self, world: ElasticWorld, goal: int) -> None:
        self._world = world
        self.goal = goal
        """Commits to the end of the training."""
        self.checkpoint = -1
        self.rounds: dict[int, list[Process]] = {}
        self.broken: set[int] = set()
        self.changing: set[int] = set()
        self.kills_while_placing = 0
        self.codes: set[int] = set()
        """Exit codes of failed workers."""
        self.hung: set[str] = set()
        """Names of workers that were stopped or fell silent."""
        self.ended_well = 0

    def carry_out(self, action: do.Action) -> None:
        """Carry out the engine's actions for workers."""
        match action:
            case do.Start():
                self._start(action)
            case do.Stop(name, steps, slots):
                self._stop(self._world.hosts[name], list(steps), slots)
            case do.Assign():
                self._place(action)
            case do.Leave(name, slot, start, _):
                self._when_told(name, slot, start, lambda one: self.end(one, 0))
            case do.Break(number, _):
                self.broken.add(number)
                for one in self.rounds.get(number, ()):
                    self._world.at(self._world.delay(), lambda one=one: self._leave(one, number))  # type: ignore[misc]
            case do.Change(number, _):
                self.changing.add(number)

    def _start(self, start: do.Start) -> None:
        host = self._world.hosts[start.host]
        if host.link != "ready" or not host.is_up or host.agent in (host.dead, host.parting):
            return
        new = []
        for slot, count, place in start.launches:
            if host.refusals:
                host.refusals -= 1
                refused = on.WorkerNotStarted(host.name, start.round, slot, 127, "no such command", count)
                self._world.hear(host, refused)
                continue
            one = Process(host, slot, count, start.round, host.agent)
            if self._world.kind == "unmodified":
                one.place, one.round = place, start.round
                self.rounds.setdefault(start.round, []).append(one)
            new.append(one)
            host.processes.append(one)
            import_time = (20.0 if host.is_slow else 0.5) + self._world.delay(2)
            self._world.at(import_time, partial(self._imported, one))
            self._world.at(BEAT, lambda one=one: self._beat(one))  # type: ignore[misc]
        for one in new:
            self._world.hear(host, on.WorkerStarted(host.name, start.round, one.slot, 1, one.start))

    def _imported(self, one: Process) -> None:
        if not one.live or one.is_silent:
            return
        if one.host.is_bad:
            self._fail(one, 1)
        elif self._world.kind == "in-process":
            self._ask(one)
        else:
            one.commit = self.checkpoint
            one.is_waiting = True
            self._arrived(one.born)

    def _ask(self, one: Process, cause: str | None = None) -> None:
        one.round, one.is_waiting, one.asked_after = None, True, one.last_round
        event = on.WorkerAsked(one.host.name, one.slot, one.start, one.last_round, one.commit, cause)
        self._tell_over_http(one, event)

    def _tell_over_http(self, one: Process, event: on.Event) -> None:
        def deliver() -> None:
            if not one.live:
                return
            if not (one.host.reachable and self._world.is_driven):
                self._world.at(1.0, deliver)
                return
            self._world.tell(event)

        self._world.at(self._world.delay(), deliver)
        if self._world.random.random() < 0.05:
            self._world.at(self._world.delay(3), deliver)

    def _beat(self, one: Process) -> None:
        if self._world.kind == "in-process" and one.live and self._world.result is None:
            if not one.is_silent:
                event = on.WorkerBeat(one.host.name, one.slot, one.start, one.commit, round=one.met)
                if one.host.reachable and self._world.now >= self._world.beats_from:
                    self._world.tell(event)
            self._world.at(BEAT if one.host.reachable else 2 * BEAT, lambda: self._beat(one))

    def find(self, name: str, slot: int, start: int) -> Process | None:
        found = (one for one in self._world.hosts[name].processes if (one.slot, one.start) == (slot, start))
        return next(found, None)

    def _when_told(self, name: str, slot: int, start: int, call: Callable[[Process], None]) -> None:
        """Call after a delay for each worker that watches its keys: hanging ones do not."""
        one = self.find(name, slot, start)

        def told() -> None:
            if one is None or not one.live or one.is_silent:
                return
            if not (one.host.reachable and self._world.is_driven):
                self._world.at(1.0, told)
                return
            call(one)

        self._world.at(self._world.delay(), told)

    def _place(self, action: do.Assign) -> None:
        one = self.find(*action.launch.seat, action.launch.start)
        if one is None:
            return
        self.rounds.setdefault(action.round, []).append(one)
        one.place, one.last_round = action.launch.place, action.round

        def told(one: Process) -> None:
            if one.last_round == action.round and one.is_waiting and not one.is_stray:
                one.is_waiting = False
                one.round = action.round
                self._arrived(action.round)
                if action.round in self.broken:
                    self._leave(one, action.round)

        self._when_told(*action.launch.seat, action.launch.start, told)
        if self.kills_while_placing:
            self.kills_while_placing -= 1
            self.end(one, None, signal.SIGKILL)

    def _arrived(self, number: int) -> None:
        """Once all workers have met, let them take the newest state and train."""
        members = self.rounds[number]
        if any(one.place is not None and len(members) < one.place.size for one in members):
            return  # one had ended before it was told its place
        if self._world.kind == "unmodified" and any(not one.is_waiting for one in members):
            return
        if any(one.round != number or not one.live for one in members) or self._is_split(members, number):
            return
        newest = max(one.commit for one in members)
        for one in members:
            one.commit, one.met = newest, number
            self._say(one, number)
        self._world.at(STEP * self._world.random.random(), lambda: self._train(number))

    def _is_split(self, members: list[Process], number: int) -> bool:
        """True if two of their hosts can't reach each other; the workers then leave one after the other."""
        hosts = {one.host.name for one in members}
        if not any(pair <= hosts for pair in self._world.cut_pairs):
            return False
        for one in members:
            seconds = 3.0 + self._world.random.random()
            self._world.at(seconds, lambda one=one: self._leave(one, number, "Connection timed out"))  # type: ignore[misc]
        return True

    def _train(self, number: int) -> None:
        members = self.rounds[number]
        if any(not one.live or one.is_silent or one.round != number for one in members):
            return
        if any(not one.host.reachable for one in members):
            self._world.at(1.0, lambda: self._train(number))
            return
        if self._is_split(members, number):
            return
        for one in members:
            one.commit += 1
        self.checkpoint = max(self.checkpoint, members[0].commit)
        for one in members:
            self._say(one, number)
        if members[0].commit >= self.goal:
            for one in members:
                self._world.at(self._world.delay(1), lambda one=one: self._finished(one))  # type: ignore[misc]
        elif number in self.changing:
            for one in members:
                one.is_stuck = one.is_stuck and not all(peer.is_stuck for peer in members)
                self._leave(one, number, None)
        else:
            self._world.at(STEP * (0.5 + self._world.random.random()), lambda: self._train(number))

    def _say(self, one: Process, number: int, *, is_done: bool = False) -> None:
        """Send a heartbeat with news."""
        if self._world.kind == "in-process" and (is_done or self._world.now >= self._world.beats_from):
            self._world.tell(
                on.WorkerBeat(one.host.name, one.slot, one.start, one.commit, is_done, number, is_done)
            )

    def _finished(self, one: Process) -> None:
        if one.live and not one.is_silent and not self._world.is_driven:
            self._world.at(1.0, lambda: self._finished(one))
        elif one.live and not one.is_silent:
            self.ended_well += 1
            self._say(one, one.last_round, is_done=True)
            self.end(one, 0)

    def _leave(self, one: Process, number: int, cause: str | None = "a peer is gone") -> None:
        """Let a worker leave its ended round, and ask again."""
        if one.live and not one.is_silent and not one.is_stuck and one.round == number:
            if self._world.kind == "in-process":
                self._ask(one, cause)
            else:
                self._fail(one, 1, "consequence")

    def _fail(self, one: Process, code: int, look: Look = "cause") -> None:
        if one.live:
            self.codes.add(code)
            self.end(one, code, look=look)

    def end(
        self, one: Process, code: int | None, number: int | None = None, *, look: Look = "silent"
    ) -> None:
        """End the process: its peers may notice, and its agent reports it."""
        if not one.live:
            return
        one.live = False
        one.host.processes.remove(one)
        if one.outlives_kill:
            one.host.whole_since = self._world.now
        self._world.hear(
            one.host,
            on.WorkerExited(
                one.host.name, one.born, one.slot, code, number, self._world.now, start=one.start, look=look
            ),
            one.agent,
        )
        if one.round is not None and code != 0:
            for peer in self.rounds.get(one.round, ()):
                if peer is not one and self._world.random.random() < 0.6:
                    self._world.at(self._world.delay(), lambda peer=peer: self._leave(peer, one.round or 0))  # type: ignore[misc]

    def _stop(self, host: SimHost, steps: list[do.Step], slots: object) -> None:
        if host.link == "ready" and host.is_up:
            there = [one for one in host.processes if one.agent == host.agent]
            self._order(host, [one for one in there if slots is None or one.slot in slots], steps)  # type: ignore[operator]

    def _order(self, host: SimHost, workers: list[Process], steps: list[do.Step]) -> None:
        """Delay an order as long as the host is cut off."""
        if host.is_cut:
            self._world.at(0.5, lambda: self._order(host, workers, steps))
            return
        for one in workers:
            one.orders += 1
            for step in steps:
                call = partial(self._signal, one, step.signal, one.orders)
                self._world.at(step.after, call) if step.after else call()

    def _signal(self, one: Process, number: int, orders: int) -> None:
        if not one.live or one.orders != orders or not one.host.is_up or one.outlives_kill:
            return
        if number == signal.SIGKILL or (not one.is_silent and self._world.random.random() < 0.8):
            self.end(one, None, number)
