"""Samples: the figures of a host, its workers and its GPUs at one moment, and their form on the wire. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvlaunch.agent.wire.frames import (
    MOST_GPUS,
    exactly,
    mapping,
    number,
    of,
    or_null,
    record,
    several,
    text,
    whole,
)

__all__ = ["SAMPLE", "Energy", "GpuSample", "HostSample", "WorkerSample", "as_json", "host_sample"]

# A host is not trusted: without these bounds its sample could fill the driver's memory.
_MOST_WORKERS = 1 << 16
_MOST_PIDS = 1 << 12
_COUNT = whole(0, 1 << 31)
_BYTES = whole(0, 1 << 63)
_RATE = number(0, 1 << 53)
_PIDS = several(_COUNT, _MOST_PIDS)
_PID = whole(1, 1 << 22)
_WORKER = {
    "rank": _COUNT,
    "pid": _PID,
    "processes": _COUNT,
    "cpu": _RATE,
    "cpu_time": _RATE,
    "memory": _BYTES,
    "busiest": _PID,
    "state": of("R", "S", "D", "T", "Z"),
    "threads": _COUNT,
    "waits_in": or_null(text(64)),
    "io": _BYTES,
    "gpus": several(_COUNT, MOST_GPUS),
    "waited": _RATE,
}
_GPU = {
    "index": _COUNT,
    "name": text(256),
    "utilization": number(0, 1),
    "memory_used": _BYTES,
    "memory_total": _BYTES,
    "power": _RATE,
    "energy_joules": or_null(_RATE),
    "temperature": number(-300, 1 << 16),
    "throttled": several(text(64), 64),
    "ecc_errors": _BYTES,
    "xids": several(_COUNT, 64),
    "pids": _PIDS,
    "clock": or_null(_RATE),
}
SAMPLE = record(
    {
        "cores": whole(1, 1 << 16),
        "cpu": _RATE,
        "load": _RATE,
        "memory_used": _BYTES,
        "memory_total": _BYTES,
        "network_in": _RATE,
        "network_out": _RATE,
        "disk_read": _RATE,
        "disk_write": _RATE,
        "free": mapping(of("cwd", "scratch", "shm"), exactly(_BYTES, 2), 3),
        "workers": several(record(_WORKER, optional=("waited",)), _MOST_WORKERS),
        "gpus": several(record(_GPU, optional=("clock",)), MOST_GPUS),
        "problems": several(text(512), 64),
        "clock": or_null(_RATE),
        "stolen": _RATE,
        "limited": number(0, 1),
        "pressure": mapping(of("cpu", "io", "memory"), number(0, 100), 3),
        "resent": number(0, 1),
        "commits": _BYTES,
    },
    optional=("clock", "stolen", "limited", "pressure", "resent", "commits"),
)
"""The form of a host's sample."""


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """Figures of a worker together with all its descendants."""

    rank: int
    pid: int
    processes: int
    cpu: float
    """Processor cores in use."""
    cpu_time: float
    """Seconds of processor time since its start."""
    memory: int
    """Resident bytes."""
    state: str
    """State of its busiest process as the kernel names it: R, S, D, T or Z."""
    threads: int
    waits_in: str | None
    """Kernel function of the busiest process's wait."""
    io: int
    """Bytes read and written since its start."""
    last_output: float | None
    """Seconds since the last output."""
    gpus: tuple[int, ...]
    """Indices of its GPUs."""
    busiest: int
    """The pid of its busiest process."""
    waited: float = 0.0
    """Seconds in which its busiest processes were ready and had no processor, since their start."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """Memory in bytes, power in watts, temperature in degrees Celsius; `utilization` from 0 to 1."""

    index: int
    name: str
    utilization: float
    memory_used: int
    memory_total: int
    power: float
    energy_joules: float | None
    """Since the GPU's driver was loaded; None if the GPU does not count it."""
    temperature: float
    throttled: tuple[str, ...]
    ecc_errors: int
    xids: tuple[int, ...]
    pids: tuple[int, ...]
    clock: float | None = None
    """MHz of its multiprocessors."""


@dataclass(frozen=True, slots=True)
class HostSample:
    """Memory in bytes, network and disk in bytes per second."""

    host: str
    time: float
    """Time of the sample by the driver's clock."""
    cores: int
    cpu: float
    """Cores in use."""
    load: float
    memory_used: int
    memory_total: int
    network_in: float
    network_out: float
    disk_read: float
    disk_write: float
    free: Mapping[str, tuple[int, int]]
    """Free and total bytes of `cwd`, `scratch` and `shm`."""
    workers: tuple[WorkerSample, ...]
    gpus: tuple[GpuSample, ...]
    problems: tuple[str, ...]
    """Missing figures and the reasons."""
    clock: float | None = None
    """MHz of its processors, on average."""
    stolen: float = 0.0
    """Cores in use by other machines of the hypervisor."""
    limited: float = 0.0
    """Part of the time during stops by a CPU limit of the job's cgroup."""
    pressure: Mapping[str, float] = field(default_factory=dict)
    """Percent of the time in which programs waited for `cpu`, `io` or `memory`, over 10 s."""
    resent: float = 0.0
    """Part of the TCP segments sent again."""
    commits: int = 0
    """Bytes of memory in use by commits of workers, and by copies of other hosts' commits."""


class Energy:
    """Adds up the energy of the job's GPUs: between two samples in which its workers use a GPU, the GPU's counter tells."""

    def __init__(self, joules: float = 0.0, seconds: float = 0.0) -> None:
        """Continue from the sums of an earlier driver."""
        self.joules, self.seconds = joules, seconds
        """`seconds` of GPUs for which the energy is known."""
        self._last: dict[tuple[str, int], tuple[float, float]] = {}

    def add(self, sample: HostSample) -> None:
        """Take a host's newest sample."""
        used = {index for worker in sample.workers for index in worker.gpus}
        for gpu in sample.gpus:
            key = sample.host, gpu.index
            last = self._last.pop(key, None)
            if gpu.index not in used or gpu.energy_joules is None:
                continue
            self._last[key] = gpu.energy_joules, sample.time
            # A counter that has gone back has begun anew with its driver.
            if last is not None and gpu.energy_joules >= last[0]:
                self.joules += gpu.energy_joules - last[0]
                self.seconds += sample.time - last[1]


def host_sample(host: str, time: float, answer: Any, printed_at: Mapping[int, float]) -> HostSample | None:
    """Parse a host's sample; None for a wrong form. `printed_at` has the time of each rank's last output."""
    if not SAMPLE(answer):
        return None

    def silence(rank: int) -> float | None:
        at = printed_at.get(rank)
        return None if at is None else max(0.0, time - at)

    # Lists become tuples, so that a sample can't change once it is shared between threads.
    workers = tuple(
        WorkerSample(**{**entry, "gpus": tuple(entry["gpus"])}, last_output=silence(entry["rank"]))
        for entry in answer["workers"]
    )
    gpus = tuple(
        GpuSample(**{**entry, **{name: tuple(entry[name]) for name in ("throttled", "xids", "pids")}})
        for entry in answer["gpus"]
    )
    free = {name: (space[0], space[1]) for name, space in answer["free"].items()}
    fields = {"workers": workers, "gpus": gpus, "free": free, "problems": tuple(answer["problems"])}
    return HostSample(host=host, time=time, **{**answer, **fields})


def as_json(sample: HostSample) -> dict[str, Any]:
    """Return the sample as JSON with the fields by their names."""
    from dataclasses import asdict  # noqa: PLC0415 (when somebody asks)

    return asdict(sample)
