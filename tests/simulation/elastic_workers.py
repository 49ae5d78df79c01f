"""The workers of an elastic world: training processes, in-process or unmodified."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
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
_LINGERS = 28.0
"""Seconds for which a worker may save its model after its training and its last beat."""


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
    training: int = 0
    """Number of trainings that its state has behind it."""
    asked_after: int = -2
    """Its last round at its request for another."""
    asked_at: float = -math.inf
    told_after: int = -2
    """`asked_after` of the newest request that has reached the driver."""
    is_waiting: bool = False
    is_silent: bool = False
    """True if it is stopped: it does nothing, and only SIGKILL ends it."""
    is_stuck: bool = False
    """True if it lives and does not leave its round."""
    is_stray: bool = False
    """True if it lives and beats, but never meets the others."""
    is_done: bool = False
    """True after its training: it beats no more, and leaves no round."""
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
        self.stalled = -1
        """Number of a round that does not train any more."""
        self.kills_while_placing = 0
        self.strays = 0
        """Number of the next rounds of which a worker gets stuck."""
        self.late_starts = 0
        """Number of the next workers that take long to start."""
        self.codes: set[int] = set()
        """Exit codes of failed workers."""
        self.hung: set[str] = set()
        """Names of workers that were stopped or fell silent."""
        self.ended_well = 0
        self._lingers = Random(f"{world.seed} lingers").random() < 0.1
        """True if the workers of this world live on for a while after their training."""
        self.trainings = 2 if Random(f"{world.seed} trainings").random() < 0.1 else 1
        """Number of trainings of a program, one after the other."""

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
                self._when_told(name, slot, start, lambda process: self.end(process, 0))
            case do.Break(number, _):
                self.broken.add(number)
                for process in self.rounds.get(number, ()):
                    self._world.at(self._world.delay(), lambda process=process: self._leave(process, number))  # type: ignore[misc]
            case do.Change(number, _):
                self.changing.add(number)

    def _start(self, start: do.Start) -> None:
        host = self._world.hosts[start.host]
        if host.link != "ready" or not host.is_up or host.agent in (host.dead, host.parting):
            return
        new = []
        for slot, count, place, _ in start.launches:
            if host.refusals:
                host.refusals -= 1
                refused = on.WorkerNotStarted(host.name, start.round, slot, 127, "no such command", count)
                self._world.hear(host, refused)
                continue
            process = Process(host, slot, count, start.round, host.agent)
            if self._world.kind == "unmodified":
                process.place, process.round = place, start.round
                self.rounds.setdefault(start.round, []).append(process)
            new.append(process)
            host.processes.append(process)
            is_late, self.late_starts = host.is_slow or self.late_starts > 0, max(0, self.late_starts - 1)
            import_time = (20.0 if is_late else 0.5) + self._world.delay(2)
            self._world.at(import_time, partial(self._imported, process))
            self._world.at(BEAT, lambda process=process: self._beat(process))  # type: ignore[misc]
        for process in new:
            self._world.hear(host, on.WorkerStarted(host.name, start.round, process.slot, 1, process.start))

    def _imported(self, process: Process) -> None:
        if not process.live or process.is_silent:
            return
        if process.host.is_bad:
            self._fail(process, 1)
        elif self._world.kind == "in-process":
            self._ask(process)
        else:
            process.commit = self.checkpoint
            process.is_waiting = True
            self._arrived(process.born)

    def _ask(self, process: Process, cause: str | None = None) -> None:
        process.round, process.is_waiting, process.asked_after = None, True, process.last_round
        process.asked_at = self._world.now
        event = on.WorkerAsked(
            process.host.name, process.slot, process.start, process.last_round, process.commit, cause
        )
        self._tell_over_http(process, event)

    def _tell_over_http(self, process: Process, event: on.Event) -> None:
        def deliver() -> None:
            if not process.live:
                return
            if not (process.host.reachable and self._world.is_driven):
                self._world.at(1.0, deliver)
                return
            if isinstance(event, on.WorkerAsked):
                process.told_after = event.round
            self._world.tell(event)

        self._world.at(self._world.delay(), deliver)
        if self._world.random.random() < 0.05:
            self._world.at(self._world.delay(3), deliver)

    def _beat(self, process: Process) -> None:
        if self._world.kind == "in-process" and process.live and self._world.result is None:
            if not (process.is_silent or process.is_done):
                event = on.WorkerBeat(
                    process.host.name, process.slot, process.start, process.commit, round=process.met
                )
                if process.host.reachable and self._world.now >= self._world.beats_from:
                    self._world.tell(event)
            self._world.at(BEAT if process.host.reachable else 2 * BEAT, lambda: self._beat(process))

    def find(self, name: str, slot: int, start: int) -> Process | None:
        matches = (
            process
            for process in self._world.hosts[name].processes
            if (process.slot, process.start) == (slot, start)
        )
        return next(matches, None)

    def _when_told(self, name: str, slot: int, start: int, call: Callable[[Process], None]) -> None:
        """Call after a delay for each worker that watches its keys: hanging ones do not."""
        process = self.find(name, slot, start)

        def deliver() -> None:
            if process is None or not process.live or process.is_silent:
                return
            if not (process.host.reachable and self._world.is_driven):
                self._world.at(1.0, deliver)
                return
            call(process)

        self._world.at(self._world.delay(), deliver)

    def _place(self, action: do.Assign) -> None:
        process = self.find(*action.launch.seat, action.launch.start)
        if process is None:
            return
        self.rounds.setdefault(action.round, []).append(process)
        process.place, process.last_round = action.launch.place, action.round
        if self.strays and process.place.rank == process.place.size - 1:
            process.is_stray, self.strays = True, self.strays - 1

        def deliver(process: Process) -> None:
            if process.last_round == action.round and process.is_waiting and not process.is_stray:
                process.is_waiting = False
                process.round = action.round
                self._arrived(action.round)
                if action.round in self.broken:
                    self._leave(process, action.round)

        self._when_told(*action.launch.seat, action.launch.start, deliver)
        if self.kills_while_placing:
            self.kills_while_placing -= 1
            self.end(process, None, signal.SIGKILL)

    def _arrived(self, number: int) -> None:
        """Once all workers have met, let them take the newest state and train."""
        members = self.rounds[number]
        if any(process.place is not None and len(members) < process.place.size for process in members):
            return  # one had ended before it was told its place
        if self._world.kind == "unmodified" and any(not process.is_waiting for process in members):
            return
        if any(process.round != number or not process.live for process in members) or self._is_split(
            members, number
        ):
            return
        newest = max((process.training, process.commit) for process in members)
        for process in members:
            process.training, process.commit = newest
            process.met = number
            self._say(process, number)
        self._world.at(STEP * self._world.random.random(), lambda: self._train(number))

    def _is_split(self, members: list[Process], number: int) -> bool:
        """True if two of their hosts can't reach each other; the workers then leave one after the other."""
        hosts = {process.host.name for process in members}
        if not any(pair <= hosts for pair in self._world.cut_pairs):
            return False
        for process in members:
            seconds = 3.0 + self._world.random.random()
            self._world.at(seconds, partial(self._leave, process, number, "Connection timed out"))
        return True

    def training(self) -> list[Process]:
        """Return the members of the newest round, if all of them are in it and have more to train."""
        number = max(self.rounds, default=-1)
        members = self.rounds.get(number, [])
        are_there = all(process.live and process.round == process.met == number for process in members)
        return members if are_there and all(process.commit < self.goal - 1 for process in members) else []

    def commit(self, processes: list[Process]) -> None:
        """Let these workers of a round make their next commit."""
        number = processes[0].met
        commit = processes[0].commit + 1
        for process in processes:
            process.commit = commit
        self.checkpoint = max(self.checkpoint, commit)
        for process in processes:
            self._say(process, number)

    def _train(self, number: int) -> None:
        members = self.rounds[number]
        if number == self.stalled:
            return
        if any(not process.live or process.is_silent or process.round != number for process in members):
            return
        if any(not process.host.reachable for process in members):
            self._world.at(1.0, lambda: self._train(number))
            return
        if self._is_split(members, number):
            return
        self.commit(members)
        if members[0].commit >= self.goal:
            for process in members:
                self._world.at(self._world.delay(1), lambda process=process: self._finished(process))  # type: ignore[misc]
        elif number in self.changing:
            for process in members:
                process.is_stuck = process.is_stuck and not all(peer.is_stuck for peer in members)
                self._leave(process, number, None)
        else:
            self._world.at(STEP * (0.5 + self._world.random.random()), lambda: self._train(number))

    def _say(self, process: Process, number: int, *, is_done: bool = False) -> None:
        """Send a heartbeat with news."""
        if self._world.kind == "in-process" and (is_done or self._world.now >= self._world.beats_from):
            self._world.tell(
                on.WorkerBeat(
                    process.host.name, process.slot, process.start, process.commit, is_done, number, is_done
                )
            )

    def _finished(self, process: Process) -> None:
        if process.live and not process.is_silent and not self._world.is_driven:
            self._world.at(1.0, lambda: self._finished(process))
        elif process.live and not process.is_silent:
            self._say(process, process.last_round, is_done=True)
            if self._world.kind == "in-process" and process.training + 1 < self.trainings:
                # A program that trains again counts its commits from the beginning.
                process.training, process.commit = process.training + 1, -1
                self._ask(process)
                return
            if self._lingers and not self._world.faults:
                process.is_done = True
                self.codes.add(128 + signal.SIGKILL)  # a later fault may break the round that it is still in
                self._world.at(_LINGERS, lambda: self._ends_well(process))
            else:
                self._ends_well(process)

    def _ends_well(self, process: Process) -> None:
        if process.live and not process.is_silent:
            self.ended_well += 1
            self.end(process, 0)

    def _leave(self, process: Process, number: int, cause: str | None = "a peer is gone") -> None:
        """Let a worker leave its ended round, and ask again."""
        is_free = not (process.is_silent or process.is_stuck or process.is_done)
        if process.live and is_free and process.round == number:
            if self._world.kind == "in-process":
                self._ask(process, cause)
            else:
                self._fail(process, 1, "consequence")

    def _fail(self, process: Process, code: int, look: Look = "cause") -> None:
        if process.live:
            self.codes.add(code)
            self.end(process, code, look=look)

    def end(
        self, process: Process, code: int | None, number: int | None = None, *, look: Look = "silent"
    ) -> None:
        """End the process: its peers may notice, and its agent reports it."""
        if not process.live:
            return
        process.live = False
        process.host.processes.remove(process)
        if process.outlives_kill:
            process.host.whole_since = self._world.now
        self._world.hear(
            process.host,
            on.WorkerExited(
                process.host.name,
                process.born,
                process.slot,
                code,
                number,
                self._world.now,
                start=process.start,
                look=look,
            ),
            process.agent,
        )
        if process.round is not None and code != 0:
            for peer in self.rounds.get(process.round, ()):
                if peer is not process and self._world.random.random() < 0.6:
                    delay = self._world.delay()
                    self._world.at(delay, lambda peer=peer: self._leave(peer, process.round or 0))  # type: ignore[misc]

    def _stop(self, host: SimHost, steps: list[do.Step], slots: object) -> None:
        if host.link == "ready" and host.is_up:
            processes = [process for process in host.processes if process.agent == host.agent]
            if slots is not None:
                processes = [process for process in processes if process.slot in slots]  # type: ignore[operator]
            self._order(host, processes, steps)

    def _order(self, host: SimHost, workers: list[Process], steps: list[do.Step]) -> None:
        """Delay an order as long as the host is cut off."""
        if host.is_cut:
            self._world.at(0.5, lambda: self._order(host, workers, steps))
            return
        for process in workers:
            process.orders += 1
            for step in steps:
                call = partial(self._signal, process, step.signal, process.orders)
                self._world.at(step.after, call) if step.after else call()

    def _signal(self, process: Process, number: int, orders: int) -> None:
        if not process.live or process.orders != orders or not process.host.is_up or process.outlives_kill:
            return
        if number == signal.SIGKILL or (not process.is_silent and self._world.random.random() < 0.8):
            self.end(process, None, number)
