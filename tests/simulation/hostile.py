"""Events in orders that no driver should produce: duplicates, late answers, other rounds, answers before their questions.

A game lets an engine run a job with plausible answers, and mixes stray events into them. A stray event can be true by
chance, so an account of its own decides what each event means. Later the strays stop, and the job must end.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.engine import Engine
from hvlaunch.engine.waits import Wait
from hvlaunch.errors import EXIT_NO_PROGRESS, ConnectFailed, HostFault, HostLost
from hvlaunch.hosts.placement import Launch
from hvlaunch.job import ElasticOptions, Host, JobResult, JobSpec

__all__ = ["HostileGame"]

_STRAY_TURNS = 150
_MOST_TURNS = 4000
_STRAY = 0.4
_NAMES = "abcd"
_STRANGER = "z"
"""A host that no list has."""
_CODES = (0, 0, 0, 1, 3)


@dataclass(eq=False)
class _Worker:
    """A worker that the engine has ordered."""

    launch: Launch
    born: int
    round: int
    rank: int | None
    stopped_at: float = math.inf
    """Time of the first signal that is to end it."""
    has_asked: bool = False
    is_live: bool = True
    is_done: bool = False


class HostileGame:
    """One job, to its end. Raises AssertionError if a law is broken, and whatever the engine raises."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = random.Random(seed)
        self._slots = {name: rng.randint(1, 2) for name in _NAMES[: rng.randint(1, 4)]}
        self._is_elastic = rng.random() < 0.7
        self.spec = self._make_spec()
        self._engine = Engine(self.spec, 4711)
        self._now = 100.0
        self._links: dict[str, str] = {}
        """none, connecting, ready, parting or closing, by host."""
        self._reached: set[str] = set()
        """Hosts that have reached the rendezvous."""
        self._questions: list[do.Probe | do.TakeStacks] = []
        self._workers: dict[tuple[str, int, int], _Worker] = {}
        self._signals: set[int] = set()
        """Signals that ended or could end the job."""
        self._ends: list[tuple[int | None, int | None]] = []
        """Code and signal of each worker's end."""
        self._round = -1
        self.events: list[on.Event] = []
        self.result: JobResult | None = None
        self._is_hostile = True

    def _make_spec(self) -> JobSpec:
        rng = self._rng
        hosts = tuple(Host(name, slots=slots) for name, slots in self._slots.items())
        words: dict[str, Any] = {
            "command": ("train",),
            "cwd": "/",
            "grace": 2.0,
            "start_timeout": 10.0,
            "lease": 5.0,
        }
        if not self._is_elastic:
            return JobSpec(hosts=hosts, skip_bad_hosts=rng.random() < 0.3, **words)
        options = ElasticOptions(
            min_np=1,
            discovery_script=rng.choice([None, "discover"]),
            reset_timeout=6.0,
            elastic_timeout=30.0,
            cooldown=rng.choice([(1.0, 8.0), None]),
            worker_timeout=12.0,
            drain_timeout=6.0,
            exit_grace=6.0,
            spares=rng.choice([0, 0, 1]),
        )
        return JobSpec(hosts=() if options.discovers else hosts, elastic=options, on_hang="restart", **words)

    def play(self) -> JobResult:
        """Play the game, and return the job's result."""
        self._tell(on.Began())
        for turn in range(_MOST_TURNS):
            if self.result is not None:
                break
            self._is_hostile = turn < _STRAY_TURNS
            self._tell(self._next_event())
        assert self.result is not None, f"the job never ends: {self._engine.phase}, {self._waits()}"
        self._check_result(self.result)
        # A driver gives no event to an engine that has ended; if one does, nothing must come of it.
        for _ in range(20):
            self._tell(self._stray())
        return self.result

    def _waits(self) -> list[tuple[Wait, object]]:
        return [*self._engine.waits]

    # Events

    def _next_event(self) -> on.Event:
        if self._is_hostile and self._rng.random() < _STRAY:
            return self._stray()
        answers = [*self._answers()]
        deadline = self._engine.deadline
        if answers and self._rng.random() < 0.9:
            self._now += self._rng.random() * 0.2
            return self._rng.choice(answers)()
        if deadline is None or deadline == math.inf:
            return self._rng.choice(answers)() if answers else on.Tick()
        self._now = max(self._now, deadline)
        return on.Tick()

    def _answers(self) -> Iterator[Callable[[], on.Event]]:
        """Yield the events that could come next."""
        if (
            self._is_elastic
            and self.spec.elastic is not None
            and self.spec.elastic.discovers
            and not self._links
        ):
            yield self._list
        for name, link in self._links.items():
            if link == "connecting":
                yield partial(self._hello, name)
                if self._is_hostile:
                    yield partial(on.HostFailed, name, ConnectFailed("refused", host=name).problem)
            elif link == "ready" and name not in self._reached:
                yield partial(on.RendezvousReached, name, "10.0.0.100")
            elif link in ("closing", "parting"):
                yield partial(on.HostClosed, name)
        for question in self._questions:
            yield partial(self._answer, question)
        for key, worker in self._workers.items():
            if worker.is_live and self._links[key[0]] != "none":
                yield partial(self._work, worker)

    def _list(self) -> on.Event:
        hosts = [Host(name, slots=slots) for name, slots in self._slots.items()]
        if self._is_hostile:
            hosts = self._rng.sample(hosts, self._rng.randint(0, len(hosts)))
        return on.HostsDiscovered(tuple(hosts))

    def _hello(self, name: str) -> on.Event:
        return on.HostReady(name, self._facts(name))

    def _facts(self, name: str) -> on.HostFacts:
        number = ord(name) - ord("a") + 1
        address = f"10.0.0.{number}"
        return on.HostFacts(
            {"eth0": (address,)}, 8, None, "/tmp/hvlaunch-x", 9000 + number, 20000 + number, address
        )

    def _answer(self, question: do.Probe | do.TakeStacks) -> on.Event:
        self._questions.remove(question)
        if isinstance(question, do.TakeStacks):
            return on.StacksTaken(question.host, question.number)
        return on.HostProbed(question.host, question.target, question.addresses[0], question.agent)

    def _work(self, worker: _Worker) -> on.Event:
        """Return the next event of a worker that lives."""
        name, slot, start = worker.launch.host, worker.launch.slot, worker.launch.start
        if self._now >= worker.stopped_at:
            return on.WorkerExited(name, worker.born, slot, None, 15, self._now, start=start)
        if worker.stopped_at < math.inf:
            return on.WorkerExited(name, worker.born, slot, 0, None, self._now, start=start)
        chance = self._rng.random()
        if self._is_elastic and (not worker.has_asked or worker.rank is None):
            # A request is repeated until it is answered.
            worker.has_asked = True
            return on.WorkerAsked(name, slot, start, worker.round, 1)
        if chance < 0.2:
            return on.WorkerStarted(name, worker.born, slot, 4000 + slot, start)
        if chance < 0.7 and self._is_elastic and not worker.is_done:
            worker.is_done = is_done = not self._is_hostile and self._rng.random() < 0.5
            return on.WorkerBeat(
                name,
                slot,
                start,
                self._rng.randint(1, 9),
                is_last=is_done,
                round=worker.round,
                is_done=is_done,
            )
        if self._is_hostile and chance < 0.9:
            return on.WorkerStarted(name, worker.born, slot, 4000 + slot, start)
        code = self._rng.choice(_CODES) if self._is_hostile else 0
        return on.WorkerExited(name, worker.born, slot, code, None, self._now, start=start)

    def _stray(self) -> on.Event:
        """Return a stray event: an earlier one again, or one that nobody has asked for."""
        rng = self._rng
        if self.events and rng.random() < 0.4:
            return rng.choice(self.events)
        name = rng.choice([*self._slots, *self._slots, _STRANGER])
        worker = rng.choice([*self._workers]) if self._workers and rng.random() < 0.7 else None
        host, slot, start = worker or (name, rng.randint(0, 3), rng.randint(0, 2))
        round_ = rng.randint(-1, self._round + 2)
        problem = HostLost("lost", host=name).problem
        makers: Sequence[Callable[[], on.Event]] = (
            on.Began,
            self._list,
            lambda: on.DiscoveryFailed(HostFault("no list", host=name).problem),
            lambda: on.HostStage(name, "connect"),
            lambda: on.HostConnected(name),
            lambda: on.HostPreparing(name),
            lambda: on.HostReady(name, self._facts(name)),
            lambda: on.HostFailed(name, problem),
            lambda: on.HostGone(name, problem),
            lambda: on.HostParting(name, problem),
            lambda: on.HostClosed(name),
            lambda: on.HostNoise(name, "x"),
            lambda: on.HostAway(name, "x"),
            lambda: on.HostBack(name, 1.0),
            lambda: on.HostQuiet(name),
            lambda: on.HostAnswers(name),
            lambda: on.HostSuspected(name, 1.5),
            lambda: on.MoveWanted(name, rng.choice([None, host]), rng.choice(["", "slow"])),
            lambda: on.HostJudged(name, rng.choice([None, 2.0]), rng.choice(["", "clock"])),
            lambda: on.DriverStopped(rng.random() * 20),
            lambda: on.RendezvousReached(name, rng.choice([None, "10.0.0.100"]), ("10.0.0.100",)),
            lambda: on.HostProbed(
                name, rng.choice([*self._slots, _STRANGER]), rng.choice([None, "10.0.0.9"]), rng.randint(0, 3)
            ),
            lambda: on.MasterPort(name, 30000),
            lambda: on.WorkerStarted(host, round_, slot, 1, start),
            lambda: on.WorkerNotStarted(host, round_, slot, 127, "no such file", start),
            lambda: on.WorkerExited(host, round_, slot, rng.choice(_CODES), None, self._now, start=start),
            lambda: on.WorkerExited(host, round_, slot, None, 9, self._now - 50, start=start),
            lambda: on.WorkerAlone(host, round_, slot, "torch", start),
            lambda: on.StacksTaken(name, rng.randint(0, 5)),
            lambda: on.WorkerSuspended(host, round_, slot, start),
            lambda: on.WorkerAsked(host, slot, start, round_, rng.randint(-1, 9), rng.choice([None, "why"])),
            lambda: on.WorkerBeat(
                host, slot, start, rng.randint(-1, 9), rng.random() < 0.2, round_, rng.random() < 0.2
            ),
            lambda: on.UserSignal(10),
            lambda: on.StepReached(round_, rng.randint(0, 99)),
            lambda: on.JobHangs(60.0, (rng.randint(0, 9),), "x"),
            on.JobGoesOn,
            on.Tick,
        )
        if rng.random() < 0.001:
            return on.Interrupted(rng.choice([2, 15]))
        return rng.choice(makers)()

    # The account

    def _tell(self, event: on.Event) -> None:
        self.events.append(event)
        is_over = self.result is not None
        self._note_event(event)
        actions = self._engine.handle(event, self._now)
        if is_over:
            orders = [action for action in actions if not type(action).__module__.endswith("facts")]
            assert not orders, f"after the end, {event} has {orders}"
        for action in actions:
            self._note(action)

    def _note_event(self, event: on.Event) -> None:
        match event:
            case on.HostReady(name) if self._links.get(name) == "connecting":
                self._links[name] = "ready"
            case on.RendezvousReached(name, address) if address is not None:
                self._reached.add(name)
            case on.HostParting(name) if self._links.get(name) == "ready":
                self._links[name] = "parting"
            case on.HostFailed(name) | on.HostGone(name) | on.HostClosed(name):
                self._lose(name)
            case on.WorkerExited(host, born, slot) | on.WorkerNotStarted(host, born, slot):
                worker = self._workers.get((host, slot, event.start))
                if worker is not None and worker.born == born and worker.is_live:
                    worker.is_live = False
                    self._ends.append((event.code, getattr(event, "signal", None)))
            case on.WorkerAsked(host, slot, start):
                worker = self._workers.get((host, slot, start))
                if worker is not None:
                    worker.rank = None
            case on.Interrupted(number):
                self._signals.add(number)
            case _:
                pass

    def _lose(self, name: str) -> None:
        self._reached.discard(name)
        if name in self._links:
            self._links[name] = "none"
        self._questions = [question for question in self._questions if question.host != name]
        for (host, _, _), worker in self._workers.items():
            worker.is_live = worker.is_live and host != name

    def _note(self, action: do.Action) -> None:
        match action:
            case do.Connect(target):
                assert self._links.get(target.name, "none") == "none", f"{target.name} is connected twice"
                self._links[target.name] = "connecting"
            case do.Abandon(name):
                assert self._links.get(name, "none") != "none", f"{name} is abandoned, and gone"
                self._lose(name)
            case do.Release(name):
                assert self._links[name] in ("ready", "parting"), f"{name} is released: {self._links[name]}"
                self._links[name] = "closing"
            case do.Probe(name, other):
                assert {self._links[name], self._links[other]} == {"ready"}, f"{name} is to probe {other}"
                self._questions.append(action)
            case do.TakeStacks(name):
                self._check_agent(name, action)
                self._questions.append(action)
            case do.Signal(name):
                self._check_agent(name, action)
            case do.Stop(name, steps, slots):
                self._check_agent(name, action)
                for (host, slot, _), worker in self._workers.items():
                    if host == name and (slots is None or slot in slots):
                        worker.stopped_at = min(worker.stopped_at, self._now + steps[0].after)
            case do.Start(name, number, launches):
                assert self._links[name] == "ready", f"{name} is to start workers: {self._links[name]}"
                self._round = max(self._round, number)
                for launch in launches:
                    self._start(name, number, launch)
            case do.Assign(number, launch):
                worker = self._workers[launch.host, launch.slot, launch.start]
                assert worker.is_live, f"a place for a worker that has ended: {action}"
                self._round = max(self._round, number)
                worker.round, worker.rank = number, launch.place.rank
            case do.Leave(name, slot, start):
                worker = self._workers[name, slot, start]
                assert worker.is_live, f"a worker that has ended is dismissed: {action}"
                worker.stopped_at = min(worker.stopped_at, self._now + self.spec.grace)
            case do.Break(number) | do.Change(number):
                assert number <= self._round, f"there is no round {number}"
                for worker in self._workers.values():
                    worker.has_asked = worker.has_asked and (worker.round != number or worker.rank is None)
            case do.Finish(result):
                assert self.result is None, "a second end"
                self.result = result
            case _:
                pass

    def _check_agent(self, name: str, action: do.Action) -> None:
        assert self._links.get(name) in ("ready", "parting", "closing"), f"{name} is gone, and gets {action}"

    def _start(self, name: str, number: int, launch: Launch) -> None:
        seat = name, launch.slot
        living = [key for key, worker in self._workers.items() if key[:2] == seat and worker.is_live]
        assert not living, f"two workers in slot {seat}"
        key = (*seat, launch.start)
        assert key not in self._workers, f"a second worker {key}"
        rank = None if self._is_elastic else launch.place.rank
        self._workers[key] = _Worker(launch, number, -1, rank)

    def _check_result(self, result: JobResult) -> None:
        live = [key for key, worker in self._workers.items() if worker.is_live]
        assert not live, f"the job is over, and {live} live"
        open_links = {name: link for name, link in self._links.items() if link != "none"}
        assert not open_links, f"the job is over, and there are {open_links}"
        if result.exit_code == 0:
            assert (result.error, result.failure, result.interrupted) == (None, None, None)
            assert (0, None) in self._ends
        elif result.interrupted is not None:
            assert result.exit_code == 128 + result.interrupted
            assert result.interrupted in self._signals
        elif result.error is not None:
            assert result.exit_code == result.error.exit_code
        else:
            failure = result.failure
            assert failure is not None, f"code {result.exit_code} has no cause"
            assert (failure.code, failure.signal) in self._ends, f"no worker ended so: {failure}"
            code = failure.code if failure.signal is None else 128 + failure.signal
            assert result.exit_code in (code, EXIT_NO_PROGRESS)
