"""The connections of a job that hvlaunch itself makes: by ssh, a scheduler's own program, a warm pool, or pipes on this machine."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import NamedTuple, Protocol

from hvlaunch.driver.links.agent_channel import AgentConnection, CommandConnection, LostConnection
from hvlaunch.driver.program.keys import Keys
from hvlaunch.errors import HostError
from hvlaunch.hosts.local import is_here_by_dns, is_local, only_local
from hvlaunch.job import Host, JobSpec
from hvlaunch.ssh.connection import Connection
from hvlaunch.ssh.ways import Ways

__all__ = ["HostWays", "WaysToHosts", "by_ssh"]


class HostWays(NamedTuple):
    """The functions for connections to hosts. `connect` and `lost` raise HostError."""

    connect: Callable[[Host], AgentConnection]
    """Makes a new connection, for starting an agent."""
    lost: Callable[[Host], AgentConnection]
    """Returns the lost connection of a killed driver, for the session to replace."""


WaysToHosts = Callable[[JobSpec, Keys, Callable[[str], None]], AbstractContextManager[HostWays]]
"""Opens the ways for the duration of a job, by the job, its keys, and a function that prints a message."""


@contextmanager
def by_ssh(spec: JobSpec, keys: Keys, _say: Callable[[str], None]) -> Iterator[HostWays]:
    """Open hvlaunch's own ways: by ssh, or by a scheduler's own program."""
    agent = spec.ssh.remote_agent
    if agent is not None:
        from hvlaunch.ssh.ways import connect_by_agent  # noqa: PLC0415 (few jobs have one)

        remote = partial(connect_by_agent, agent)
        yield HostWays(partial(_connect, spec, remote), partial(_lost, spec, remote))
        return
    with closing(Ways(spec.ssh, timeout=spec.start_timeout)) as ways:
        plain = HostWays(partial(_connect, spec, ways.connect), partial(_lost, spec, ways.connect))
        yield plain if spec.pool is None else _by_pool(spec, keys, plain, ways.connect)


def _by_pool(spec: JobSpec, keys: Keys, plain: HostWays, remote: "_Remote") -> HostWays:
    """Use the warm pool's connections, or the plain ways if the pool is gone by now."""
    from hvlaunch.driver.links.warm_way import WarmWay  # noqa: PLC0415 (as above)
    from hvlaunch.errors import BadUsage  # noqa: PLC0415 (few jobs have one)
    from hvlaunch.outside.pools import find_pool, pools_directory  # noqa: PLC0415 (as above)

    try:
        pool = find_pool(pools_directory(os.environ), spec.pool or "")
    except BadUsage:
        return plain
    way = WarmWay(pool, keys, plain.connect, lambda host: partial(remote, host))
    return plain._replace(connect=way.connect)


class _Remote(Protocol):
    def __call__(self, host: Host, timeout: float | None = None, /) -> Connection: ...


def _connect(spec: JobSpec, remote: _Remote, host: Host) -> AgentConnection:
    """Connect by pipes to this machine itself, else by `remote`. Raises HostError."""
    # Each way is imported on its first use: a local job does without ssh.
    if is_local(host):
        from hvlaunch.ssh.pipes import connect_local  # noqa: PLC0415 (see the docstring)

        environ = _host_environ(spec)
        return CommandConnection(connect_local(host, environ), lambda _timeout: connect_local(host, environ))
    try:
        return CommandConnection(remote(host), partial(remote, host))
    except HostError as error:
        # Under this name the machine is reached by ssh; its user may not know that the name means this machine.
        if host.port is None and is_here_by_dns(host):
            name, otherwise = host.name, f"; else {error.hint}" if error.hint else ""
            error.hint = f"if {name} is this machine, as DNS says: localhost in its place, or {name} in /etc/hosts{otherwise}"
        raise


def _lost(spec: JobSpec, remote: _Remote, host: Host) -> AgentConnection:
    """Return the lost connection that _connect() would have made."""
    if not is_local(host):
        return LostConnection(partial(remote, host))
    from hvlaunch.ssh.pipes import connect_local  # noqa: PLC0415 (as above)

    environ = _host_environ(spec)
    return LostConnection(lambda _timeout: connect_local(host, environ))


def _host_environ(spec: JobSpec) -> dict[str, str]:
    """Return the environment of this machine as a host: the driver's, without variables that other hosts would lack."""
    from hvlaunch.hosts.variables import without_outer_rank  # noqa: PLC0415 (not for jobs elsewhere)

    # A job started by a worker of another job has that worker's rank in its environment.
    environ = without_outer_rank(os.environ)
    if only_local(spec):
        return environ
    from hvlaunch.hosts.variables import host_environ  # noqa: PLC0415 (not for a local job)

    return host_environ(environ, spec.env)
