"""The seam between the driver and the transports: start an agent on a host, and exchange frames with the agent.

An agent sends its bytes in pieces, to tell other programs' output apart; agent/wire/frames.py has the writer.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from hvlaunch.agent.wire.frames import END, HEAD, NUMBERS, ROOM, START, Decoder, encode
from hvlaunch.driver.links.reports import report_decoder
from hvlaunch.driver.program import AgentProgram
from hvlaunch.errors import HostError, HostLost
from hvlaunch.job import Host
from hvlaunch.ssh import Channel, Connection

if TYPE_CHECKING:
    from hvlaunch.agent.wire.frames import Frame

__all__ = [
    "AgentChannel",
    "AgentConnection",
    "BaseConnection",
    "CommandChannel",
    "CommandConnection",
    "Garbled",
    "Listener",
    "LostConnection",
    "PieceReader",
    "Reconnect",
]

Reconnect = Callable[[float | None], Connection]
"""Connects to a host again, within the given seconds. Raises HostError."""


class Garbled(Exception):
    """Another program wrote into the middle of a piece: the channel does not keep writes together as POSIX pipes do."""


class PieceReader:
    """Joins pieces. Bytes between pieces go to `noise` on arrival."""

    def __init__(self, noise: Callable[[bytes], None]) -> None:
        self._noise = noise
        self._incomplete = b""
        self._number = 0

    def feed(self, data: bytes) -> bytes:
        """Return the content of the pieces that are complete with `data`. Raises Garbled."""
        data = self._incomplete + data
        contents = []
        at = 0
        while len(data) - at >= HEAD.size:
            mark, number, size = HEAD.unpack_from(data, at)
            # Bytes outside of pieces: skip to the next mark, or to a part of a mark at the end of the data.
            if mark != START:
                begin = _next_start(data, at + 1)
                self._noise(data[at:begin])
                at = begin
                continue
            end = at + HEAD.size + size
            if number != self._number or size > ROOM:
                raise Garbled
            if len(data) < end + len(END):
                break
            if not data.startswith(END, end):
                raise Garbled
            self._number = (number + 1) & NUMBERS
            contents.append(data[at + HEAD.size : end])
            at = end + len(END)
        if not START.startswith(data[at : at + len(START)]):
            begin = _next_start(data, at + 1)
            self._noise(data[at:begin])
            at = begin
        self._incomplete = data[at:]
        return b"".join(contents)


def _next_start(data: bytes, at: int) -> int:
    """Return the offset of the next start of a piece, perhaps a partial one at the end; else the end."""
    begin = data.find(START, at)
    if begin >= 0:
        return begin
    for size in range(len(START) - 1, 0, -1):
        if len(data) - size >= at and data.endswith(START[:size]):
            return len(data) - size
    return len(data)


class AgentChannel(Protocol):
    """Frames between the driver and a started agent. One thread receives, another sends."""

    def frames(self) -> "Iterator[Frame]":
        """Yield the agent's frames on arrival until its end; only frames with a form of reports.py. Blocks.

        Raises OSError for a broken connection, BadFrame and Garbled for bytes of another program, and HostError if the
        cause of the agent's end is known.
        """

    def send(self, *frames: "Frame") -> None:
        """Send frames; blocks while the host does not read. Raises OSError if the connection broke or the agent is gone."""

    def stderr(self) -> bytes:
        """Return the last stderr of the agent, or of the command for starting the agent."""

    def exit_status(self, timeout: float) -> int | None:
        """Return the agent's exit status, 128 + n for a signal n; None if unknown within `timeout` seconds."""


class Listener(Protocol):
    """Notified of every arrival, in the receiving thread."""

    def heard_agent(self) -> None:
        """Bytes of the agent have arrived, at least a part of a frame."""

    def heard_noise(self, data: bytes) -> None:
        """Another program has printed into the agent's channel."""


class AgentConnection(Protocol):
    """An open connection to a host, for starting its agent."""

    local_address: str | None
    """Address of the driver's end; empty if unknown; None if the host is this machine."""

    remote_address: str | None
    """Address of the host's end; empty if unknown; None if the host is this machine."""

    is_launched: bool
    """True if a launcher (mpirun, srun) has started the agent, and may end the agent without notice."""
    processes: int
    """Number of processes that a launcher has started here as workers' parents; 1 if the agent starts its workers itself."""

    can_rejoin: bool
    """True if another connection can replace this one."""

    has_modules: bool
    """True if the agent has every module from the start."""

    is_near: bool
    """True if a program should go compiled: more bytes cost less than the time to compile."""

    on_call: Callable[[], None]
    """Called, in a thread, when the agent itself connects again; set by the session."""

    def start_agent(self, program: AgentProgram, host: Host, listener: Listener) -> AgentChannel:
        """Start the agent. Raises HostError."""

    def silence(self) -> float | None:
        """Return the seconds since the first machine on the way acknowledged data; None if unknown."""

    def rejoin(
        self, program: AgentProgram, host: Host, scratch: str, listener: Listener, timeout: float
    ) -> "tuple[AgentConnection, AgentChannel]":
        """Connect to the running agent with this scratch directory again, within `timeout` seconds. Raises HostError."""

    def close(self) -> None:
        """Close the connection and its channel; unblocks threads in both. Never raises, may be repeated."""


class BaseConnection:
    """Common parts of most AgentConnections."""

    def __init__(
        self,
        again: Reconnect | None,
        local_address: str | None = "",
        remote_address: str | None = "",
        *,
        has_modules: bool = False,
    ) -> None:
        """`again` connects once more; None if no other connection is possible."""
        self.local_address = local_address
        self.remote_address = remote_address
        self.is_launched = False
        self.processes = 1
        self.can_rejoin = again is not None
        self.has_modules = has_modules
        self.is_near = False
        self.on_call: Callable[[], None] = lambda: None
        self._again = again

    def silence(self) -> float | None:
        return None

    def rejoin(
        self, program: AgentProgram, host: Host, scratch: str, listener: Listener, timeout: float
    ) -> tuple[AgentConnection, AgentChannel]:
        # A launcher's connection, for example, is made by the agent.
        if self._again is None:
            raise HostLost("its agent can't be reached in another way", host=host.name)
        return _rejoin(self._again, program, host, scratch, listener, timeout)


class CommandConnection(BaseConnection):
    """AgentConnection over a connection for commands: ssh, or pipes."""

    def __init__(self, connection: Connection, again: Reconnect | None = None) -> None:
        super().__init__(again, connection.local_address, connection.remote_address)
        self.is_near = connection.is_near
        self._connection = connection

    def start_agent(self, program: AgentProgram, host: Host, listener: Listener) -> AgentChannel:
        is_here = self.remote_address is None
        command, data = program.command(host, is_here=is_here, is_near=self.is_near)
        return CommandChannel(self._connection.run(command), data, listener)

    def silence(self) -> float | None:
        return self._connection.silence()

    def close(self) -> None:
        self._connection.close()


class LostConnection(BaseConnection):
    """Lost AgentConnection of a killed driver; the session replaces this connection with another."""

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
    """Connect, and run a carrier on the host. Raises HostError."""
    connection = again(timeout)
    command, data = program.carrier(host, scratch, timeout)
    # A connection must not leak, whichever step fails.
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
    """AgentChannel over stdin and stdout of a command. The command reads `program` before the first frame."""

    def __init__(
        self,
        channel: Channel,
        program: bytes,
        listener: Listener,
        decoder: Callable[[], Decoder] = report_decoder,
    ) -> None:
        """`decoder` makes the decoder of the program's frames."""
        self._channel = channel
        self._program = program
        self._listener = listener
        self._decoder = decoder

    def frames(self) -> "Iterator[Frame]":
        reader = PieceReader(self._listener.heard_noise)
        decoder = self._decoder()
        # Noise between the pieces is passed on, and ends nothing.
        while data := self._channel.read():
            if sent := reader.feed(data):
                self._listener.heard_agent()
                yield from decoder.feed(sent)

    def send(self, *frames: "Frame") -> None:
        # With the first frames, in one write: program and hello travel in one message.
        program, self._program = self._program, b""
        self._channel.write(b"".join((program, *(encode(*frame) for frame in frames))))

    def stderr(self) -> bytes:
        return bytes(self._channel.stderr())

    def exit_status(self, timeout: float) -> int | None:
        return self._channel.exit_status(timeout)
