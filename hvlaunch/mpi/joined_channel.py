"""The connections of one host's agents as one connection."""

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hvlaunch.agent.caller import Sealed
from hvlaunch.agent.frames import encode
from hvlaunch.agent.pieces import PieceReader
from hvlaunch.errors import AgentFailed, HvlaunchError
from hvlaunch.gloo.driver.agent_channel import AgentChannel, Listener
from hvlaunch.gloo.driver.agent_program import AgentProgram
from hvlaunch.gloo.driver.reports import report_decoder
from hvlaunch.job import Host
from hvlaunch.mpi.joined_agents import JoinedAgents
from hvlaunch.mpi.launcher_errors import EndedByLauncher
from hvlaunch.ssh.streams.tcp import is_near

if TYPE_CHECKING:
    from hvlaunch.agent.frames import Frame

__all__ = ["JoinedChannel", "JoinedConnection"]

_READ_SIZE = 1 << 16
_PATIENCE = 5.0  # seconds for a launcher that ends its processes to end as well


class JoinedConnection:
    """hvlaunch.gloo.driver.agent_channel.AgentConnection over the connections of a host's agents, in the order of their slots."""

    def __init__(
        self,
        host: str,
        connections: Sequence[Sealed],
        launcher_end: Callable[[float], int | None],
        trouble: Callable[[], HvlaunchError | None],
    ) -> None:
        """`launcher_end` waits for the launcher's end, some seconds: its exit status, None where it runs on.

        `trouble` is why we have hung up on all agents, if we have.
        """
        self._host = host
        self._trouble = trouble
        self._launcher_end = launcher_end
        self._connections = connections
        self.local_address: str | None = plain(connections[0].socket.getsockname()[0])
        self.remote_address: str | None = plain(connections[0].socket.getpeername()[0])
        self.agents = len(connections)
        self._is_near = is_near(connections[0].socket)

    def start_agent(
        self,
        program: AgentProgram,
        host: Host,  # noqa: ARG002 (the launcher has started an interpreter there)
        listener: Listener,
    ) -> AgentChannel:
        data = program.packed(is_near=self._is_near)
        return JoinedChannel(self._host, self._connections, data, listener, self._launcher_end, self._trouble)

    def close(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)


class JoinedChannel:
    """hvlaunch.gloo.driver.agent_channel.AgentChannel: `program` first, to each of the agents, then frames."""

    def __init__(
        self,
        host: str,
        connections: Sequence[Sealed],
        program: bytes,
        listener: Listener,
        launcher_end: Callable[[float], int | None],
        trouble: Callable[[], HvlaunchError | None],
    ) -> None:
        self._host = host
        self._trouble = trouble
        self._launcher_end = launcher_end
        self._listener = listener
        self._connections = list(connections)
        self._programs = [len(program).to_bytes(4, "big") + program] * len(connections)
        """What each agent gets before its first frame."""
        self._agents = JoinedAgents(len(connections))
        self._turn = threading.Lock()
        self._cause = b""
        self._selector = selectors.DefaultSelector()
        for slot, connection in enumerate(connections):
            self._selector.register(connection.socket, selectors.EVENT_READ, slot)

    def frames(self) -> "Iterator[Frame]":
        """As if of one agent, until one has gone without a word, or all have ended. Raises EndedByLauncher, AgentFailed."""
        readers = [PieceReader(self._listener.heard_noise) for _ in self._connections]
        decoders = [report_decoder() for _ in self._connections]
        while not self._agents.is_ended and self._selector.get_map():
            for key, _ in self._selector.select():
                slot = key.data
                data = self._connections[slot].socket.recv(_READ_SIZE)
                if not data and (trouble := self._trouble()) is not None:
                    raise AgentFailed(trouble.cause, host=self._host, hint=trouble.hint)
                if not data and not self._agents.has_ended(slot):
                    self._cause = b"its agent of slot %d is gone" % slot
                    return
                if not data:
                    self._selector.unregister(key.fileobj)
                for header, body in decoders[slot].feed(
                    readers[slot].feed(self._connections[slot].open(data))
                ):
                    yield from self._for_the_driver(slot, header, body)
        if self._agents.is_ended:
            raise self._ended()

    def _ended(self) -> EndedByLauncher:
        status = self._launcher_end(_PATIENCE)
        how = "" if status is None else f", and then ended with exit code {status}"
        return EndedByLauncher(f"the launcher ended its processes{how}", host=self._host, status=status)

    def _for_the_driver(self, slot: int, header: dict[str, Any], body: bytes) -> "list[Frame]":
        with self._turn:
            frames = list(self._agents.to_driver(slot, header, body))
        if frames:
            self._listener.heard_agent()
        return frames

    def send(self, header: dict[str, Any], body: bytes) -> None:
        with self._turn:
            orders = list(self._agents.to_agents(header, body))
        for slot, frame in orders:
            program, self._programs[slot] = self._programs[slot], b""
            if program:  # in records of its own: its reader reads no further
                self._send(slot, program)
            self._send(slot, encode(*frame))

    def _send(self, slot: int, data: bytes) -> None:
        """An agent that has ended needs to hear no more."""
        try:
            self._connections[slot].sendall(data)
        except OSError:
            with self._turn:
                if not self._agents.has_ended(slot):
                    raise

    def stderr(self) -> bytes:
        return self._cause

    def exit_status(self, timeout: float) -> int | None:  # noqa: ARG002 (it is the launcher that is told)
        return None


def plain(address: str) -> str:
    """An IPv4 address that a socket for both families shows as ::ffff:1.2.3.4."""
    return address.removeprefix("::ffff:") if "." in address else address
