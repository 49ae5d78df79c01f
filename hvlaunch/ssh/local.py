"""A host that is this machine: the same protocol by pipes, without ssh."""

from collections.abc import Mapping

from hvlaunch.job import Host
from hvlaunch.ssh.pipes import PipeConnection

__all__ = ["connect_local"]


def connect_local(host: Host, environment: Mapping[str, str] | None = None) -> PipeConnection:
    """The connection to `host`, which is this machine. Commands get the environment; None: this process's own."""
    return PipeConnection(("/bin/sh", "-c"), host.name, None, environment)
