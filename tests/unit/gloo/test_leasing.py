"""Leases of jobs of several users at once: the locks, the agents' processes and the jobs' threads are real, the connections are not."""

import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from hvlaunch.agent.errands import leases as errand_module
from hvlaunch.agent.leases import AgentLeases
from hvlaunch.errors import HostError, HostLost, LeaseImpossible, LeasesTaken
from hvlaunch.gloo.leasing import Holder, HostOffer, JobLeases, Ticket, Unit, choose, first_claim, offer_of
from hvlaunch.job import Host, JobSpec, LeaseOptions

PATIENCE = 60.0
USERS = (3001, 3002, 3003, 3004) if os.geteuid() == 0 else (os.geteuid(),)


class Facts(NamedTuple):
    """As much of HostFacts as leases need."""

    boot_id: str
    leased: tuple[str, ...] | None = None


class LeaseAgent:
    """An agent's process, of some user: it holds what it is told, until it is killed or its driver is gone."""

    def __init__(self, uid: int) -> None:
        theirs, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._orders)
            os.close(self._answers)
            _be_agent(uid, theirs, answers)
        os.close(theirs)
        os.close(answers)
        self._from = os.fdopen(self._answers)
        self.is_dead = False

    def ask(self, order: Mapping[str, Any]) -> Mapping[str, Any] | None:
        try:
            os.write(self._orders, json.dumps(order).encode() + b"\n")
            line = self._from.readline()
        except (OSError, ValueError):
            return None
        return dict(json.loads(line)) if line else None

    def end(self, *, gently: bool) -> None:
        if self.is_dead:
            return
        self.is_dead = True
        if not gently:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self._orders)
        os.waitpid(self.pid, 0)


def _be_agent(uid: int, orders: int, answers: int) -> None:
    try:
        # The pipes of agents that were forked before keep no descriptor of theirs open.
        for path in Path("/proc/self/fd").iterdir():
            if (fd := int(path.name)) > 2 and fd not in (orders, answers):
                with suppress(OSError):
                    os.close(fd)
        if os.geteuid() == 0:
            os.setgid(uid)
            os.setuid(uid)
        held = AgentLeases()
        with os.fdopen(orders) as lines:
            for line in lines:
                os.write(answers, json.dumps(held.hold(json.loads(line))).encode() + b"\n")
    finally:
        os._exit(0)


class LookErrand:
    """The errand `leases`, in a thread."""

    def __init__(
        self, arguments: Mapping[str, Any], on_data: Callable[[bytes], None], on_end: Callable[..., None]
    ) -> None:
        self._stop = threading.Event()
        self.failure: HostError | None = None
        self.has_ended = False
        self._on_data, self._on_end = on_data, on_end
        self._thread = threading.Thread(target=self._run, args=(arguments,), daemon=True)
        self._thread.start()

    def _run(self, arguments: Mapping[str, Any]) -> None:
        stream = SimpleNamespace(
            write=lambda data: None if self.has_ended else self._on_data(data),
            wait=lambda _: self._stop.wait(0.02),
        )
        try:
            errand_module.run(dict(arguments), stream)  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 (as the runner of errands does)
            self.fail(HostError(f"{type(error).__name__}: {error}", host="h"))
        self.fail(None)

    def fail(self, error: HostError | None) -> None:
        if not self.has_ended:
            self.has_ended, self.failure = True, error
            self._stop.set()
            self._on_end(self)

    def result(self) -> object:
        if self.failure is not None:
            raise self.failure
        return {}

    def stop(self) -> None:
        self._stop.set()

    close_input = stop


class LeaseLink:
    """A link to an agent, whose frames may be late."""

    def __init__(self, host: Host, agent: LeaseAgent, rng: random.Random) -> None:
        self.host = host
        self.agent = agent
        self.held: Callable[[Mapping[str, Any]], None] = lambda _: None
        self.errands = SimpleNamespace(start=self._start)
        self.cut_until = 0.0
        self.is_lost = False
        self._rng = random.Random(rng.random())
        self._errand: LookErrand | None = None
        self.last: object = None
        self._starting = threading.Lock()
        self._frames: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._pump = threading.Thread(target=self._run, daemon=True)
        self._pump.start()

    def _start(
        self, _name: str, arguments: Mapping[str, Any], _limits: object, *, on_data: Any, on_end: Any
    ) -> LookErrand:
        with self._starting:
            if self.is_lost:
                raise HostLost("lost", host=self.host.name)
            self._errand = LookErrand(arguments, on_data, on_end)
        return self._errand

    def send(self, header: Mapping[str, Any]) -> None:
        self._frames.put(header)

    def tell_preparing(self, _stage: str) -> None:
        pass

    def lose(self) -> None:
        """The driver gives the host up, or is killed."""
        with self._starting:
            self.is_lost = True
        self._frames.put(None)
        if self._errand is not None:
            self._errand.fail(HostLost("lost", host=self.host.name))

    def _run(self) -> None:
        while (frame := self._frames.get()) is not None:
            self._delay()
            answer = None if self.is_lost else self.agent.ask(frame)
            self._delay()
            self.last = answer
            if answer is None:
                self.lose()
                return
            if not self.is_lost:
                self.held(answer)

    def _delay(self) -> None:
        time.sleep(self._rng.random() * 0.003 + max(0.0, self.cut_until - time.monotonic()))


class LeaseJob:
    """A job: its leases, its agents, and what becomes of it."""

    def __init__(
        self, world: "SharedHosts", name: str, workers: int, uid: int, *, wait: bool, fair_wait: float = 600.0
    ) -> None:
        self.name = name
        self.world = world
        self.outcome: str = ""
        self.leased: dict[str, tuple[str, ...]] = {}
        self.took = 0.0
        self.is_killed = False
        self.spec = JobSpec(
            command=("true",), hosts=tuple(Host(host) for host in world.hosts), cwd="/", np=workers
        )
        self.options = LeaseOptions(slots=world.slots, wait=wait, fair_wait=fair_wait)
        self.links = [LeaseLink(host, LeaseAgent(uid), world.rng) for host in self.spec.hosts]
        self._lock = threading.Lock()
        self._left = len(self.links)
        self._done = threading.Event()
        self.said: list[str] = []

    def start(self) -> None:
        self._began = time.monotonic()
        leases = JobLeases(self.spec, self.options, {"id": self.name, "began": time.time()}, self.said.append)
        for link in self.links:
            # Each host has a directory of its own, as a real one would.
            single = _InDirectory(leases, self.world.hosts[link.host.name])
            threading.Thread(target=self._take, args=(single, link), daemon=True).start()

    def _take(self, leases: Any, link: LeaseLink) -> None:
        def ready(facts: Facts) -> None:
            with self._lock:
                self.leased[link.host.name] = facts.leased or ()
                self._left -= 1
                if not self._left and not self.outcome:
                    self._grant()

        try:
            leases.lease_host(link, Facts("boot"), ready)
        except HostError as error:
            with self._lock:
                self._end(type(error).__name__)

    def _grant(self) -> None:
        """The lock is held."""
        assert sum(map(len, self.leased.values())) == self.spec.np
        # Workers of a killed agent have ended.
        living = [link.host.name for link in self.links if not link.agent.is_dead]
        units = [(host, unit) for host in living for unit in self.leased[host]]
        self.took = time.monotonic() - self._began
        self.outcome = "granted"
        self.world.grant(self, units)
        threading.Timer(self.world.rng.random() * 0.05, self.end).start()

    def end(self, *, gently: bool = True) -> None:
        with self._lock:
            self._end(self.outcome or "killed", gently=gently)

    def lose_host(self, link: LeaseLink) -> None:
        """Kill a host's agent; the workers end with it."""
        with self._lock:
            self.world.release(self)
            link.agent.end(gently=False)
        link.lose()

    def _end(self, outcome: str, *, gently: bool = True) -> None:
        if self._done.is_set():
            return
        self.outcome = outcome
        self.world.release(self)
        for link in self.links:
            link.lose()
        # Each agent learns of it in its own time.
        for link in self.world.rng.sample(self.links, len(self.links)):
            time.sleep(self.world.rng.random() * 0.005)
            link.agent.end(gently=gently)
        self._done.set()

    def wait(self) -> None:
        is_over = self._done.wait(PATIENCE)
        assert is_over, (
            f"{self.name} has no end; {self.outcome!r} {self.said} {[link.last for link in self.links]}"
        )


class _InDirectory:
    """Leases as one host has them: its agent and its errand see the host's own directory."""

    def __init__(self, leases: JobLeases, directory: str) -> None:
        self._leases = leases
        self._directory = directory

    def lease_host(self, link: LeaseLink, facts: Any, ready: Any) -> None:
        start, ask = link.errands.start, link.agent.ask
        link.errands.start = lambda name, arguments, limits, **calls: start(
            name, {**arguments, "directory": self._directory}, limits, **calls
        )
        link.agent.ask = lambda order: ask({**order, "directory": self._directory})  # type: ignore[method-assign]
        self._leases.lease_host(link, facts, ready)  # type: ignore[arg-type]


class SharedHosts:
    """Hosts that users share."""

    def __init__(self, place: Path, seed: int, hosts: int, slots: int) -> None:
        self.rng = random.Random(seed)
        self.slots = slots
        self.hosts = {f"h{number}": str(place / f"h{number}") for number in range(hosts)}
        for path in map(Path, self.hosts.values()):
            path.mkdir(parents=True)
            path.chmod(0o1777)  # here, since threads share a umask
        self._lock = threading.Lock()
        self._granted: dict[tuple[str, str], str] = {}
        self.double: list[str] = []

    def grant(self, job: LeaseJob, units: list[tuple[str, str]]) -> None:
        with self._lock:
            for unit in units:
                if unit in self._granted:
                    self.double.append(f"{unit} of {self._granted[unit]} was granted to {job.name}")
                self._granted[unit] = job.name

    def release(self, job: LeaseJob) -> None:
        with self._lock:
            self._granted = {unit: name for unit, name in self._granted.items() if name != job.name}

    def leaked(self) -> list[str]:
        """Return locks and tickets that somebody still holds."""
        states = {
            host: errand_module._LeaseLook(place, self.slots).state() for host, place in self.hosts.items()
        }
        return [
            f"{host}: {unit['name']} of {unit['holder']}"
            for host, state in states.items()
            for unit in state["units"]
            if not unit["is_free"]
        ] + [f"{host}: {ticket}" for host, state in states.items() for ticket in state["tickets"]]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that other users can get to: those of pytest are closed now and then."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


def play(place: Path, seed: int) -> Counter[str]:
    """Play a random schedule of jobs, kills and cuts; return how the jobs have ended."""
    world = SharedHosts(place, seed, hosts=4, slots=3)
    rng = world.rng
    jobs = [
        LeaseJob(
            world,
            f"job{seed}-{number}",
            rng.choice([1, 2, 3, 5, 8, 12, 13]),
            rng.choice(USERS),
            wait=rng.random() < 0.7,
            fair_wait=rng.choice([0.05, 600.0]),
        )
        for number in range(rng.randrange(2, 6))
    ]
    for job in jobs:
        time.sleep(rng.random() * 0.03)
        job.start()
        if rng.random() < 0.3:
            rng.choice(job.links).cut_until = time.monotonic() + rng.random() * 0.2
        victim = rng.choice(jobs)
        if victim.outcome == "" and rng.random() < 0.25 and hasattr(victim, "_began"):
            victim.is_killed = True
            if rng.random() < 0.5:
                victim.end(gently=rng.random() < 0.5)
            else:
                victim.lose_host(rng.choice(victim.links))
    for job in jobs:
        job.wait()
    assert world.double == []
    assert world.leaked() == []
    for job in jobs:
        expected = {"granted"} if job.options.wait else {"granted", LeasesTaken.__name__}
        if job.spec.np == 13:
            expected = {LeaseImpossible.__name__}
        if job.is_killed:
            expected |= {
                "granted",
                "killed",
                HostLost.__name__,
                LeaseImpossible.__name__,
                LeasesTaken.__name__,
            }
        assert job.outcome in expected, (job.name, job.outcome, job.said)
    return Counter(job.outcome for job in jobs)


@pytest.mark.parametrize("seed", range(12))
def test_random_schedules_give_no_unit_twice_and_leak_no_lock(place: Path, seed: int) -> None:
    play(place / "hosts", seed)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_thousand_random_schedules(place: Path) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(1000, 2000):
        outcomes += play(place / str(seed), seed)
    assert outcomes["granted"] > 1000
    assert all(outcomes[name] > 30 for name in ("killed", "LeasesTaken", "LeaseImpossible", "HostLost"))


def test_a_large_job_is_not_starved_by_small_ones(place: Path) -> None:
    """Small jobs follow each other so closely that the hosts are never free at once; after its wait the large one is next."""
    world = SharedHosts(place / "hosts", 1, hosts=2, slots=2)
    count = 24
    small = [
        LeaseJob(world, f"small{number}", 1, USERS[0], wait=True, fair_wait=0.5) for number in range(count)
    ]
    large = LeaseJob(world, "large", 4, USERS[-1], wait=True, fair_wait=0.5)
    for job in small[:6]:
        job.start()
    large.start()
    for job in small[6:]:
        time.sleep(0.08)
        job.start()
    large.wait()
    assert large.outcome == "granted"
    after = sum(not job.outcome for job in small)
    for job in small:
        job.wait()
    assert world.double == []
    assert 0.0 < large.took < 5.0
    assert after > 0


def test_a_waiting_job_names_the_holders_and_its_leases(place: Path) -> None:
    world = SharedHosts(place, 2, hosts=2, slots=2)
    first = LeaseJob(world, "first", 3, USERS[0], wait=False)
    second = LeaseJob(world, "second", 4, USERS[-1], wait=True)
    third = LeaseJob(world, "third", 2, USERS[-1], wait=False)
    world.rng.random = lambda: 10.0  # type: ignore[method-assign] # the first job runs until it is told to end
    first.start()
    while first.outcome != "granted":
        time.sleep(0.01)
    second.start()
    third.start()
    third.wait()
    while not second.said:
        time.sleep(0.01)
    world.rng.random = lambda: 0.0  # type: ignore[method-assign]
    first.end()
    second.wait()
    assert (first.outcome, second.outcome, third.outcome) == ("granted", "granted", "LeasesTaken")
    assert first.said == ["leases 3 slots: 2 on h0, 1 on h1"]
    assert second.said[0].startswith("waits for 4 slots; free: 1 of 4; ")
    assert "job first for" in second.said[0]
    # All of them: with fewer it would depend on which host's agent of the first job ends first.
    assert second.said[1:] == ["leases 4 slots: 2 on h0, 2 on h1"]


def test_idle_gpus_are_a_warning_and_then_the_end_of_the_job():
    said: list[str] = []
    stopped: list[str] = []
    spec = JobSpec(command=("true",), hosts=(Host("a"), Host("b")), cwd="/", np=4, gpus_per_worker=2)
    about = {"id": "x", "began": 0.0}
    leases = JobLeases(spec, LeaseOptions(max_idle=7200.0), about, said.append, stop=stopped.append)
    looks = [SimpleNamespace(idle=None, errand=SimpleNamespace(has_ended=False)) for _ in "ab"]
    watching = threading.Thread(target=leases._watch_idle, args=(looks, 7200.0), daemon=True)
    watching.start()
    waiting = Waiting(leases._changed, watching)
    waiting.settle()

    def idle(*seconds: float | None) -> None:
        with leases._changed:
            for look, value in zip(looks, seconds, strict=True):
                look.idle = value
            leases._changed.notify_all()
        waiting.settle()

    # One host is at work, or has not said anything yet.
    idle(9000.0, 20.0)
    idle(9000.0, None)
    assert (said, stopped) == ([], [])
    idle(9000.0, 3600.0)
    idle(9000.0, 3700.0)
    warning = (
        "warning: its 8 GPUs have done nothing for 1 h 0 min; the job is stopped after 2 h 0 min (--max-idle)"
    )
    assert (said, stopped) == ([warning], [])
    # Work in between begins it all again.
    idle(0.0, 3720.0)
    idle(3650.0, 7500.0)
    assert len(said) == 2
    idle(7210.0, 11000.0)
    watching.join(PATIENCE)
    assert stopped == ["the job is stopped: its 8 GPUs have done nothing for 2 h 0 min (--max-idle)"]


def test_idle_watch_ends_with_its_errands():
    spec = JobSpec(command=("true",), hosts=(Host("a"),), cwd="/", np=1)
    leases = JobLeases(
        spec, LeaseOptions(max_idle=1.0), {"id": "x", "began": 0.0}, pytest.fail, stop=pytest.fail
    )
    looks = [SimpleNamespace(idle=0.5, errand=SimpleNamespace(has_ended=False))]
    watching = threading.Thread(target=leases._watch_idle, args=(looks, 1.0), daemon=True)
    watching.start()
    looks[0].idle, looks[0].errand.has_ended = 100.0, True
    while watching.is_alive():
        with leases._changed:
            leases._changed.notify_all()
        watching.join(0.01)


class Waiting:
    """Waits until another thread waits for a condition again."""

    def __init__(self, changed: threading.Condition, watching: threading.Thread) -> None:
        self._changed = changed
        self._watching = watching

    def settle(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with self._changed:
                if self._changed._waiters:  # type: ignore[attr-defined]
                    return
            if not self._watching.is_alive():
                return
            time.sleep(0.001)


def offer(
    name: str, free: int, taken: int = 0, *, most: int | None = None, tickets: tuple[Ticket, ...] = ()
) -> HostOffer:
    units = [Unit(f"{name}{number}", number >= taken) for number in range(free + taken)]
    return HostOffer(name, tuple(units), tickets, most)


def counts(offers: list[HostOffer], workers: int, per_worker: int = 1) -> dict[str, int] | None:
    chosen = choose(offers, workers, per_worker)
    return None if chosen is None else {name: len(units) for name, units in chosen.items()}


def test_few_hosts_are_taken_and_the_last_leaves_large_gaps() -> None:
    assert counts([offer("a", 2), offer("b", 8), offer("c", 8)], 16) == {"b": 8, "c": 8}
    assert counts([offer("a", 8), offer("b", 4), offer("c", 8)], 12) == {"a": 8, "b": 4}
    assert counts([offer("a", 8), offer("b", 2)], 2) == {"b": 2}
    assert counts([offer("a", 4, 4), offer("b", 4)], 4) == {"a": 4}
    assert choose([offer("a", 2, 2)], 2, 1) == {"a": ("a2", "a3")}


def test_too_few_units_give_no_choice_and_workers_stay_whole() -> None:
    assert counts([offer("a", 3), offer("b", 4)], 8) is None
    assert counts([], 1) is None
    assert counts([offer("a", 3), offer("b", 3)], 3, per_worker=2) is None
    assert counts([offer("a", 5), offer("b", 3)], 3, per_worker=2) == {"a": 4, "b": 2}
    assert counts([offer("a", 8, most=2), offer("b", 8, most=2)], 4) == {"a": 2, "b": 2}
    assert counts([offer("a", 8, most=2), offer("b", 8, most=2)], 5) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_choice_is_whole_free_and_of_the_fewest_hosts(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        per_worker = rng.choice([1, 1, 2, 4])
        offers = [
            offer(f"h{n}.", rng.randrange(9), rng.randrange(5), most=rng.choice([None, None, 2]))
            for n in range(rng.randrange(1, 6))
        ]
        workers = rng.randrange(1, 20)
        rooms = sorted((o.room(len(o.free), per_worker=per_worker) for o in offers), reverse=True)
        chosen = choose(offers, workers, per_worker)
        assert (chosen is None) is (sum(rooms) < workers)
        if chosen is not None:
            free = {o.host: set(o.free) for o in offers}
            assert all(set(units) <= free[name] for name, units in chosen.items())
            assert sum(map(len, chosen.values())) == workers * per_worker
            least = next(n for n in range(1, len(rooms) + 1) if sum(rooms[:n]) >= workers)
            assert len(chosen) == least


def ticket(job: str, since: float, *, is_mine: bool = False) -> Ticket:
    return Ticket(since, job, "ann", is_mine=is_mine)


def test_the_first_ticket_has_the_claim_after_its_wait() -> None:
    here = offer("a", 4, tickets=(ticket("j1", 100.0), ticket("j2", 50.0), ticket("me", 90.0, is_mine=True)))
    assert first_claim(here, "me", 90.0, 60.0, 105.0) is None
    assert first_claim(here, "me", 90.0, 60.0, 110.0) == ticket("j2", 50.0)
    # j1 has waited long, too, but came later.
    alone = here._replace(tickets=(ticket("j1", 100.0), ticket("me", 90.0, is_mine=True)))
    assert first_claim(alone, "me", 90.0, 60.0, 1000.0) is None
    assert first_claim(alone, "other", inf, 60.0, 1000.0) == ticket("me", 90.0, is_mine=True)
    # A ticket of this name that another user has made is not mine.
    forged = here._replace(tickets=(ticket("me", 10.0),))
    assert first_claim(forged, "me", 90.0, 60.0, 1000.0) == ticket("me", 10.0)
    # An earlier time of mine, before the limit for tickets, keeps nobody waiting for itself.
    assert (
        first_claim(here._replace(tickets=(ticket("me", 90.0, is_mine=True),)), "me", 95.0, 1.0, 1000.0)
        is None
    )


def test_two_jobs_never_keep_each_other_away() -> None:
    """Two tickets of about the same time, on hosts that list them in any order, or lack one of them."""
    mine, theirs = ticket("j1", 100.0), ticket("j2", 100.0)
    for tickets in ((mine, theirs), (theirs, mine), (theirs,), (mine,), ()):
        here = offer("a", 4, tickets=tickets)
        assert first_claim(here, "j1", 100.0, 60.0, 1000.0) is None
        assert first_claim(here, "j2", 100.0, 60.0, 1000.0) == (mine if mine in tickets else None)


def test_processes_without_a_lease_are_outside() -> None:
    holder = {"user": "ann", "pid": 7, "job": "j1", "since": 5.0, "busy_at": None}
    unit = {"name": "GPU-1", "is_free": False, "holder": holder, "processes": []}
    process = {"pid": 9, "user": "bob", "command": "python"}
    state = {
        "units": [
            unit,
            {**unit, "holder": None, "processes": [process]},
            {**unit, "holder": None},
            {**unit, "holder": None, "is_free": True},
        ],
        "tickets": [{"since": 1.0, "job": "j2", "user": "cat", "is_mine": False}],
    }
    shown = offer_of("a", 3, state)
    assert [unit.holder for unit in shown.units] == [
        Holder("ann", "j1", 5.0),
        Holder("bob", "python", is_outside=True),
        Holder("?", "?", is_outside=True),
        None,
    ]
    assert shown.tickets == (Ticket(1.0, "j2", "cat", is_mine=False),)
    assert (shown.free, shown.most) == (("GPU-1",), 3)
