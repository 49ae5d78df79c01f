"""`--pool NAME`: the hosts of a job are those of a warm pool, reached as was said when that was made."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvlaunch import __version__
from hvlaunch.engine.codec import decode
from hvlaunch.errors import BadUsage
from hvlaunch.job import Host, JobSpec, SSHOptions
from hvlaunch.outside.pools import find_pool, pools_directory

__all__ = ["check_version", "with_pool"]


def with_pool(spec: JobSpec, environ: Mapping[str, str], *, has_hosts: bool) -> JobSpec:
    """The job with the hosts of its pool; `has_hosts` is whether the user named some of them. Raises BadUsage."""
    if spec.mpi is not None:
        raise BadUsage(f"--pool needs ssh: {spec.mpi.launcher} starts the workers here")
    pool = find_pool(pools_directory(environ), spec.pool or "")
    check_version(pool.name, pool.about)
    known = decode(tuple[Host, ...], pool.about["hosts"])
    return replace(
        spec,
        hosts=_chosen(pool.name, spec.hosts, known) if has_hosts else known,
        ssh=decode(SSHOptions, pool.about["ssh"]),
        remote_python=pool.about["remote_python"],
    )


def check_version(name: str, about: Mapping[str, Any]) -> None:
    """Raises BadUsage where another hvlaunch has made the pool, whose agents may speak otherwise."""
    if about.get("version") != __version__:
        raise BadUsage(
            f"pool {name} was made by hvlaunch {about.get('version')}, and this is {__version__}",
            hint=f"hvlaunch pool down {name}, then hvlaunch pool up",
        )


def _chosen(name: str, hosts: Sequence[Host], known: Sequence[Host]) -> tuple[Host, ...]:
    """Those that the user named, as the pool knows them. Raises BadUsage."""
    by_name = {host.name: host for host in known}
    if missing := [host.name for host in hosts if host.name not in by_name]:
        raise BadUsage(f"pool {name} has no host {', '.join(missing)}", hint=f"hvlaunch pool status {name}")
    return tuple(
        replace(by_name[host.name], slots=by_name[host.name].slots if host.slots is None else host.slots)
        for host in hosts
    )
