"""What options known from other launchers say together with others: which hosts are used, and how workers are dealt out."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hvlaunch.cli.given import Options
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.selection import select
from hvlaunch.job import Host, JobSpec

__all__ = ["with_familiar"]


def with_familiar(spec: JobSpec, options: Options) -> JobSpec:
    """The job, as --nnodes, --include, --exclude and --map-by change it. Raises BadUsage."""
    given = options.given
    if spec.elastic is not None:
        for name in ("include", "exclude", "map_by"):
            if name in given:
                raise BadUsage(
                    f"--{name.replace('_', '-')} is for static jobs", hint="without --min-np and its like"
                )
    changed: dict[str, Any] = {}
    hosts: Sequence[Host] = spec.hosts
    if "include" in given:
        hosts, changed["visible_gpus"] = select(hosts, given["include"], "include", spec.slots_per_host)
    if "exclude" in given:
        hosts, changed["visible_gpus"] = select(hosts, given["exclude"], "exclude", spec.slots_per_host)
    if "nnodes" in given:
        hosts = _first(hosts, given["nnodes"], spec)
    if "map_by" in given:
        changed["map_by"], per_host = given["map_by"]
        hosts = hosts if per_host is None else [_with_slots(host, per_host) for host in hosts]
    if spec.mpi is not None and (changed.get("visible_gpus") or "map_by" in given):
        raise BadUsage(
            "the launcher deals out workers and GPUs itself",
            hint="--binding-args, with the launcher's own words",
        )
    return replace(spec, hosts=tuple(hosts), **changed)


def _first(hosts: Sequence[Host], bounds: tuple[int, int], spec: JobSpec) -> Sequence[Host]:
    low, high = bounds
    if low != high:
        return hosts  # bounds of an elastic job
    if spec.elastic is not None and spec.elastic.discovery_script is not None:
        raise BadUsage(f"--nnodes {low}: hosts that a script finds come and go", hint=f"--nnodes {low}:M")
    if low > len(hosts):
        count = "1 host is" if len(hosts) == 1 else f"{len(hosts)} hosts are"
        raise BadUsage(f"--nnodes {low}: only {count} named", hint="-H a:4,b:4, or --hostfile FILE")
    return hosts[:low]


def _with_slots(host: Host, count: int) -> Host:
    if host.slots is not None and count > host.slots:
        raise BadUsage(f"--map-by ppr:{count}:node: host {host.name} has only {host.slots} slots")
    return replace(host, slots=count)
