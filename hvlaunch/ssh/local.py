"""A host that is this machine: the same protocol by pipes, without ssh."""

from hvlaunch.job import Host
from hvlaunch.ssh.pipes import PipeConnection

__all__ = ["connect_local"]


def connect_local(host: Host) -> PipeConnection:
    """The connection to `host`, which is this machine."""
    return PipeConnection(("/bin/sh", "-c"), host.name, None)
