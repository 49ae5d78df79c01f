"""Pretended hosts for `hvlaunch practise`: agents on this machine, over pipes in place of ssh, with connections to cut."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from hvlaunch.driver.links.agent_channel import AgentConnection, CommandConnection
from hvlaunch.driver.program import Keys
from hvlaunch.errors import ConnectFailed
from hvlaunch.gloo.controller import HostWays, WaysToHosts
from hvlaunch.hosts.local import without_outer_rank
from hvlaunch.job import Host, JobSpec
from hvlaunch.ssh import PipeConnection, connect_local

__all__ = ["PretendedHosts"]


class PretendedHosts:
    """Connects to pretended hosts. Threads of the driver connect; any thread may cut."""

    def __init__(self) -> None:
        self._environ = without_outer_rank(os.environ)
        self._connections: dict[str, PipeConnection] = {}
        self._away_until: dict[str, float] = {}

    def ways(self, begin: Callable[[Callable[[str], None]], None]) -> WaysToHosts:
        """Return the ways for a job. `begin` is called at its start, with the function for messages."""

        @contextmanager
        def open_ways(_spec: JobSpec, _keys: Keys, say: Callable[[str], None]) -> Iterator[HostWays]:
            begin(say)
            yield HostWays(self._connect, self._connect)

        return open_ways

    def keep_away(self, name: str, seconds: float) -> None:
        """Refuse connections to the host for some seconds."""
        self._away_until[name] = time.monotonic() + seconds

    def cut(self, name: str) -> None:
        """Close the connection to the host."""
        self._connections[name].close()

    def _connect(self, host: Host) -> AgentConnection:
        return CommandConnection(self._pipes_to(host), partial(self._pipes_to, host))

    def _pipes_to(self, host: Host, _timeout: float | None = None) -> PipeConnection:
        if time.monotonic() < self._away_until.get(host.name, 0.0):
            raise ConnectFailed("its network is cut, as you asked", host=host.name)
        connection = self._connections[host.name] = connect_local(host, self._environ)
        return connection
