"""Hosts of a job that need more than -H or a hostfile: those of a pool, and options known from other launchers."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvlaunch import __version__
from hvlaunch.cli.options.settings import Options
from hvlaunch.errors import BadUsage, NotEnoughSlots
from hvlaunch.hosts.local import is_local
from hvlaunch.hosts.placement import with_slots
from hvlaunch.hosts.selection import select
from hvlaunch.job import Host, JobSpec, SSHOptions

__all__ = ["check_version", "with_familiar", "with_pool", "workers_per_host"]

_GPU_COUNTER = "nvidia-smi"
"""The agents' program for counting GPUs."""


def workers_per_host(options: Options, hosts: Sequence[Host]) -> int | None:
    """Return --nproc-per-node's number, 0 for a worker on each GPU, or None. Raises BadUsage."""
    value: int | str | None = options.given.get("nproc_per_node")
    if value is None or isinstance(value, int):
        return value
    is_here = not options.pool and bool(hosts) and all(map(is_local, hosts))
    if value == "cpu":
        if not is_here:
            raise BadUsage(
                "--nproc-per-node cpu is for this machine alone: processors of other hosts are not counted before a job runs there",
                hint="--nproc-per-node N",
            )
        return _processors()
    # Other hosts may have GPUs: their agents count them once connected.
    if not is_here or shutil.which(_GPU_COUNTER) is not None:
        return 0
    if value == "auto":
        return _processors()
    raise BadUsage(
        f"--nproc-per-node gpu: no GPUs can be counted here, since there is no {_GPU_COUNTER}",
        hint="--nproc-per-node N",
    )


def _limit(options: Options, per_host: int) -> str:
    """Return the user's limit on the workers of each host."""
    setting = options.settings["nproc_per_node"][-1]
    if setting.origin.startswith("preset "):
        return f"--for {options.preset}: one on each host"
    return setting.called if setting.option.value is None else f"--nproc-per-node {per_host}"


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1


def with_familiar(spec: JobSpec, options: Options, per_host: int | None) -> JobSpec:
    """Apply --nnodes, --nproc-per-node, --include, --exclude and --map-by to a job. Raises BadUsage."""
    given = options.given
    if spec.elastic is not None:
        for name in ("include", "exclude", "map_by"):
            if name in given:
                raise BadUsage(
                    f"--{name.replace('_', '-')} is for static jobs",
                    hint="without --min-np and the other elastic options",
                )
    changed: dict[str, Any] = {}
    hosts: Sequence[Host] = spec.hosts
    if "include" in given:
        hosts, changed["visible_gpus"] = select(hosts, given["include"], "include", spec.slots_per_host)
    if "exclude" in given:
        hosts, changed["visible_gpus"] = select(hosts, given["exclude"], "exclude", spec.slots_per_host)
    if "nnodes" in given:
        hosts = _first(hosts, given["nnodes"], spec)
    if per_host == 0:
        changed["slots_per_host"] = None
        # Numbers of GPUs in --include are the slots of their host.
        is_chosen = changed.get("visible_gpus", ())
        hosts = [host if host.name in is_chosen else replace(host, slots=None) for host in hosts]
    elif per_host is not None:
        hosts = with_slots(hosts, per_host, f"--nproc-per-node {per_host}")
        room = per_host * len(hosts)
        if spec.elastic is None and spec.np is not None and spec.np > room:
            raise NotEnoughSlots(spec.np, room, _limit(options, per_host))
    if "map_by" in given:
        changed["map_by"], count = given["map_by"]
        hosts = hosts if count is None else with_slots(hosts, count, f"--map-by ppr:{count}:node")
    # A launcher places its processes itself: these options could not hold.
    if spec.mpi is not None and (changed.get("visible_gpus") or "map_by" in given):
        raise BadUsage(
            "the launcher deals out workers and GPUs itself",
            hint="--binding-args, with the launcher's own words",
        )
    spec = replace(spec, hosts=tuple(hosts), **changed)
    return _with_all_nodes(spec, given["nnodes"][0]) if "nnodes" in given and spec.skip_bad_hosts else spec


def _first(hosts: Sequence[Host], bounds: tuple[int, int], spec: JobSpec) -> Sequence[Host]:
    """Return the candidate hosts for --nnodes, in order: all of them if the job may replace hosts."""
    low, high = bounds
    if low == high:
        if spec.elastic is not None and spec.elastic.discovery_script is not None:
            raise BadUsage(
                f"--nnodes {low}: a discovery script's hosts come and go", hint=f"--nnodes {low}:M"
            )
        if low > len(hosts):
            count = "1 host is" if len(hosts) == 1 else f"{len(hosts)} hosts are"
            raise BadUsage(f"--nnodes {low}: only {count} named", hint="-H a:4,b:4, or --hostfile FILE")
    if spec.elastic is not None:
        return hosts[: spec.elastic.most_hosts]
    return hosts if spec.skip_bad_hosts else hosts[:low]


def _with_all_nodes(spec: JobSpec, count: int) -> JobSpec:
    """Set the number of workers for a job that may skip bad hosts and needs `count` good ones. Raises BadUsage."""
    slots = [host.slots or spec.slots_per_host for host in spec.hosts]
    counts = [count_here for count_here in slots if count_here is not None]
    if len(counts) < len(slots):
        raise BadUsage(
            f"--nnodes {count} with --skip-bad-hosts needs the number of workers on each host",
            hint="--nproc-per-node N",
        )
    # With equal slots any `count` good hosts hold the workers; otherwise only the first ones do.
    hosts = spec.hosts if len(set(counts)) == 1 else spec.hosts[:count]
    return replace(spec, hosts=hosts, np=spec.np or sum(counts[:count]))


def with_pool(spec: JobSpec, environ: Mapping[str, str], *, has_hosts: bool) -> JobSpec:
    """Return the job with its pool's hosts; `has_hosts`: the user named some of these. Raises BadUsage."""
    from hvlaunch.engine.codec import decode  # noqa: PLC0415 (no other option needs it)
    from hvlaunch.outside.pools import find_pool, pools_directory  # noqa: PLC0415 (as above)

    if spec.mpi is not None:
        raise BadUsage(f"--pool needs ssh: {spec.mpi.launcher} starts the workers here")
    pool = find_pool(pools_directory(environ), spec.pool or "")
    check_version(pool.name, pool.about)
    # How hosts are reached was decided when the pool was made; its connections exist already.
    pool_hosts = decode(tuple[Host, ...], pool.about["hosts"])
    return replace(
        spec,
        hosts=_chosen(pool.name, spec.hosts, pool_hosts) if has_hosts else pool_hosts,
        ssh=decode(SSHOptions, pool.about["ssh"]),
        remote_python=pool.about["remote_python"],
    )


def check_version(name: str, about: Mapping[str, Any]) -> None:
    """Raise BadUsage if another version made the pool: its agents may speak another protocol."""
    if about.get("version") != __version__:
        raise BadUsage(
            f"pool {name} was made by hvlaunch {about.get('version')}, and this is {__version__}",
            hint=f"hvlaunch pool down {name}, then hvlaunch pool up",
        )


def _chosen(name: str, hosts: Sequence[Host], pool_hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return the named hosts as the pool has them. Raises BadUsage."""
    by_name = {host.name: host for host in pool_hosts}
    if missing := [host.name for host in hosts if host.name not in by_name]:
        raise BadUsage(f"pool {name} has no host {', '.join(missing)}", hint=f"hvlaunch pool status {name}")
    return tuple(
        replace(by_name[host.name], slots=by_name[host.name].slots if host.slots is None else host.slots)
        for host in hosts
    )
