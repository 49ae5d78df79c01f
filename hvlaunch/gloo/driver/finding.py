"""What finds the hosts of an elastic job: a script, or a file that is read again and again."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from hvlaunch.gloo.engine import events as on
from hvlaunch.job import ElasticOptions

if TYPE_CHECKING:
    from hvlaunch.hosts.discovery import Discovery, Source

__all__ = ["host_discovery"]


def host_discovery(options: ElasticOptions, post: Callable[[on.Event], None]) -> "Discovery | None":
    """What finds hosts; None where the pool is what it is."""
    from hvlaunch.hosts.discovery import Discovery, HostFile, HostScript  # noqa: PLC0415 (few jobs are elastic)

    if options.discovery_script is not None:
        source: Source = HostScript(options.discovery_script, options.discovery_timeout)
    elif options.hostfile is not None:
        source = HostFile(options.hostfile)
    else:
        return None
    return Discovery(
        source,
        lambda hosts: post(on.HostsDiscovered(tuple(hosts))),
        lambda error: post(on.DiscoveryFailed(error.problem)),
        interval=options.discovery_interval,
    )
