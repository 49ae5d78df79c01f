"""What a host measures of itself, of its workers and of its GPUs at one moment. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["GpuSample", "HostSample", "WorkerSample"]


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """A worker with all its descendants."""

    rank: int
    pid: int
    processes: int
    cpu: float
    """Processor cores in use."""
    cpu_time: float
    """Seconds since its start."""
    memory: int
    """Resident bytes."""
    state: str
    """Of its busiest process, as the kernel has it: R, S, D, T or Z."""
    threads: int
    waits_in: str | None
    """The kernel's function."""
    io: int
    """Bytes read and written since its start."""
    last_output: float | None
    """Seconds since it last printed."""
    gpus: tuple[int, ...]
    """Those that it uses."""


@dataclass(frozen=True, slots=True)
class GpuSample:
    """Memory in bytes, power in watts, temperature in degrees Celsius; `utilization` from 0 to 1."""

    index: int
    name: str
    utilization: float
    memory_used: int
    memory_total: int
    power: float
    temperature: float
    throttled: tuple[str, ...]
    ecc_errors: int
    xids: tuple[int, ...]
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostSample:
    """Memory in bytes, network and disk in bytes per second."""

    host: str
    time: float
    """Of the driver's clock."""
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
    """What could not be measured, and why."""
