"""What finds the hosts of an elastic job: a script, or a file that is read again and again."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from hvlaunch.engine import events as on
from hvlaunch.job import ElasticOptions

if TYPE_CHECKING:
    from hvlaunch.hosts.discovery import Discovery

__all__ = ["host_discovery"]


def host_discovery(options: ElasticOptions, post: Callable[[on.Event], None]) -> "Discovery | None":
    """What finds hosts; None where the pool is what it is."""
    from hvlaunch.hosts.discovery import Discovery, host_source  # noqa: PLC0415 (few jobs are elastic)

    source = host_source(options)
    if source is None:
        return None
    return Discovery(
        source,
        lambda hosts: post(on.HostsDiscovered(tuple(hosts))),
        lambda error: post(on.DiscoveryFailed(error.problem)),
        interval=options.discovery_interval,
    )
