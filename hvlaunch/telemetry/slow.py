"""The slowest host of a job, and why: a persistent difference in the samples of its hosts. Pure.

In synchronous training all ranks make equally many steps, so the slow host waits least for the others. A worker on a
processor, or in the queue for one, does not wait. A GPU with too little data is less busy than the others, whose
kernels wait. A difference alone proves nothing, since ranks may have different work: a slow host must also show a
cause, and the other hosts must not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from hvlaunch.named_tuples import NamedTuple
from hvlaunch.telemetry.sample import GpuSample, HostSample, WorkerSample

__all__ = ["LEAST_INTERVALS", "SPAN", "SlowHost", "slow_host"]

SPAN = 30.0
"""Least duration of a difference, in seconds."""
LEAST_INTERVALS = 6
"""Least number of differences between two samples."""
_MOSTLY = 0.8
"""Least part of the intervals with the difference: a spike or a checkpoint is in few intervals."""
_RARELY = 0.3
_MORE_WORK = 1.2
"""Ratio to the other hosts in each of these intervals."""
_SLOW = 1.25
"""Least ratio of a slow host to the others."""
_LESS_BUSY = 0.8
_WORKS = 0.1
"""Least cores in use of a working worker."""
_QUEUES = 0.15
_LIMITED = 0.05
_STOLEN = 0.05
_FOREIGN = 0.25
"""Least part of the processors in use by other programs."""
_CLOCK = 0.85
_THROTTLED_CLOCK = 0.92
_GPU_WORKS = 0.3
_DISK_PRESSURE, _MEMORY_PRESSURE = 0.2, 0.1
_RESENT = 0.01
_TIMES_OTHERS = 4.0
_ORDINARY = "power cap"
"""GPUs at full load are at their power cap: only a lower clock than usual tells."""


class SlowHost(NamedTuple):
    """The verdict on a host."""

    host: str
    factor: float | None
    """Its time for the same work, in times of the others; empty if unknown."""
    reason: str
    """clock, throttling, cpu, memory, disk or network."""
    evidence: str
    """Cause of the slowness, in words."""


@dataclass(frozen=True, slots=True)
class _Interval:
    """A host between two samples."""

    sample: HostSample
    work: Mapping[str, float]
    """Cores that its busiest worker used or waited for, by role."""
    queued: float
    """Largest part of a worker's work spent in queues for a processor."""
    foreign: float
    """Cores in use by other programs."""
    disk: float
    """Part of the time in which programs waited for a disk."""
    memory: float
    """Part of the time in which programs waited for memory."""
    gpus: tuple[GpuSample, ...]

    @property
    def gpu(self) -> float | None:
        """Utilization of its least busy GPU."""
        return min((gpu.utilization for gpu in self.gpus), default=None)


def slow_host(rounds: Sequence[Mapping[str, HostSample]], roles: Mapping[int, str]) -> SlowHost | None:
    """Return the slow host in samples of hosts, oldest first; `roles` has the roles of ranks, if any."""
    hosts = [host for host in (rounds[-1] if rounds else {}) if all(host in samples for samples in rounds)]
    pairs = list(pairwise(rounds))
    if len(hosts) < 2 or len(pairs) < LEAST_INTERVALS:  # noqa: PLR2004 (one host alone is not slow)
        return None
    if min(rounds[-1][host].time - rounds[0][host].time for host in hosts) < SPAN:
        return None
    course = {
        host: [_interval(before[host], after[host], roles) for before, after in pairs] for host in hosts
    }
    if not all(interval is not None for intervals in course.values() for interval in intervals):
        return None
    whole = {host: [interval for interval in intervals if interval] for host, intervals in course.items()}
    verdicts = [verdict for host in hosts if (verdict := _judged(host, whole)) is not None]
    # A fault of half of the hosts is no fault of a single host.
    if not verdicts or len(verdicts) > max(1, (len(hosts) - 1) // 2):
        return None
    return max(verdicts, key=lambda verdict: verdict.factor or 0.0)


def _interval(before: HostSample, after: HostSample, roles: Mapping[int, str]) -> _Interval | None:
    """Compare two samples; None if workers have changed or the second sample is the first."""
    seconds = after.time - before.time
    earlier = {(worker.rank, worker.pid): worker for worker in before.workers}
    if seconds <= 0 or not after.workers or earlier.keys() != {(at.rank, at.pid) for at in after.workers}:
        return None
    # Without figures of pressure the state of the workers has to do.
    blocked = fmean(worker.state == "D" for worker in after.workers)
    disk = after.pressure.get("io", 100 * blocked) / 100
    memory = after.pressure.get("memory", 0.0) / 100
    work: dict[str, float] = {}
    queued = used = 0.0
    for worker in after.workers:
        cpu, waited = _used(earlier[worker.rank, worker.pid], worker, seconds)
        used += cpu
        role = roles.get(worker.rank, "")
        # Newer kernels do not count the time of a CPU limit as waiting.
        stopped = disk + memory + after.limited + after.stolen / after.cores
        remaining = max(0.0, 1.0 - cpu - waited)
        work[role] = max(work.get(role, 0.0), cpu + waited + min(remaining, stopped))
        if cpu + waited >= _WORKS:
            queued = max(queued, waited / (cpu + waited))
    indices = {index for worker in after.workers for index in worker.gpus}
    return _Interval(
        after,
        work,
        queued,
        max(0.0, after.cpu - used),
        disk,
        memory,
        tuple(gpu for gpu in after.gpus if gpu.index in indices),
    )


def _used(before: WorkerSample, after: WorkerSample, seconds: float) -> tuple[float, float]:
    """Return the cores used and the cores lacked by a worker."""
    # An ended child takes its time along.
    cpu = max(0.0, after.cpu_time - before.cpu_time)
    return cpu / seconds, max(0.0, after.waited - before.waited) / seconds


def _judged(host: str, course: Mapping[str, Sequence[_Interval]]) -> SlowHost | None:
    """Judge a host by its intervals and the other hosts' intervals."""
    here = course[host]
    others = [intervals for name, intervals in course.items() if name != host]
    if here[-1].gpus and (verdict := _by_gpu_clock(host, here, others)) is not None:
        return verdict
    # On hosts with GPUs, these do the work.
    ratio_of = _gpu_ratio if here[-1].gpus else _ratio
    ratios = [ratio_of(interval, remaining) for interval, *remaining in zip(here, *others, strict=True)]
    is_slow = _share(ratio >= _MORE_WORK for ratio in ratios) >= _MOSTLY and median(ratios) >= _SLOW
    for reason, sign, words in _SIGNS:
        # The network slows all hosts alike, so its host does no more work than the others.
        if not is_slow and reason != "network":
            continue
        if _shows(sign, here, others):
            factor = round(median(ratios), 2) if is_slow else None
            return SlowHost(host, factor, reason, words(here, others))
    return None


def _share(values: Iterator[bool]) -> float:
    return fmean(map(float, values))


def _ratio(interval: _Interval, others: Sequence[_Interval]) -> float:
    """Return the ratio of the host's work to the work of other hosts in the same role; the largest ratio of its roles."""
    ratios = [1.0]
    for role, work in interval.work.items():
        remaining = [other.work[role] for other in others if role in other.work]
        if remaining and work >= _WORKS:
            ratios.append(work / max(median(remaining), _WORKS))
    return max(ratios)


def _gpu_ratio(interval: _Interval, others: Sequence[_Interval]) -> float:
    """Return by how much the GPUs of the others are busier."""
    remaining = [other.gpu for other in others if other.gpu is not None]
    busy = median(remaining) if remaining else 0.0
    if interval.gpu is None or busy < _GPU_WORKS or interval.gpu > _LESS_BUSY * busy:
        return 1.0
    return busy / max(interval.gpu, 0.05)


def _by_gpu_clock(
    host: str, here: Sequence[_Interval], others: Sequence[Sequence[_Interval]]
) -> SlowHost | None:
    """Judge a host by the clock of its slowest GPU: equal GPUs of the others are faster."""
    for number in {gpu.index: None for gpu in here[-1].gpus}:
        clocked = [gpu for interval in here for gpu in interval.gpus if gpu.index == number]
        clocked = [gpu for gpu in clocked if gpu.utilization >= _GPU_WORKS and gpu.clock]
        equal = [
            gpu.clock
            for intervals in others
            for interval in intervals
            for gpu in interval.gpus
            if clocked and gpu.name == clocked[-1].name and gpu.utilization >= _GPU_WORKS and gpu.clock
        ]
        if len(clocked) < _MOSTLY * len(here) or not equal:
            continue
        usual, mine = median(equal), median(gpu.clock or 0 for gpu in clocked)
        causes = [cause for gpu in clocked for cause in gpu.throttled]
        cause = max(dict.fromkeys(causes), key=causes.count, default="")
        is_throttled = causes.count(cause) >= _MOSTLY * len(clocked) if cause else False
        least = _THROTTLED_CLOCK if is_throttled and cause != _ORDINARY else _CLOCK
        if _share(gpu.clock is not None and gpu.clock <= least * usual for gpu in clocked) >= _MOSTLY:
            why = f" ({cause})" if is_throttled else ""
            words = f"GPU {number} runs at {mine:.0f} MHz{why}, those of the others at {usual:.0f} MHz"
            return SlowHost(host, round(usual / mine, 2), "throttling" if is_throttled else "clock", words)
    return None


Sign = Callable[[_Interval, Sequence[_Interval]], bool]
Words = Callable[[Sequence[_Interval], Sequence[Sequence[_Interval]]], str]


def _shows(sign: Sign, here: Sequence[_Interval], others: Sequence[Sequence[_Interval]]) -> bool:
    """True if the host mostly shows the sign, and most other hosts rarely do."""
    turns = list(zip(here, *others, strict=True))
    if _share(sign(interval, remaining) for interval, *remaining in turns) < _MOSTLY:
        return False
    shares = [
        _share(sign(turn[number], [*turn[:number], *turn[number + 1 :]]) for turn in turns)
        for number in range(1, len(others) + 1)
    ]
    return median(shares) < _RARELY


def _clock(interval: _Interval, others: Sequence[_Interval]) -> bool:
    clocks = [other.sample.clock for other in others if other.sample.clock]
    return bool(clocks and interval.sample.clock and interval.sample.clock <= _CLOCK * median(clocks))


def _resent(interval: _Interval, others: Sequence[_Interval]) -> bool:
    usual = median(other.sample.resent for other in others)
    return interval.sample.resent >= max(_RESENT, _TIMES_OTHERS * usual)


def _mean(here: Sequence[_Interval], figure: Callable[[_Interval], float]) -> float:
    return fmean(map(figure, here))


def _percent(here: Sequence[_Interval], figure: Callable[[_Interval], float]) -> str:
    return f"{100 * _mean(here, figure):.0f} %"


def _queue_words(here: Sequence[_Interval], _others: Sequence[Sequence[_Interval]]) -> str:
    cores = here[-1].sample.cores
    foreign = _mean(here, lambda at: at.foreign)
    words = f"its workers wait for a processor for {_percent(here, lambda at: at.queued)} of their time"
    if foreign >= _FOREIGN * cores:
        return f"{words}: other programs use {foreign:.1f} of its {cores} processors"
    return f"{words}: it has {cores}"


def _clock_words(here: Sequence[_Interval], others: Sequence[Sequence[_Interval]]) -> str:
    usual = median(at.sample.clock or 0.0 for intervals in others for at in intervals)
    mine = _mean(here, lambda at: at.sample.clock or 0.0)
    return f"its processors run at {mine:.0f} MHz, those of the others at {usual:.0f} MHz"


_SIGNS: tuple[tuple[str, Sign, Words], ...] = (
    (
        "cpu",
        lambda at, _: at.sample.limited >= _LIMITED,
        lambda here, _: (
            f"the CPU limit of its cgroup stops its workers for {_percent(here, lambda at: at.sample.limited)} of the time"
        ),
    ),
    (
        "cpu",
        lambda at, _: at.sample.stolen >= _STOLEN * at.sample.cores,
        lambda here, _: (
            "other virtual machines use "
            f"{_mean(here, lambda at: at.sample.stolen):.1f} of its {here[-1].sample.cores} processors"
        ),
    ),
    (
        "memory",
        lambda at, others: at.memory >= max(_MEMORY_PRESSURE, 2 * median(at.memory for at in others)),
        lambda here, _: (
            f"its memory is short: programs wait for it for {_percent(here, lambda at: at.memory)} of the time"
        ),
    ),
    (
        "disk",
        lambda at, others: at.disk >= max(_DISK_PRESSURE, 2 * median(at.disk for at in others)),
        lambda here, _: f"programs wait for a disk for {_percent(here, lambda at: at.disk)} of the time",
    ),
    ("cpu", lambda at, _: at.queued >= _QUEUES, _queue_words),
    ("clock", _clock, _clock_words),
    (
        "network",
        _resent,
        lambda here, others: (
            f"it sends {100 * _mean(here, lambda at: at.sample.resent):.1f} % of its TCP segments again, the others "
            f"{100 * median(at.sample.resent for intervals in others for at in intervals):.1f} %"
        ),
    ),
)
"""Reasons, the plainest proof first. The last reason needs no difference in work."""
