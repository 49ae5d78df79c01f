"""Connections by a warm pool: the pool's process is connected to each host, where a warm agent forks the job's agent."""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from hvlaunch.driver.links.agent_channel import (
    AgentChannel,
    AgentConnection,
    BaseConnection,
    CommandChannel,
    Listener,
    Reconnect,
)
from hvlaunch.driver.program import AgentProgram, Keys
from hvlaunch.errors import ConnectFailed, HostLost, HvlaunchError
from hvlaunch.job import Host
from hvlaunch.outside.pools import STREAM_DATA, STREAM_HEAD, KnownPool, ask, open_stream

__all__ = ["WarmWay"]

_READ_SIZE = 1 << 18


class WarmWay:
    """Connects to the hosts of a pool, for one job. `otherwise` connects to other hosts, and if the pool is gone."""

    def __init__(
        self,
        pool: KnownPool,
        keys: Keys,
        otherwise: Callable[[Host], AgentConnection],
        again: Callable[[Host], Reconnect],
    ) -> None:
        """`again` returns the function for later connections to a host, without the pool."""
        self._pool = pool
        self._keys = keys
        self._otherwise = otherwise
        self._again = again
        self._asking = threading.Lock()
        self._hosts: Mapping[str, Any] = {}

    def connect(self, host: Host) -> AgentConnection:
        """Connect to the host's warm agent. Raises HostError."""
        try:
            state = self._state_of(host)
        except HvlaunchError:  # PoolGone too
            state = None
        # A host that the pool has not, such as one of a discovery, is reached by ssh as without a pool.
        if state is None:
            return self._otherwise(host)
        if state["state"] != "ready":
            why = state["problem"] or "it connects"
            raise ConnectFailed(
                f"pool {self._pool.name} has no connection to it now: {why}",
                host=host.name,
                hint=f"hvlaunch pool status {self._pool.name}",
            )
        return _WarmConnection(self._pool, self._keys.job_id, state, self._again(host))

    def _state_of(self, host: Host) -> Mapping[str, Any] | None:
        """Return the host's state in the pool, by the newest answer. Raises HvlaunchError."""
        before = self._hosts
        # One question for every thread in this queue: the answer has the states of all hosts.
        with self._asking:
            state = self._hosts.get(host.name)
            if self._hosts is before and (state is None or state["state"] != "ready"):
                answer = ask(self._pool, {"what": "begin"})
                if answer["certificate"] is not None:
                    self._keys.certificate.adopt(answer["certificate"].encode("ascii"))
                self._hosts = answer["hosts"]
            return self._hosts.get(host.name)


class _WarmConnection(BaseConnection):
    """AgentConnection by a warm pool."""

    def __init__(self, pool: KnownPool, job_id: str, state: Mapping[str, Any], again: Reconnect) -> None:
        super().__init__(again, state["local_address"], state["remote_address"], has_modules=True)
        self._pool = pool
        self._job_id = job_id
        self._channel: _StreamChannel | None = None

    def start_agent(self, program: AgentProgram, host: Host, listener: Listener) -> AgentChannel:
        request = {"what": "lane", "host": host.name, "job": self._job_id, "config": program.config}
        try:
            self._channel = _StreamChannel(open_stream(self._pool), request)
        except OSError:
            raise HostLost(f"pool {self._pool.name} has gone", host=host.name) from None
        return CommandChannel(self._channel, b"", listener)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


class _StreamChannel:
    """hvlaunch.ssh.Channel over the socket of a pool stream."""

    def __init__(self, link: socket.socket, request: Mapping[str, Any]) -> None:
        self._link = link
        self._request = json.dumps(request).encode() + b"\n"
        """Sent together with the first data: one message instead of two."""
        self._incomplete = b""
        """The beginning of an incomplete part."""
        self._ended: Mapping[str, Any] | None = None

    def read(self) -> bytes:
        # Behind the end no data follows: the socket may stay open.
        while self._ended is None:
            data = self._link.recv(_READ_SIZE)
            if not data:
                raise ConnectionResetError("the warm pool has lost its connection")
            if content := b"".join(self._parts(self._incomplete + data)):
                return content
        return b""

    def _parts(self, data: bytes) -> Iterator[bytes]:
        at = 0
        while len(data) - at >= STREAM_HEAD.size:
            kind, size = STREAM_HEAD.unpack_from(data, at)
            end = at + STREAM_HEAD.size + size
            if len(data) < end:
                break
            part, at = data[at + STREAM_HEAD.size : end], end
            if kind == STREAM_DATA:
                yield part
            else:
                self._ended = json.loads(part)
        self._incomplete = data[at:]

    def write(self, data: bytes) -> None:
        request, self._request = self._request, b""
        self._link.sendall(request + data)

    def stderr(self) -> bytes:
        return b"" if self._ended is None else str(self._ended["stderr"]).encode()

    def exit_status(self, timeout: float) -> int | None:  # noqa: ARG002 (the end of the data brings it)
        return None if self._ended is None else int(self._ended["status"])

    def close(self) -> None:
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
