"""An account of the driver's news and orders for the laws, independent of the engine's records."""

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell

__all__ = ["End", "Host", "Ledger", "Round", "Worker"]

Seat = tuple[str, int]


@dataclass(eq=False)
class Host:
    name: str
    link: str = "none"
    agents: int = 0
    """Number of connections so far."""
    idle_since: float = 0.0
    """Time when its connection ended, or it was listed."""
    is_listed: bool = False
    slots: int = 0
    parted_at: float | None = None
    """Time of its agent's report that it ends."""
    has_rendezvous: bool = False
    answers_since: float = -math.inf
    """Time since which it answers again after silence; infinite while it is silent."""
    is_silent: bool = False
    """True if it answers no pings, or its connection is broken: a new connection is an answer, too."""
    is_suspected: bool = False
    """True if it gives no sign of life."""
    until: float = -math.inf
    """End of its cool-down."""
    is_lost_for_good: bool = False
    """True if it is excluded for the rest of the job because it was lost."""
    failures: int = 0
    """Failures of its workers since it was listed anew."""
    problems: int = 0
    """Problems of the host itself: lost, not connected, late."""
    ready_at: float = 0.0
    """Time of its newest agent's hello."""
    is_well: bool = False
    """True if its newest agent has said hello, and has had no problem since."""
    master_port: int = 0
    """Port that it keeps for rank 0, by its own newest report."""
    proofs: set[tuple[str, str]] = field(default_factory=set)
    """Hosts that it reached, and the addresses."""

    def is_usable(self, now: float) -> bool:
        return self.link == "ready" and self.is_listed and self.parted_at is None and now >= self.until


@dataclass(eq=False)
class Worker:
    host: str
    slot: int
    start: int
    born: int
    round: int | None
    rank: int
    last_round: int = -1
    commit: int = -1
    has_asked: bool = False
    is_aside: bool = False
    """True if the others have left its round without it, and it has not asked since."""
    is_told: bool = False
    """True if it was told to end."""
    told_at: float = math.inf
    """Time of the first signal that it was to get."""
    has_hung: bool = False
    """True if it is killed because it hangs, so that its end is a failure."""
    beat_at: float | None = None
    started_at: float = 0.0

    def __str__(self) -> str:
        return f"{self.host}/{self.slot}/{self.start}"


@dataclass(eq=False)
class Round:
    number: int
    began_at: float
    members: list[Worker]
    base: int = -1
    best: int = -1
    commit_at: float = 0.0
    """Time of its newest commit, or of its beginning."""
    hosts: tuple[str, ...] = ()
    is_broken: bool = False
    is_changing: bool = False
    broken_at: float = math.inf

    def is_fruitful(self, now: float) -> bool:
        return self.best > self.base or min(now, self.broken_at) - self.began_at >= 15.0


@dataclass(frozen=True)
class End:
    """A worker's end; `is_failure`: it was not told to end."""

    host: str
    slot: int
    start: int
    code: int | None
    signal: int | None
    at: float
    heard_at: float
    is_failure: bool
    was_member: bool
    rank: int
    told_at: float
    """Time of the first signal to it; infinite if it hung."""


class Ledger:
    """The account. Times are seconds of the driver's clock."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.now = 0.0
        self.hosts: dict[str, Host] = {}
        self.workers: dict[Seat, Worker] = {}
        self.rounds: dict[int, Round] = {}
        self.current: Round | None = None
        self.is_asking = False
        self.is_pool_known = False
        self.listing: list[str] = []
        """Names of the newest list, in its order."""
        self.began_at: float | None = None
        self.ends: list[End] = []
        self.slot_waits: dict[Seat, float] = {}
        self.moving: str | None = None
        """Host whose workers get substitutes, and still work."""
        self._moved: tuple[str, float] = "", 0.0
        """The host of the newest move, and the end of its cool-down before."""
        self._kills: set[str] = set()
        """Hosts of the workers that are killed in this turn because they hang."""
        self._hearers: dict[type, Callable[[Any], None]] = {
            on.HostsDiscovered: self._discovered,
            on.HostReady: self._ready,
            on.HostFailed: self._gone,
            on.HostGone: self._gone,
            on.HostClosed: self._closed,
            on.HostParting: self._parting,
            on.RendezvousReached: self._reached,
            on.HostProbed: self._probed,
            on.MasterPort: self._keeps_port,
            on.DriverReplaced: self._replaced,
            on.DriverStopped: self._replaced,
            on.HostQuiet: self._quiet,
            on.HostAnswers: self._answers,
            on.HostSuspected: self._suspected,
            on.HostAway: self._away,
            on.HostBack: self._back,
            on.WorkerExited: self._ended,
            on.WorkerNotStarted: self._ended,
            on.WorkerAsked: self._asked,
            on.WorkerBeat: self._beat,
        }
        self._noters: dict[type, Callable[[Any], None]] = {
            do.Connect: self._connect,
            do.Abandon: self._abandon,
            do.Release: self._release,
            do.Start: self._start,
            do.Assign: self._assign,
            do.Stop: self._stop,
            do.Leave: self._leave,
            do.Break: self._break,
            do.Change: self._change,
            tell.RoundEnding: self._break,
            tell.RoundStarting: self._begin,
            tell.RoundFormed: self._begin,
            tell.HostExcluded: self._excluded,
            tell.HostNotUsable: self._not_usable,
            tell.HostSetAside: self._set_aside,
            tell.WorkerStartFailed: self._start_failed,
            tell.WorkerKilled: self._killed,
            tell.MoveBeginning: self._move,
            tell.HostMoving: self._moves,
            tell.HostStays: self._stays,
        }

    def host(self, name: str) -> Host:
        return self.hosts.setdefault(name, Host(name))

    def living(self) -> Iterator[Worker]:
        """Workers that were not told to end."""
        return (worker for worker in self.workers.values() if not worker.is_told)

    def usable(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.is_usable(self.now)]

    def hear(self, event: on.Event, now: float) -> None:
        self.now = now
        hearer = self._hearers.get(type(event))
        if hearer is not None:
            hearer(event)

    def note(self, actions: Sequence[do.Action]) -> None:
        self._kills.clear()
        for action in actions:
            noter = self._noters.get(type(action))
            if noter is not None:
                noter(action)

    # Heard

    def _discovered(self, event: on.HostsDiscovered) -> None:
        if not event.hosts and self.is_pool_known:
            return
        self.is_pool_known = True
        self.listing = [host.name for host in event.hosts]
        slots = {host.name: host.slots or 0 for host in event.hosts}
        for name in slots:
            self.host(name)
        for host in self.hosts.values():
            was_listed, host.is_listed = host.is_listed, host.name in slots
            host.slots = slots.get(host.name, host.slots)
            if host.is_listed and not was_listed:
                host.idle_since = self.now
            if not host.is_listed:
                host.failures, host.is_lost_for_good = 0, False
                host.until = -math.inf if host.until == math.inf else host.until

    def list_all(self, hosts: Sequence[tuple[str, int]]) -> None:
        """Note a fixed pool."""
        self.is_pool_known = True
        self.listing = [name for name, _ in hosts]
        for name, slots in hosts:
            host = self.host(name)
            host.is_listed, host.slots = True, slots

    def _ready(self, event: on.HostReady) -> None:
        host = self.host(event.host)
        if host.link == "connecting":
            host.link, host.is_well = "ready", True
            host.master_port, host.ready_at = event.facts.master_port, self.now

    def _keeps_port(self, event: on.MasterPort) -> None:
        host = self.host(event.host)
        if host.link in ("ready", "closing"):
            host.master_port = event.port

    def _gone(self, event: on.HostFailed | on.HostGone) -> None:
        host = self.host(event.host)
        if host.link != "none":
            host.problems += 1
            host.is_well = False
        self._lose(host)

    def _closed(self, event: on.HostClosed) -> None:
        self._lose(self.host(event.host))

    def _parting(self, event: on.HostParting) -> None:
        host = self.host(event.host)
        if host.link == "ready":
            host.parted_at = self.now
            host.problems += 1
            host.is_well = False
            for worker in self.workers.values():
                if worker.host == event.host:
                    worker.is_told, worker.told_at = True, min(worker.told_at, self.now)

    def _lose(self, host: Host) -> None:
        if host.link != "none":
            host.idle_since = self.now
        had_agent = host.link not in ("none", "connecting")
        host.link, host.parted_at, host.has_rendezvous, host.is_silent = "none", None, False, False
        host.is_suspected = False
        host.proofs.clear()
        for other in self.hosts.values() if had_agent else ():
            other.proofs = {(name, at) for name, at in other.proofs if name != host.name}
        self.workers = {seat: worker for seat, worker in self.workers.items() if worker.host != host.name}

    def _reached(self, event: on.RendezvousReached) -> None:
        self.host(event.host).has_rendezvous = True

    def _probed(self, event: on.HostProbed) -> None:
        if event.address is not None:
            self.host(event.host).proofs.add((event.target, event.address))

    def _replaced(self, event: on.DriverReplaced | on.DriverStopped) -> None:
        for host in self.hosts.values():
            host.is_suspected = host.is_suspected and isinstance(event, on.DriverStopped)
            host.answers_since = min(host.answers_since, self.now)
            host.is_silent = False

    def _quiet(self, event: on.HostQuiet) -> None:
        self.host(event.host).answers_since, self.host(event.host).is_silent = math.inf, True

    def _answers(self, event: on.HostAnswers) -> None:
        self.host(event.host).answers_since, self.host(event.host).is_silent = self.now, False
        self.host(event.host).is_suspected = False

    def _suspected(self, event: on.HostSuspected) -> None:
        host = self.host(event.host)
        host.is_suspected = host.link == "ready" and host.parted_at is None

    def _away(self, event: on.HostAway) -> None:
        self.host(event.host).is_silent = True

    def _back(self, event: on.HostBack) -> None:
        self.host(event.host).is_silent = False

    def find(self, event: Any) -> Worker | None:
        worker = self.workers.get((event.host, event.slot))
        return worker if worker is not None and worker.start == event.start else None

    def _ended(self, event: on.WorkerExited | on.WorkerNotStarted) -> None:
        worker = self.find(event)
        if worker is None or worker.born != event.round:
            return
        del self.workers[event.host, event.slot]
        by_signal = event.signal if isinstance(event, on.WorkerExited) else None
        at = event.at if isinstance(event, on.WorkerExited) else self.now
        is_failure = event.code != 0 and not worker.is_told
        was_member = worker.round is not None
        told_at = math.inf if worker.has_hung else worker.told_at
        self.ends.append(
            End(
                event.host,
                event.slot,
                event.start,
                event.code,
                by_signal,
                at,
                self.now,
                is_failure,
                was_member,
                worker.rank,
                told_at,
            )
        )
        self.host(event.host).failures += event.code != 0

    def _asked(self, event: on.WorkerAsked) -> None:
        worker = self.find(event)
        if worker is None or worker.is_told:
            return
        if not self.is_asking:
            self.is_asking = True
            for other in self.workers.values():
                other.round = None
            self.rounds.clear()
            self.current = None
        if worker.round is not None and event.round != worker.round:
            return  # an old request, repeated by the network, is no sign of life
        worker.round, worker.has_asked, worker.beat_at, worker.is_aside = None, True, self.now, False
        if event.round >= worker.last_round:
            worker.last_round, worker.commit = event.round, event.commit
        if event.round in self.rounds:
            last = self.rounds[event.round]
            last.best = max(last.best, event.commit)

    def _beat(self, event: on.WorkerBeat) -> None:
        worker = self.find(event)
        if worker is None:
            return
        worker.beat_at = None if event.is_last else self.now
        if event.commit > worker.commit:
            worker.commit = event.commit
            current = self.current
            if worker.round is not None and current is not None and event.commit > current.best:
                current.best, current.commit_at = event.commit, self.now

    # Ordered

    def _connect(self, action: do.Connect) -> None:
        host = self.host(action.host.name)
        host.link, host.agents = "connecting", host.agents + 1

    def _abandon(self, action: do.Abandon) -> None:
        host = self.host(action.host)
        host.problems += 1
        host.is_well = False
        self._lose(host)

    def _release(self, action: do.Release) -> None:
        self.host(action.host).link = "closing"

    def _start(self, action: do.Start) -> None:
        self.began_at = self.now if self.began_at is None else self.began_at
        number = None if self.is_asking else action.round
        for launch in action.launches:
            worker = Worker(action.host, launch.slot, launch.start, action.round, number, launch.place.rank)
            worker.started_at = self.now
            self.workers[launch.seat] = worker
            if number is not None and self.current is not None:
                self.current.members.append(worker)

    def _assign(self, action: do.Assign) -> None:
        worker = self.workers.get(action.launch.seat)
        if worker is None or self.current is None:
            return
        worker.round = worker.last_round = action.round
        worker.rank, worker.has_asked = action.launch.place.rank, False
        self.current.members.append(worker)
        self.current.base = self.current.best = max(self.current.base, worker.commit)
        self.slot_waits.pop(action.launch.seat, None)

    def _stop(self, action: do.Stop) -> None:
        for worker in self.workers.values():
            if worker.host == action.host and (action.slots is None or worker.slot in action.slots):
                is_kill = action.steps[0].signal == signal.SIGKILL and worker.host in self._kills
                worker.has_hung = worker.has_hung or (is_kill and not worker.is_told)
                worker.is_told = True
                worker.told_at = min(worker.told_at, self.now + action.steps[0].after)

    def _leave(self, action: do.Leave) -> None:
        worker = self.find(action)
        if worker is not None:
            worker.is_told = True

    def _break(self, action: do.Break | tell.RoundEnding) -> None:
        ended = self.rounds[action.round]
        ended.is_broken, ended.broken_at = True, self.now

    def _change(self, action: do.Change) -> None:
        self.rounds[action.round].is_changing = True

    def _begin(self, fact: tell.RoundStarting | tell.RoundFormed) -> None:
        self.current = self.rounds[fact.round] = Round(
            fact.round, self.now, [], commit_at=self.now, hosts=fact.hosts
        )

    def _excluded(self, fact: tell.HostExcluded) -> None:
        host = self.host(fact.host)
        host.until = math.inf if fact.seconds is None else self.now + fact.seconds
        host.is_well = host.is_well and not isinstance(fact.cause, why.HostProblem)
        is_lost = isinstance(fact.cause, why.HostProblem) and fact.cause.problem.kind == "HostLost"
        host.is_lost_for_good = is_lost and fact.seconds is None
        for seat in [seat for seat in self.slot_waits if seat[0] == fact.host]:
            del self.slot_waits[seat]

    def _set_aside(self, fact: tell.HostSetAside) -> None:
        for worker in self.living():
            if worker.host == fact.host and worker.round is not None:
                worker.round, worker.is_aside = None, True

    def _not_usable(self, fact: tell.HostNotUsable) -> None:
        name = fact.problem.host
        if name is not None:
            host = self.host(name)
            host.until = math.inf if fact.retry_in is None else self.now + fact.retry_in

    def _start_failed(self, fact: tell.WorkerStartFailed) -> None:
        self.slot_waits[fact.end.host, fact.slot] = self.now + fact.retry_in

    def _killed(self, fact: tell.WorkerKilled) -> None:
        self.host(fact.cause.host).failures += 1
        self._kills.add(fact.cause.host)

    def _move(self, fact: tell.MoveBeginning) -> None:
        self.moving = fact.host

    def _moves(self, fact: tell.HostMoving) -> None:
        host = self.host(fact.host)
        self.moving, self._moved = None, (host.name, host.until)
        host.until = math.inf

    def _stays(self, fact: tell.HostStays) -> None:
        if not fact.was_moving:
            return
        host, until = self.host(fact.host), self._moved[1]
        if self._moved[0] == host.name and host.until == math.inf:
            host.until = until
        self.moving, self._moved = None, ("", 0.0)
