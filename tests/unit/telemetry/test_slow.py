"""The slowest host of a job: synthetic courses of jobs, slow and healthy, with noise."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from hvlaunch.telemetry.sample import GpuSample, HostSample, WorkerSample
from hvlaunch.telemetry.slow import SPAN, slow_host

INTERVAL = 5.0
ROUNDS = 10


@dataclass
class Machine:
    """A host of a synchronous job: what its workers do in each second of the job's pace."""

    name: str
    ranks: Sequence[int]
    cores: int = 32
    threads: float = 1.0
    """Cores that a worker uses while it computes."""
    works: Mapping[int, float] = field(default_factory=dict)
    """Part of the time in which a rank computes, if not that of all."""
    slow: float = 1.0
    """How much longer it takes for the same work."""
    by: str = ""
    """What slows it: queue, clock, disk, limit, steal, memory, network, gpu..."""
    gpus: int = 0
    cpu_time: dict[int, float] = field(default_factory=dict)
    waited: dict[int, float] = field(default_factory=dict)

    def sample(self, time: float, pace: float, noise: random.Random, at: int) -> HostSample:
        """Return the next sample. The job takes `pace` times as long as it would without the slow host."""
        workers = []
        foreign = 0.3
        for rank in self.ranks:
            part = self.works.get(rank, 0.6)
            if callable(part):
                part = part(at)
            jitter = noise.uniform(0.9, 1.1)
            busy = min(1.0, part / pace * jitter)
            lost = min(1.0 - busy, busy * (self.slow - 1.0)) if self.slow > 1 else 0.0
            cpu, waited, state = busy, noise.uniform(0.0, 0.03) * busy, noise.choice("RSS")
            if self.by in ("queue", "limit", "steal"):
                waited += lost
            elif self.by == "clock":
                cpu += lost
            elif self.by in ("disk", "memory"):
                state = "D" if noise.random() < lost / max(busy, lost) else "S"
            self.cpu_time[rank] = self.cpu_time.get(rank, 0.0) + cpu * self.threads * INTERVAL
            self.waited[rank] = self.waited.get(rank, 0.0) + waited * self.threads * INTERVAL
            workers.append(_worker(rank, self.cpu_time[rank], self.waited[rank], state, self.gpus))
        if self.by == "queue":
            foreign = 0.6 * self.cores
        used = sum(worker.cpu for worker in workers)
        return HostSample(
            **_HOST,
            host=self.name,
            time=time,
            cores=self.cores,
            cpu=used + foreign,
            workers=tuple(workers),
            gpus=tuple(self._gpu(number, pace, noise) for number in range(self.gpus)),
            clock=(1400.0 if self.by == "clock" else 2900.0) * noise.uniform(0.95, 1.05),
            stolen=0.3 * self.cores if self.by == "steal" else noise.uniform(0.0, 0.005) * self.cores,
            limited=0.4 if self.by == "limit" else 0.0,
            pressure={
                "cpu": noise.uniform(0, 60),
                "io": {"disk": 35.0, "gpu disk": 70.0}.get(self.by, noise.uniform(0, 6)),
                "memory": 30.0 if self.by in ("memory", "gpu memory") else noise.uniform(0, 1),
            },
            resent=0.04 if "network" in self.by else noise.choice([0, 0, 0.0005, 0.002]),
        )

    def _gpu(self, number: int, pace: float, noise: random.Random) -> GpuSample:
        clock, utilization = 1700.0, noise.uniform(0.93, 1.0)
        causes: tuple[str, ...] = ()
        if noise.random() < 0.5:
            causes = ("power cap",)
            clock *= noise.uniform(0.94, 1.0)
        if number == 1 and self.by.startswith("gpu "):
            match self.by:
                case "gpu heat":
                    clock, causes = 800.0, ("hardware thermal slowdown",)
                case "gpu power":
                    clock, causes = 1300.0, ("power cap",)
                case "gpu brake":
                    clock, causes = 1500.0, ("power brake",)
                case "gpu clock":
                    clock, causes = 1000.0, ()
        if self.by in ("gpu disk", "gpu memory", "gpu queue"):
            utilization = noise.uniform(0.35, 0.5)
        return replace(_GPU, index=number, clock=clock, throttled=causes, utilization=utilization)


_HOST: dict[str, Any] = {
    "load": 1.0,
    "memory_used": 1,
    "memory_total": 2,
    **dict.fromkeys(("network_in", "network_out", "disk_read", "disk_write"), 0.0),
    "free": {},
    "problems": (),
}
_GPU = GpuSample(0, "NVIDIA H100", 0.9, 1, 2, 600.0, 1.0, 60.0, (), 0, (), ())


def _worker(rank: int, cpu_time: float, waited: float, state: str, gpus: int) -> WorkerSample:
    return WorkerSample(
        rank=rank,
        pid=100 + rank,
        processes=1,
        cpu=0.5,
        cpu_time=cpu_time,
        memory=1,
        state=state,
        threads=4,
        waits_in=None,
        io=0,
        last_output=None,
        gpus=(rank % gpus,) if gpus else (),
        busiest=100 + rank,
        waited=waited,
    )


def course(
    machines: Sequence[Machine], seed: int = 0, rounds: int = ROUNDS, pace: float | None = None
) -> list[dict[str, HostSample]]:
    """Return the samples of a job whose pace is that of its slowest host."""
    noise = random.Random(seed)
    pace = max(machine.slow for machine in machines) if pace is None else pace
    return [
        {
            machine.name: machine.sample(number * INTERVAL + noise.uniform(0, 0.3), pace, noise, number)
            for machine in machines
        }
        for number in range(rounds)
    ]


def hosts(count: int, per_host: int = 2, **more: Any) -> list[Machine]:
    return [
        Machine(f"h{number}", range(number * per_host, (number + 1) * per_host), **more)
        for number in range(count)
    ]


SLOW: list[tuple[str, dict[str, Any], str, str]] = [
    ("cgroup", {"by": "limit", "slow": 1.6}, "cpu", "the CPU limit of its cgroup stops its workers for 40 %"),
    ("virtual machine", {"by": "steal", "slow": 1.5}, "cpu", "other virtual machines use 9.6 of its 32"),
    ("foreign programs", {"by": "queue", "slow": 1.5}, "cpu", "other programs use 19."),
    ("few processors", {"by": "queue", "slow": 1.6, "cores": 2}, "cpu", "wait for a processor for"),
    ("clock", {"by": "clock", "slow": 1.6}, "clock", "its processors run at 1"),
    ("disk", {"by": "disk", "slow": 1.6}, "disk", "programs wait for a disk for "),
    ("memory", {"by": "memory", "slow": 1.6}, "memory", "its memory is short: programs wait for it for 30 %"),
    ("network", {"by": "network"}, "network", "it sends 4.0 % of its TCP segments again, the others 0."),
]
SLOW_GPUS: list[tuple[str, dict[str, Any], str, str]] = [
    ("heat", {"by": "gpu heat"}, "throttling", "GPU 1 runs at 800 MHz (hardware thermal slowdown), those of"),
    (
        "power cap",
        {"by": "gpu power"},
        "throttling",
        "GPU 1 runs at 1300 MHz (power cap), those of the others",
    ),
    (
        "power brake",
        {"by": "gpu brake"},
        "throttling",
        "GPU 1 runs at 1500 MHz (power brake), those of the others",
    ),
    ("low clock", {"by": "gpu clock"}, "clock", "GPU 1 runs at 1000 MHz, those of the others at 1"),
    ("data from a slow disk", {"by": "gpu disk"}, "disk", "programs wait for a disk for 70 %"),
    ("data without memory", {"by": "gpu memory"}, "memory", "its memory is short"),
    ("network of GPUs", {"by": "gpu network"}, "network", "it sends 4.0 % of its TCP segments again"),
]


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize(
    ("what", "reason", "words"), [pytest.param(*row[1:], id=row[0]) for row in (*SLOW, *SLOW_GPUS)]
)
def test_each_kind_of_slow_host_is_named_with_its_reason(
    count: int, what: dict[str, Any], reason: str, words: str
) -> None:
    gpus = 2 if what["by"].startswith("gpu") else 0
    for seed in range(5):
        machines = hosts(count, gpus=gpus)
        machines[1] = replace(machines[1], **what)
        verdict = slow_host(course(machines, seed), {})
        assert verdict is not None
        assert (verdict.host, verdict.reason) == ("h1", reason)
        assert words in verdict.evidence
        if reason == "network":
            assert verdict.factor is None
        elif not gpus:
            assert 1.25 <= (verdict.factor or 0.0) <= 2.8


def test_the_factor_is_how_much_longer_a_host_takes() -> None:
    machines = hosts(4, works=dict.fromkeys(range(8), 0.9))
    machines[2] = replace(machines[2], by="limit", slow=2.0)
    verdict = slow_host(course(machines, 3), {})
    assert verdict is not None
    assert verdict.factor == pytest.approx(2.0, abs=0.25)


@pytest.mark.parametrize("shard", range(2))
def test_healthy_jobs_have_no_slow_host(shard: int) -> None:
    """200 jobs: few and many hosts, GPUs, processors, noise, spikes, and steps of all kinds."""
    for seed in range(shard, 200, 2):
        dice = random.Random(f"healthy {seed}")
        machines = hosts(
            dice.choice([2, 3, 4, 8, 16]),
            per_host=dice.choice([1, 2, 4]),
            gpus=dice.choice([0, 0, 4]),
            threads=dice.choice([1.0, 4.0]),
        )
        part = dice.uniform(0.05, 0.95)
        for machine in machines:
            machine.works = {rank: part * dice.uniform(0.93, 1.07) for rank in machine.ranks}
        samples = course(machines, seed, pace=1.0)
        for _ in range(dice.randint(0, 3)):
            _spike(samples, dice)
        assert slow_host(samples, {}) is None, seed


def _spike(samples: list[dict[str, HostSample]], dice: random.Random) -> None:
    """Let a host do something else for one interval."""
    number, host = dice.randrange(len(samples)), dice.choice([*samples[0]])
    sample = samples[number][host]
    workers = tuple(replace(worker, state="D", waited=worker.waited + 2.0) for worker in sample.workers)
    samples[number][host] = replace(
        sample, workers=workers, limited=0.5, clock=1200.0, resent=0.2, pressure={"io": 90.0, "memory": 50.0}
    )


@pytest.mark.parametrize("every", [2, 3, 5])
def test_a_rank_that_writes_checkpoints_is_not_slow(every: int) -> None:
    """Its host has the pressure of the disk meanwhile, and a longer way through the step."""
    for seed in range(20):
        machines = hosts(4)
        samples = course(machines, seed, rounds=14, pace=1.3)
        for number in range(0, 14, every):
            sample = samples[number]["h0"]
            workers = tuple(replace(worker, state="D") for worker in sample.workers)
            samples[number]["h0"] = replace(sample, workers=workers, pressure={"io": 60.0})
        assert slow_host(samples, {}) is None, seed


def test_uneven_roles_are_not_slow() -> None:
    """Learners compute all the time, and actors now and then; rank 0 of a job without roles does more than the others."""
    for seed in range(20):
        machines = hosts(4)
        machines[0].works = {0: 0.95, 1: 0.6}
        assert slow_host(course(machines, seed, pace=1.0), {}) is None
        machines = [
            Machine("h0", (0, 1), works={0: 0.95, 1: 0.95}),
            Machine("h1", (2, 3), works={2: 0.2, 3: 0.1}),
        ]
        machines[0].by = "queue"
        assert (
            slow_host(course(machines, seed, pace=1.0), {0: "learner", 1: "learner", 2: "actor", 3: "actor"})
            is None
        )


def test_a_fault_of_all_hosts_blames_no_host() -> None:
    machines = [replace(machine, by="limit", slow=1.6) for machine in hosts(4)]
    assert slow_host(course(machines), {}) is None


def test_without_figures_of_pressure_the_states_of_workers_tell_of_the_disk() -> None:
    machines = hosts(3)
    machines[1] = replace(machines[1], by="disk", slow=1.6)
    samples = course(machines, 1)
    for at in samples:
        for name, sample in at.items():
            workers = tuple(replace(worker, state="D" if name == "h1" else "S") for worker in sample.workers)
            at[name] = replace(sample, workers=workers, pressure={})
    verdict = slow_host(samples, {})
    assert verdict is not None
    assert (verdict.host, verdict.reason) == ("h1", "disk")


def test_a_verdict_needs_time_and_the_same_workers() -> None:
    machines = hosts(3)
    machines[1] = replace(machines[1], by="limit", slow=1.6)
    samples = course(machines, rounds=20)
    assert slow_host(samples, {}) is not None
    assert slow_host(samples[: int(SPAN // INTERVAL)], {}) is None
    assert slow_host(samples[:1], {}) is None
    assert slow_host([], {}) is None
    # A worker that has restarted begins anew.
    workers = samples[10]["h0"].workers
    samples[10]["h0"] = replace(samples[10]["h0"], workers=(replace(workers[0], pid=7), *workers[1:]))
    assert slow_host(samples[5:16], {}) is None
    # A host that does not answer is missing.
    assert slow_host([{name: at[name] for name in ("h1",)} for at in samples], {}) is None
