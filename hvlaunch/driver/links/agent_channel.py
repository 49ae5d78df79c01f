"""The seam between the driver and the ways to hosts: an agent is started, and frames go to it and come from it."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from hvlaunch.agent.wire.frames import Decoder, encode
from hvlaunch.driver.links.piece_reader import PieceReader
from hvlaunch.driver.links.reports import report_decoder
from hvlaunch.driver.program.agent_program import AgentProgram
from hvlaunch.errors import HostError, HostLost
from hvlaunch.job import Host
from hvlaunch.ssh.connection import Channel, Connection

if TYPE_CHECKING:
    from hvlaunch.agent.wire.frames import Frame

__all__ = [
    "AgentChannel",
    "AgentConnection",
    "BaseConnection",
    "CommandChannel",
    "CommandConnection",
    "Listener",
    "LostConnection",
    "Reconnect",
]

Reconnect = Callable[[float | None], Connection]
"""Connects to a host once more, within so many seconds. Raises HostError."""


class AgentChannel(Protocol):
    """Frames between the driver and a host's agent, which has been started. One thread receives, another sends."""

    def frames(self) -> "Iterator[Frame]":
        """What the agent sends, as it comes, to the end: frames that fit their forms (reports.py). Blocks.

        Raises OSError where the connection broke, BadFrame and Garbled where what came is not an agent's, HostError
        where it is known what ended the agent.
        """

    def send(self, *frames: "Frame") -> None:
        """Blocks while the host does not take it. Raises OSError where the connection broke or the agent is gone."""

    def stderr(self) -> bytes:
        """The last of what the agent, or what was to start it, wrote to stderr."""

    def exit_status(self, timeout: float) -> int | None:
        """The agent's exit status, 128 + n for a signal n; None if not known within `timeout` seconds."""


class Listener(Protocol):
    """Hears what is no frame, between frames."""

    def heard_agent(self) -> None:
        """Something of the agent's came, and be it a part of a frame."""

    def heard_noise(self, data: bytes) -> None:
        """Others have printed into its channel."""


class AgentConnection(Protocol):
    """An open way to one host, by which its agent is started."""

    local_address: str | None
    """Our own end; empty where it is not known; None where the host is this machine."""

    remote_address: str | None
    """The host's end; empty where it is not known; None where the host is this machine."""

    is_launched: bool
    """Whether a launcher has started it, and may end it: of that the driver is not told."""
    processes: int
    """How many processes are there to become the agent and its workers' parents; 1 where the agent starts all workers itself."""

    can_rejoin: bool
    """Whether another connection can take its place."""

    has_modules: bool
    """Whether its agent has all modules from the start."""

    on_call: Callable[[], None]
    """Called, in a thread, where the agent comes by another connection on its own account; for the session to set."""

    def start_agent(self, program: AgentProgram, host: Host, listener: Listener) -> AgentChannel:
        """Raises HostError."""

    def silence(self) -> float | None:
        """Seconds since the first machine on the way acknowledged something; None where that is not known."""

    def rejoin(
        self, program: AgentProgram, host: Host, scratch: str, listener: Listener, timeout: float
    ) -> "tuple[AgentConnection, AgentChannel]":
        """Another connection to the agent, whose scratch directory this is, within so many seconds. Raises HostError."""

    def close(self) -> None:
        """Close it and its channel; unblocks threads in them. Never raises, may be repeated."""


class BaseConnection:
    """What most AgentConnections have in common."""

    def __init__(
        self,
        again: Reconnect | None,
        local_address: str | None = "",
        remote_address: str | None = "",
        *,
        has_modules: bool = False,
    ) -> None:
        """`again` connects once more, within so many seconds; None where this is the only way."""
        self.local_address = local_address
        self.remote_address = remote_address
        self.is_launched = False
        self.processes = 1
        self.can_rejoin = again is not None
        self.has_modules = has_modules
        self.on_call: Callable[[], None] = lambda: None
        self._again = again

    def silence(self) -> float | None:
        return None

    def rejoin(
        self, program: AgentProgram, host: Host, scratch: str, listener: Listener, timeout: float
    ) -> tuple[AgentConnection, AgentChannel]:
        if self._again is None:
            raise HostLost("there is no other way to its agent", host=host.name)
        return _rejoin(self._again, program, host, scratch, listener, timeout)


class CommandConnection(BaseConnection):
    """AgentConnection over one that runs commands: ssh's, or pipes."""

    def __init__(self, connection: Connection, again: Reconnect | None = None) -> None:
        super().__init__(again, connection.local_address, connection.remote_address)
        self._connection = connection

    def start_agent(self, program: AgentProgram, host: Host, listener: Listener) -> AgentChannel:
        is_here = self.remote_address is None
        command, data = program.command(host, is_here=is_here, is_near=self._connection.is_near)
        return CommandChannel(self._connection.run(command), data, listener)

    def silence(self) -> float | None:
        return self._connection.silence()

    def close(self) -> None:
        self._connection.close()


class LostConnection(BaseConnection):
    """AgentConnection of a driver before us, which is lost."""

    def start_agent(self, _program: AgentProgram, host: Host, _listener: Listener) -> AgentChannel:
        raise HostLost("its connection is lost", host=host.name)

    def close(self) -> None:
        pass


def _rejoin(
    again: Reconnect,
    program: AgentProgram,
    host: Host,
    scratch: str,
    listener: Listener,
    timeout: float,
) -> tuple[AgentConnection, AgentChannel]:
    """Connect, and run a carrier there. Raises HostError."""
    connection = again(timeout)
    command, data = program.carrier(host, scratch, timeout)
    try:
        channel = connection.run(command)
        channel.write(data)
    except OSError as error:
        connection.close()
        raise HostLost(str(error), host=host.name) from None
    except HostError:
        connection.close()
        raise
    return CommandConnection(connection, again), CommandChannel(channel, b"", listener)


class CommandChannel:
    """AgentChannel over the stdin and stdout of a command, which reads `program` before the first frame."""

    def __init__(
        self,
        channel: Channel,
        program: bytes,
        listener: Listener,
        decoder: Callable[[], Decoder] = report_decoder,
    ) -> None:
        """`decoder` makes what takes the frames of that program."""
        self._channel = channel
        self._program = program
        self._listener = listener
        self._decoder = decoder

    def frames(self) -> "Iterator[Frame]":
        reader = PieceReader(self._listener.heard_noise)
        decoder = self._decoder()
        while data := self._channel.read():
            if sent := reader.feed(data):
                self._listener.heard_agent()
                yield from decoder.feed(sent)

    def send(self, *frames: "Frame") -> None:
        program, self._program = self._program, b""
        self._channel.write(b"".join((program, *(encode(*frame) for frame in frames))))

    def stderr(self) -> bytes:
        return bytes(self._channel.stderr())

    def exit_status(self, timeout: float) -> int | None:
        return self._channel.exit_status(timeout)
