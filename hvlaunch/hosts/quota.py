"""How many of the hosts a job has, and how many workers on each, whatever is said of their slots."""

from collections.abc import Sequence
from dataclasses import replace

from hvlaunch.errors import BadUsage
from hvlaunch.job import ElasticOptions, Host

__all__ = ["in_quota", "with_slots"]


def with_slots(hosts: Sequence[Host], count: int, option: str) -> list[Host]:
    """Each host with so many slots. Raises BadUsage, with the words of `option`, where one is said to have fewer."""
    for host in hosts:
        if host.slots is not None and count > host.slots:
            noun = "slot" if host.slots == 1 else "slots"
            raise BadUsage(f"{option}: host {host.name} has only {host.slots} {noun}")
    return [replace(host, slots=count) for host in hosts]


def in_quota(hosts: Sequence[Host], options: ElasticOptions) -> list[Host]:
    """Those of the hosts of an elastic job that may be used now, with their slots. Raises BadUsage."""
    used = hosts[: options.most_hosts]
    if options.per_host is None:
        return list(used)
    if options.per_host == 0:
        return [replace(host, slots=None) for host in used]
    return with_slots(used, options.per_host, f"--nproc-per-node {options.per_host}")
