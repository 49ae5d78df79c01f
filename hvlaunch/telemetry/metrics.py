"""Metrics of jobs in Prometheus' text format. docs/interfaces/metrics.md lists them for users. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from hvlaunch.named_tuples import NamedTuple

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["METRICS", "JobNow", "metrics_text"]

_JOB = ("job_id", "job_name")
_HOST = (*_JOB, "host")
_RANK = (*_HOST, "rank")
_GPU = (*_HOST, "gpu")


class JobNow(NamedTuple):
    """A job at one moment: the answers of `GET /job`, `/totals` and `/samples`. The last two are None without an answer."""

    job: Mapping[str, Any]
    totals: Mapping[str, Any] | None
    samples: Mapping[str, Any] | None
    time: float
    """Seconds since 1970."""


Row = tuple[Sequence[object], Any]
"""Values of the labels after the job's labels, and the value of the metric. A value of None is left out."""


class _Family(NamedTuple):
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...]
    rows: Callable[[JobNow], Iterable[Row]]


def metrics_text(jobs: Sequence[JobNow]) -> bytes:
    """Return the metrics of these jobs."""
    from prometheus_client import CollectorRegistry  # noqa: PLC0415 (100 ms, and only for who asks)
    from prometheus_client.exposition import generate_latest  # noqa: PLC0415 (as above)
    from prometheus_client.registry import Collector  # noqa: PLC0415 (as above)

    class Jobs(Collector):
        def collect(self) -> "Iterator[Metric]":
            return _families(jobs)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Jobs())
    return generate_latest(registry)


def _families(jobs: Sequence[JobNow]) -> "Iterator[Metric]":
    from prometheus_client import core  # noqa: PLC0415 (as above)

    for name, family in METRICS.items():
        rows = [
            ([job.job["id"], job.job.get("name") or "", *map(str, labels)], value)
            for job in jobs
            for labels, value in family.rows(job)
            if value is not None
        ]
        # A family without values would show its help text alone.
        if not rows:
            continue
        metric: Any
        match family.kind:
            case "gauge":
                metric = core.GaugeMetricFamily(name, family.help, labels=family.labels)
            case "counter":
                metric = core.CounterMetricFamily(name, family.help, labels=family.labels)
            case "histogram":
                metric = core.HistogramMetricFamily(name, family.help, labels=family.labels)
        for labels, value in rows:
            if family.kind == "histogram":
                metric.add_metric(labels, *value)
            else:
                metric.add_metric(labels, value)
        yield metric


def _of_job(read: Callable[[JobNow], Any]) -> Callable[[JobNow], Iterable[Row]]:
    return lambda now: [((), read(now))]


def _total(name: str) -> Callable[[JobNow], Iterable[Row]]:
    return lambda now: [] if now.totals is None else [((), now.totals[name])]


def _goodput(now: JobNow) -> Iterator[Row]:
    if now.totals is not None and now.totals["seconds"] > 0:
        yield (), now.totals["useful_seconds"] / now.totals["seconds"]


def _recoveries(now: JobNow) -> Iterator[Row]:
    if now.totals is not None:
        recoveries = now.totals["recoveries"]
        bounds = [*map(str, map(float, recoveries["bounds"])), "+Inf"]
        # Prometheus' buckets are cumulative; the totals count each bucket alone.
        yield (), (list(zip(bounds, accumulate(recoveries["counts"]), strict=True)), recoveries["seconds"])


def _counted(group: str, states: Sequence[str]) -> Callable[[JobNow], Iterable[Row]]:
    """Count the members of a group by state."""

    def rows(now: JobNow) -> Iterator[Row]:
        states_now = [member["state"] for member in now.job[group]]
        # States without members are 0 and not absent: a graph would keep the last value.
        for state in states:
            yield (state,), states_now.count(state)

    return rows


def _of_hosts(read: Callable[[Mapping[str, Any]], Any]) -> Callable[[JobNow], Iterable[Row]]:
    return lambda now: [((host["host"],), read(host)) for host in _hosts(now)]


def _spaces(now: JobNow) -> Iterator[Row]:
    for host in _hosts(now):
        for place, (free, _) in sorted(host["free"].items()):
            yield (host["host"], place), free


def _progress(name: str) -> Callable[[JobNow], Iterable[Row]]:
    """Read the progress that workers report."""

    def rows(now: JobNow) -> Iterator[Row]:
        for worker in now.job["workers"]:
            if (progress := worker.get("progress")) is not None:
                yield (worker["host"], worker["rank"]), progress.get(name)

    return rows


def _of_workers(read: Callable[[Mapping[str, Any]], Any]) -> Callable[[JobNow], Iterable[Row]]:
    return lambda now: [
        ((host["host"], worker["rank"]), read(worker)) for host in _hosts(now) for worker in host["workers"]
    ]


def _last_output(now: JobNow) -> Iterator[Row]:
    for host in _hosts(now):
        # A silence is measured at the time of the sample, which may be seconds old.
        age = 0.0 if now.samples is None else now.samples["now"] - host["time"]
        for worker in host["workers"]:
            silent = worker["last_output"]
            yield (
                (host["host"], worker["rank"]),
                None if silent is None else round(now.time - age - silent, 1),
            )


def _of_gpus(read: Callable[[Mapping[str, Any]], Any]) -> Callable[[JobNow], Iterable[Row]]:
    return lambda now: [
        ((host["host"], gpu["index"]), read(gpu)) for host in _hosts(now) for gpu in host["gpus"]
    ]


def _hosts(now: JobNow) -> Sequence[Mapping[str, Any]]:
    return () if now.samples is None else now.samples["hosts"]


METRICS = {
    "hvlaunch_job_start_time_seconds": _Family(
        "gauge",
        "When the job was started, in seconds since 1970.",
        _JOB,
        _of_job(lambda now: now.job["began"]),
    ),
    "hvlaunch_job_phase": _Family(
        "gauge", "1, with how far the job is.", (*_JOB, "phase"), lambda now: [((now.job["phase"],), 1)]
    ),
    "hvlaunch_job_hanging": _Family(
        "gauge",
        "1 if the job hangs, else 0.",
        _JOB,
        _of_job(lambda now: int(now.job.get("hang") is not None)),
    ),
    "hvlaunch_round": _Family(
        "gauge",
        "Number of the newest round.",
        _JOB,
        _of_job(lambda now: now.job["round"] and now.job["round"]["number"]),
    ),
    "hvlaunch_round_workers": _Family(
        "gauge",
        "Workers of the newest round.",
        _JOB,
        _of_job(lambda now: now.job["round"] and now.job["round"]["size"]),
    ),
    "hvlaunch_workers": _Family(
        "gauge",
        "Workers that live, by state.",
        (*_JOB, "state"),
        _counted("workers", ("starting", "waiting", "working", "dismissed", "stopping", "hanging")),
    ),
    "hvlaunch_hosts": _Family(
        "gauge",
        "Hosts, by the state of the connection.",
        (*_JOB, "state"),
        _counted("hosts", ("none", "connecting", "ready", "parting", "closing")),
    ),
    "hvlaunch_rounds_total": _Family("counter", "Rounds that were begun.", _JOB, _total("rounds")),
    "hvlaunch_restarts_total": _Family(
        "counter", "Failures that a new round has followed.", _JOB, _total("restarts")
    ),
    "hvlaunch_lost_hosts_total": _Family(
        "counter", "Hosts that were ready and were lost.", _JOB, _total("lost_hosts")
    ),
    "hvlaunch_recovery_seconds": _Family(
        "histogram", "From a failure until all workers of a later round ran.", _JOB, _recoveries
    ),
    "hvlaunch_job_seconds_total": _Family("counter", "Time since the job's start.", _JOB, _total("seconds")),
    "hvlaunch_useful_seconds_total": _Family(
        "counter", "Time in which steps were made that count.", _JOB, _total("useful_seconds")
    ),
    "hvlaunch_goodput_ratio": _Family(
        "gauge", "Share of the job's time in which steps were made that count.", _JOB, _goodput
    ),
    "hvlaunch_worker_step": _Family(
        "gauge", "Newest step, as the worker tells it.", _RANK, _progress("step")
    ),
    "hvlaunch_worker_steps_per_second": _Family("gauge", "Rate of its steps.", _RANK, _progress("rate")),
    "hvlaunch_worker_cpu_seconds_total": _Family(
        "counter",
        "CPU time since the worker's start, with its children.",
        _RANK,
        _of_workers(lambda worker: worker["cpu_time"]),
    ),
    "hvlaunch_worker_resident_memory_bytes": _Family(
        "gauge",
        "Resident memory of the worker and its children.",
        _RANK,
        _of_workers(lambda worker: worker["memory"]),
    ),
    "hvlaunch_worker_io_bytes_total": _Family(
        "counter",
        "Bytes read and written since the worker's start.",
        _RANK,
        _of_workers(lambda worker: worker["io"]),
    ),
    "hvlaunch_worker_processes": _Family(
        "gauge",
        "Processes of the worker, with itself.",
        _RANK,
        _of_workers(lambda worker: worker["processes"]),
    ),
    "hvlaunch_worker_threads": _Family(
        "gauge",
        "Threads of the worker and its children.",
        _RANK,
        _of_workers(lambda worker: worker["threads"]),
    ),
    "hvlaunch_worker_last_output_timestamp_seconds": _Family(
        "gauge", "When the worker printed last, in seconds since 1970.", _RANK, _last_output
    ),
    "hvlaunch_host_cpu_ratio": _Family(
        "gauge",
        "Share of the host's processors that work.",
        _HOST,
        _of_hosts(lambda host: host["cpu"] / host["cores"]),
    ),
    "hvlaunch_host_cpus": _Family(
        "gauge", "The host's processors.", _HOST, _of_hosts(lambda host: host["cores"])
    ),
    "hvlaunch_host_load": _Family("gauge", "Load of a minute.", _HOST, _of_hosts(lambda host: host["load"])),
    "hvlaunch_host_memory_bytes": _Family(
        "gauge", "Memory that the job may use.", _HOST, _of_hosts(lambda host: host["memory_total"])
    ),
    "hvlaunch_host_memory_used_bytes": _Family(
        "gauge", "Memory in use.", _HOST, _of_hosts(lambda host: host["memory_used"])
    ),
    "hvlaunch_host_network_receive_bytes_per_second": _Family(
        "gauge", "What the host receives.", _HOST, _of_hosts(lambda host: host["network_in"])
    ),
    "hvlaunch_host_network_transmit_bytes_per_second": _Family(
        "gauge", "What the host sends.", _HOST, _of_hosts(lambda host: host["network_out"])
    ),
    "hvlaunch_host_disk_read_bytes_per_second": _Family(
        "gauge", "What the host's disks read.", _HOST, _of_hosts(lambda host: host["disk_read"])
    ),
    "hvlaunch_host_disk_written_bytes_per_second": _Family(
        "gauge", "What the host's disks write.", _HOST, _of_hosts(lambda host: host["disk_write"])
    ),
    "hvlaunch_host_free_bytes": _Family(
        "gauge",
        "Free space of the working directory, the scratch directory and /dev/shm.",
        (*_HOST, "where"),
        _spaces,
    ),
    "hvlaunch_gpu_utilization_ratio": _Family(
        "gauge", "Share of the time in which the GPU worked.", _GPU, _of_gpus(lambda gpu: gpu["utilization"])
    ),
    "hvlaunch_gpu_memory_bytes": _Family(
        "gauge", "The GPU's memory.", _GPU, _of_gpus(lambda gpu: gpu["memory_total"])
    ),
    "hvlaunch_gpu_memory_used_bytes": _Family(
        "gauge", "Memory in use.", _GPU, _of_gpus(lambda gpu: gpu["memory_used"])
    ),
    "hvlaunch_gpu_power_watts": _Family(
        "gauge", "What the GPU takes.", _GPU, _of_gpus(lambda gpu: gpu["power"])
    ),
    "hvlaunch_gpu_temperature_celsius": _Family(
        "gauge", "Its temperature.", _GPU, _of_gpus(lambda gpu: gpu["temperature"])
    ),
    "hvlaunch_gpu_throttled": _Family(
        "gauge",
        "1 if the GPU is slowed down, else 0.",
        _GPU,
        _of_gpus(lambda gpu: int(bool(gpu["throttled"]))),
    ),
    "hvlaunch_gpu_ecc_errors_total": _Family(
        "counter",
        "Errors that were not corrected, since its driver was loaded.",
        _GPU,
        _of_gpus(lambda gpu: gpu["ecc_errors"]),
    ),
}
"""All metrics by name."""
