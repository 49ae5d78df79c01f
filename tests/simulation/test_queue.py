"""Random histories of a queue: no job is lost, started twice or reordered, and no backfill delays a promised start.

The hosts, the users' commands, the ends of jobs and the kills of the server are played; the decisions are the product's.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from math import inf
from typing import Any

import pytest

from hvlaunch.outside import queue as queue_module
from hvlaunch.outside.queue import (
    ACTIVE,
    MARGIN,
    Added,
    Event,
    Finished,
    Held,
    Moved,
    QueuedJob,
    Released,
    Removed,
    Returned,
    Running,
    Schedule,
    Starting,
    StartJob,
    StopJob,
    WithdrawJob,
    Withdrawn,
    event_of,
    words_of,
)

HOSTS = ("a", "b", "c", "d")
GPUS = 4
STEP = 2.0
SHORT_RUN = 300
LONG_RUN = 20_000


class QueueWorld:
    """Hosts with GPUs, a user, and a server that may be killed at any moment."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        self.log: list[str] = []
        self.schedule = Schedule()
        self.free = Counter(dict.fromkeys(HOSTS, GPUS))
        self.has_foreign = self.random.random() < 0.3
        self.foreign: Counter[str] = Counter()
        self.ready: dict[str, float] = {}
        """When processes of starting jobs reach their hosts, by the job's id in the queue."""
        self.ends: dict[str, float] = {}
        self.seen: set[str] = set()
        """Starting jobs that have seen their hosts."""
        self.begun: Counter[str] = Counter()
        self.promises: dict[str, float] = {}
        self.tries = count()
        self.released: set[str] = set()
        self.asked: set[str] = set()

    def append(self, *events: Event) -> None:
        self.log.append(json.dumps([words_of(event) for event in events]))
        for event in events:
            self.schedule.apply(event)

    def restart(self) -> None:
        """Make the list anew from the log, as another server does."""
        before = self.schedule.jobs
        self.schedule = Schedule()
        for line in self.log:
            for words in json.loads(line):
                self.schedule.apply(event_of(words))
        assert self.schedule.jobs == before
        if self.random.random() < 0.2:
            # The log is shortened.
            self.log.clear()
            everything = Added(tuple(self.schedule.jobs.values()), self.schedule.next)
            self.schedule = Schedule()
            self.append(everything)
            assert self.schedule.jobs == before

    def job(self, number: str, **fields: Any) -> QueuedJob:
        draw = self.random
        hosts = HOSTS if draw.random() < 0.6 else tuple(sorted(draw.sample(HOSTS, draw.randint(1, 3))))
        per_worker = draw.choice([1, 1, 1, 2, 4])
        workers = draw.randint(1, max(1, len(hosts) * GPUS // per_worker))
        limit = draw.choice([None, 120.0, 300.0, 600.0, 3600.0])
        return QueuedJob(
            number,
            "",
            "train",
            self.now,
            hosts,
            workers,
            per_worker,
            time_limit=limit,
            since=self.now,
            **fields,
        )

    def submit(self) -> None:
        draw, number = self.random, str(self.schedule.next)
        after: tuple[tuple[str, str], ...] = ()
        if self.schedule.jobs and draw.random() < 0.25:
            other = draw.choice(list(self.schedule.jobs.values()))
            after = ((draw.choice([other.id, other.array]), draw.choice(["ok", "any"])),)
        if draw.random() < 0.2:
            first = self.job(f"{number}_0", most=draw.choice([None, 1, 2]), after=after)
            tasks = [first._replace(id=f"{number}_{index}") for index in range(draw.randint(1, 5))]
            self.append(Added(tuple(tasks)))
        else:
            self.append(Added((self.job(number, after=after, is_held=draw.random() < 0.05),)))

    def command(self) -> None:
        draw = self.random
        jobs = [job for job in self.schedule.jobs.values() if job.state != "ended"]
        if not jobs or draw.random() < 0.6:
            self.submit()
            return
        job = draw.choice(jobs)
        word = draw.choice(["rm", "top", "hold", "release", "release"])
        if word == "rm":
            self.append(Removed(job.id, self.now))
        elif word == "top" and job.state != "running":
            self.append(Moved(job.id))
            self.promises.clear()
        elif word == "hold":
            self.append(Held(job.id))
        elif word == "release":
            self.append(Released(job.id))
            self.released.add(job.id)

    def foreigner(self) -> None:
        """Another user takes GPUs, or gives them back."""
        host = self.random.choice(HOSTS)
        if self.foreign[host]:
            self.free[host] += self.foreign.pop(host)
        elif self.free[host]:
            self.foreign[host] = self.random.randint(1, self.free[host])
            self.free[host] -= self.foreign[host]

    def turn(self, *, has_user: bool) -> None:
        self.now = self.now + self.random.uniform(0.2, STEP) if has_user else self.next_time()
        if has_user and self.random.random() < 0.3:
            self.command()
        if self.has_foreign and self.random.random() < (0.1 if has_user else 0.0):
            self.foreigner()
        if not has_user:
            for host in list(self.foreign):
                self.free[host] += self.foreign.pop(host)
        self.play_jobs()
        if self.random.random() < 0.02:
            self.restart()
        self.decide()
        self.check()

    def next_time(self) -> float:
        """Return when something happens next by itself."""
        starting = [job.id for job in self.schedule.jobs.values() if job.state == "starting"]
        times = [
            *self.ends.values(),
            *(self.ready[number] for number in starting if number in self.ready),
            *(job.not_before for job in self.schedule.jobs.values() if job.state == "waiting"),
            *(
                job.since + (job.time_limit or inf)
                for job in self.schedule.jobs.values()
                if job.state == "running"
            ),
        ]
        return self.now + min(
            [30.0, *(at - self.now + 0.1 for at in times if at > self.now)]
            if starting
            else [4000.0, *(at - self.now + 0.1 for at in times if at > self.now)]
        )

    def play_jobs(self) -> None:
        for number, at in list(self.ends.items()):
            if at <= self.now:
                self.end(number, self.random.choice([0, 0, 0, 1]))
        starting = [job for job in self.schedule.jobs.values() if job.state == "starting"]
        self.random.shuffle(starting)
        for job in starting:
            at = self.ready.setdefault(job.id, self.now + self.random.uniform(0.3, 5.0))
            if at <= self.now:
                self.reach_hosts(job)

    def reach_hosts(self, job: QueuedJob) -> None:
        self.seen.add(job.id)
        if job.is_withdrawn:
            self.back(job, 0.0)
        elif job.id not in self.promises and self.random.random() < 0.03:
            self.back(job, self.now + 30.0)
        elif job.room(self.free) >= job.workers:
            assert job.id not in self.begun, "started twice"
            self.begun[job.id] += 1
            self.lease(job)
        elif job.is_backfill:
            self.back(job, self.now + 60.0)

    def back(self, job: QueuedJob, not_before: float) -> None:
        self.ready.pop(job.id)
        self.seen.discard(job.id)
        self.promises.pop(job.id, None)
        self.append(Returned(job.id, self.now, "no host", not_before))

    def lease(self, job: QueuedJob) -> None:
        units: dict[str, int] = {}
        left = job.workers
        for host in sorted(job.hosts, key=lambda host: (-self.free[host], host)):
            workers = min(left, self.free[host] // job.per_worker)
            if workers:
                units[host] = workers * job.per_worker
                left -= workers
        self.free.subtract(units)
        promised = self.promises.pop(job.id, inf)
        # A turn may pass before its process looks.
        assert self.now <= promised + 2 * 30.0, f"{job.id} was promised {self.now - promised} s earlier"
        self.append(Running(job.id, self.now, units))
        longest = job.time_limit or 4000.0
        self.ends[job.id] = self.now + self.random.choice([1.0, longest / 3, longest, longest + 1e6])
        if job.time_limit is None:
            self.ends[job.id] = self.now + self.random.uniform(1.0, 4000.0)

    def end(self, number: str, code: int) -> None:
        self.ends.pop(number)
        job = self.schedule.jobs[number]
        self.free.update(job.units)
        self.append(Finished(number, self.now, code, ""))

    def seen_free(self) -> Mapping[str, int]:
        jobs = [job for job in self.schedule.jobs.values() if job.id in self.seen and job.state == "starting"]
        return {host: self.free[host] for job in jobs for host in job.hosts}

    def decide(self) -> None:
        free = self.seen_free()
        for action in self.schedule.decide(self.now, free):
            match action:
                case StartJob(number, is_fill):
                    self.check_start(self.schedule.jobs[number], is_fill=is_fill)
                    self.append(Starting(number, f"{next(self.tries):012x}", self.now, is_fill))
                    self.ready[number] = self.now + self.random.uniform(0.3, 5.0)
                    self.asked.discard(number)
                case WithdrawJob(number):
                    assert self.schedule.jobs[number].state == "starting"
                    self.append(Withdrawn(number))
                    self.promises.pop(number, None)
                case StopJob(number):
                    # It ends within the margin.
                    self.ends[number] = min(self.ends[number], self.now + self.random.uniform(0.0, 20.0))
            if self.random.random() < 0.02:
                # The server is killed in the middle of its work.
                self.restart()
                break
        self.note_promises()

    def note_promises(self) -> None:
        free = self.seen_free()
        for job in self.schedule.jobs.values():
            is_head = job.state == "starting" and not job.is_backfill and not job.is_withdrawn
            if is_head and job.id in self.seen and not self.has_foreign:
                promised = self.schedule.promise(job, self.now, free)
                self.promises[job.id] = min(promised, self.promises.get(job.id, inf))

    def is_free_to_start(self, job: QueuedJob) -> bool:
        """True if nothing but its place in the list and the GPUs keeps the job."""
        tasks = [other for other in self.schedule.jobs.values() if other.array == job.array]
        active = sum(other.state in ACTIVE for other in tasks)
        return (
            job.state == "waiting"
            and not job.is_held
            and self.now >= job.not_before
            and (job.most is None or active < job.most)
            and all(self.is_met(job, name, kind) for name, kind in job.after)
        )

    def is_met(self, job: QueuedJob, name: str, kind: str) -> bool:
        others = [other for other in self.schedule.jobs.values() if name in (other.id, other.array)]
        return all(
            other.state == "ended" and (other.code == 0 or kind == "any" or job.id in self.released)
            for other in others
        )

    def check_start(self, job: QueuedJob, *, is_fill: bool) -> None:
        assert job.id not in self.begun, "started twice"
        assert self.is_free_to_start(job), f"{job} must not start"
        if is_fill:
            assert job.time_limit is not None
            return
        places = list(self.schedule.jobs)
        for other in self.schedule.jobs.values():
            is_ahead = (-other.priority, places.index(other.id)) < (-job.priority, places.index(job.id))
            shares = bool({*other.hosts} & {*job.hosts})
            waits = other.state == "starting" and not other.is_backfill
            assert not (shares and (waits or (is_ahead and self.is_free_to_start(other)))), (
                f"{job.id} passes {other.id}"
            )

    def check(self) -> None:
        assert all(0 <= self.free[host] <= GPUS for host in HOSTS)
        active = Counter(job.array for job in self.schedule.jobs.values() if job.state in ACTIVE)
        for job in self.schedule.jobs.values():
            assert job.most is None or active[job.array] <= job.most, "too many of an array"
            if job.state == "running" and job.time_limit is not None:
                assert self.now <= job.since + job.time_limit + MARGIN, "no limit"

    def stuck(self) -> list[QueuedJob]:
        """Return jobs that could still start."""
        blocked = {job.id for job in self.schedule.jobs.values() if job.state != "ended" and job.is_held}
        before = -1
        while before != len(blocked):
            before = len(blocked)
            for job in self.schedule.jobs.values():
                words = self.schedule.waits_for(job, self.now) if job.state == "waiting" else ""
                names = {name for name, _ in job.after}
                waits = {other.id for other in self.schedule.jobs.values() if {other.id, other.array} & names}
                if job.state == "waiting" and (words.startswith("never") or waits & blocked):
                    blocked.add(job.id)
        return [job for job in self.schedule.jobs.values() if job.state != "ended" and job.id not in blocked]


def play(seed: int) -> QueueWorld:
    world = QueueWorld(seed)
    for _ in range(world.random.randint(10, 70)):
        world.turn(has_user=True)
    # Nobody takes part any more: whatever can start does, and ends, within the sum of all durations.
    limit = world.now + sum((job.time_limit or 4000.0) + 400.0 for job in world.schedule.jobs.values())
    while world.stuck():
        for _ in range(20):
            world.turn(has_user=False)
        assert world.now < limit or not world.stuck(), f"starved: {world.stuck()[0]}"
    for job in world.schedule.jobs.values():
        if job.state == "ended" and not job.is_removed:
            assert job.code is not None and job.id in world.begun, f"{job.id} was lost"
    return world


def test_random_histories() -> None:
    worlds = [play(seed) for seed in range(SHORT_RUN)]
    passed = sum(job.is_backfill for world in worlds for job in world.schedule.jobs.values())
    assert passed > SHORT_RUN / 10, "too few jobs pass others: the histories show nothing"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_many_random_histories() -> None:
    for seed in range(SHORT_RUN, LONG_RUN):
        play(seed)


def test_a_promise_counts_a_backfill_that_has_no_gpus_yet() -> None:
    schedule = Schedule()
    whole = QueuedJob("1", "", "train", 0.0, ("a",), 4, 1)
    jobs = (
        whole._replace(id="1", workers=2, time_limit=100.0),
        whole._replace(id="2", workers=4),
        whole._replace(id="3", workers=1, time_limit=1000.0),
    )
    for event in (
        Added(jobs),
        Starting("1", "x", 0.0, is_backfill=False),
        Running("1", 0.0, {"a": 2}),
        Starting("2", "y", 0.0, is_backfill=False),
    ):
        schedule.apply(event)
    head = schedule.jobs["2"]
    assert schedule.promise(head, 10.0, {"a": 2}) == 100.0 + MARGIN
    # It was started when there was no promise yet.
    schedule.apply(Starting("3", "z", 10.0, is_backfill=True))
    assert schedule.promise(head, 10.0, {"a": 2}) == 10.0 + 1000.0 + MARGIN
    schedule.apply(Withdrawn("3"))
    assert schedule.promise(head, 10.0, {"a": 2}) == 100.0 + MARGIN


PLANTED: dict[str, tuple[str, Callable[..., Any]]] = {
    "any job that fits passes": (
        "_may_pass",
        lambda self, job, heads, now, free: job.time_limit is not None and job.room(free) >= job.workers,
    ),
    "nothing waits by itself": ("_waits_by_itself", lambda self, job, now: False),
    "failed jobs do not count": ("_unmet", lambda self, job: iter(())),
    "limits do not count": ("_ends", lambda self, job, now: iter(())),
    "in order of their numbers": (
        "in_order",
        lambda self: [job for job in self.jobs.values() if job.state != "ended"],
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_histories_find_planted_faults(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attribute, fault = PLANTED[name]
    monkeypatch.setattr(queue_module.Schedule, attribute, fault)
    with pytest.raises(AssertionError):
        for seed in range(SHORT_RUN):
            play(seed)
