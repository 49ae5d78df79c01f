"""The seam between the driver and the transports: start an agent on a host, and exchange frames with the agent.

An agent sends its bytes in pieces, to tell other programs' output apart; agent/wire/frames.py has the writer.

REPORTS has the form of each frame of an agent; any other frame ends the connection. docs/internals/wire.md describes the
frames. A fitting form says nothing about truth or order: Expected checks each frame against earlier frames.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hvlaunch.agent.facts import PACKAGES
from hvlaunch.agent.wire.frames import (
    END,
    ERRAND_CHUNK,
    FRAME_COST,
    HEAD,
    LAST_OUTPUT,
    LONGEST_ERROR,
    LONGEST_RESULT,
    LONGEST_TEXT,
    LONGEST_TRACEBACK,
    MOST_ADDRESSES,
    MOST_GPUS,
    MOST_PORTS,
    MOST_RELAYED,
    NUMBERS,
    OUTPUT_CHUNK,
    PORT,
    RELAY_CHUNK,
    RELAY_WINDOW,
    ROOM,
    SELDOM,
    START,
    STREAMS,
    BadFrame,
    Choice,
    Decoder,
    Form,
    address,
    encode,
    exactly,
    flag,
    mapping,
    number,
    of,
    or_null,
    record,
    several,
    text,
    whole,
)
from hvlaunch.driver.program import AgentProgram
from hvlaunch.engine import events as on
from hvlaunch.errors import HostError, HostLost
from hvlaunch.job import Host
from hvlaunch.ssh import Channel, Connection

if TYPE_CHECKING:
    from hvlaunch.agent.wire.frames import Frame, Shape

__all__ = [
    "REPORTS",
    "AgentChannel",
    "AgentConnection",
    "BaseConnection",
    "CommandChannel",
    "CommandConnection",
    "Expected",
    "Garbled",
    "Listener",
    "LostConnection",
    "PieceReader",
    "Reconnect",
    "RelayRules",
    "report_decoder",
]

_REPLACED = 3
"""Most bytes for one byte of an error file: a byte outside of UTF-8 is sent as a character of three bytes."""
_CODES, _SIGNALS = whole(0, 255), whole(1, 64)
_NOT_STARTED = whole(126, 127)
_COUNT = whole(0, 1 << 31)
_SIZE = whole(0, 1 << 53)
_TIME = number(0, 1 << 40)
_NAME = text(256)
_CAUSE = text(LONGEST_TEXT)
_PORT_HOLDER = {
    "uid": whole(0, (1 << 32) - 1),
    "port": PORT,
    "user": or_null(_NAME),
    "program": or_null(_NAME),
}
_WORKER: "Mapping[str, Shape]" = {"round": _COUNT, "slot": _COUNT, "start": _COUNT}
_ID = whole(1, 1 << 53)
_HAVE = exactly(whole(0, 1 << 53), STREAMS)
_FACTS = {
    "hostname": _NAME,
    "python": text(32),
    "executable": _CAUSE,
    "kernel": _NAME,
    "boot_id": or_null(_NAME),
    "machine_id": or_null(_NAME),
    "cpus": whole(1, 1 << 16),
    "memory": _SIZE,
    "addresses": mapping(text(64), several(address, MOST_ADDRESSES), MOST_ADDRESSES),
    "clock": _TIME,
    "gpus": whole(0, MOST_GPUS),
    "packages": or_null(PACKAGES),
}

# An agent may be any program of another user's making: every number and text has a bound.
REPORTS: Mapping[str, Form | Choice] = {
    "hello": Form(
        optional=("more_ports",),
        more_ports=several(PORT, MOST_PORTS),
        protocol=_COUNT,
        facts=record(_FACTS, optional=("gpus", "packages")),
        scratch=_CAUSE,
        beacon_port=or_null(PORT),
        master_port=or_null(PORT),
        cwd_error=or_null(_CAUSE),
        trouble=or_null(_CAUSE),
    ),
    "reached": Form(address=or_null(_NAME), tried=several(_NAME, MOST_ADDRESSES), relay_port=or_null(PORT)),
    "vouched": Form(target=_CAUSE),
    "probed": Form(target=_CAUSE, agent=_COUNT, address=or_null(_NAME)),
    "started": Form(fields=_WORKER, pid=whole(1, 1 << 22), at=_TIME),
    "not_started": Form(fields=_WORKER, code=_NOT_STARTED, cause=_CAUSE),
    "output": Form(OUTPUT_CHUNK, fields=_WORKER, stream=of("stdout", "stderr", "result")),
    "exited": Form(
        LONGEST_ERROR * _REPLACED,
        fields=_WORKER,
        code=or_null(_CODES),
        signal=or_null(_SIGNALS),
        max_rss=_SIZE,
        at=_TIME,
        oom_killed=flag,
        port_taken_by=or_null(record(_PORT_HOLDER)),
    ),
    "suspended": Form(fields=_WORKER),
    # The library by name: its text is the driver's own, and no host can put words into a message.
    "alone": Form(fields=_WORKER, library=of("torch", "tensorflow", "mpi4py")),
    "master_port": Form(optional=("more",), port=PORT, more=several(PORT, MOST_PORTS)),
    "held": Form(names=several(_NAME, 1 << 10), cause=or_null(_CAUSE)),
    "no_preload": Form(cause=_CAUSE),
    "stdin_taken": Form(slot=_COUNT, bytes=whole(1, 1 << 53)),
    "relay": Choice(
        "what",
        open=Form(id=_ID),
        data=Form(RELAY_CHUNK, 1, id=_ID),
        end=Form(id=_ID),
        close=Form(id=_ID),
        credit=Form(id=_ID, bytes=_SIZE),
    ),
    "errand": Choice(
        "what",
        data=Form(ERRAND_CHUNK, 1, id=_ID),
        credit=Form(id=_ID, bytes=_SIZE),
        done=Form(LONGEST_RESULT, 1, id=_ID),
        failed=Form(id=_ID, reason=of("start", "time", "output", "killed", "stopped"), cause=_CAUSE),
    ),
    "pong": Form(at=_TIME),
    "have": Form(frames=_HAVE),
    "challenge": Form(nonce=text(64)),
    "resumed": Form(have=_HAVE, proof=text(64)),
    "refused": Form(cause=_CAUSE),
    "parting": Form(cause=_CAUSE),
    "fault": Form(LONGEST_TRACEBACK, cause=_CAUSE),
    "bye": Form(left=_COUNT, pids=several(whole(1, 1 << 22), 16)),
}


def report_decoder() -> Decoder:
    """Return a decoder for an agent's bytes; its frames fit the forms."""
    return Decoder(REPORTS, LONGEST_ERROR * _REPLACED)


_LOOPBACK = "127.0.0.1"
_OF_WORKERS = ("started", "not_started", "output", "exited", "suspended", "alone")
_KINDS: Mapping[type, str] = {
    on.WorkerStarted: "started",
    on.WorkerNotStarted: "not_started",
    on.WorkerExited: "exited",
    on.WorkerSuspended: "suspended",
    on.WorkerAlone: "alone",
}
_STREAMS = 3
_CHUNK_COST = OUTPUT_CHUNK + FRAME_COST
_NOT_ASKED: tuple[frozenset[str], int] = frozenset(), 0


class Expected:
    """Checks the frames of an agent, from the first to the last.

    `born` returns the round that a worker was started for, by slot and start; None for an unknown worker. `window` is the
    output in bytes that may be on its way, `spill` the further output after a loss of the connection. sent() is for the
    sending thread, all other methods for the receiving thread.
    """

    def __init__(self, born: Callable[[int, int], int | None], window: int, spill: int = 0) -> None:
        self._born = born
        self._window = window
        self._spill = spill
        self._asked: Mapping[str, Any] = {}
        """The hello to the agent."""
        self._had: set[object] = set()
        """Arrived frames of kinds without repetition."""
        # Each attribute is written by one of the two threads and only read by the other: no lock is needed.
        self._probes: dict[tuple[str, int], tuple[frozenset[str], int]] = {}
        """The probed addresses and the number of possible answers, by target and its agent."""
        self._answers: Counter[tuple[str, int]] = Counter()
        self._vouches: Counter[str] = Counter()
        """Requests without an answer to vouch for a host."""
        self._stdin: Counter[int] = Counter()
        """Bytes of stdin sent, by slot."""
        self._taken: Counter[int] = Counter()
        self._starts = self._ports = self._workers = self._holds = self._held = 0
        self._is_ending = False
        self._output = 0
        self._acknowledged = 0
        self._relay = RelayRules()

    def may_end(self) -> None:
        """Allow the agent to end without an order."""
        self._is_ending = True

    def sent(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        """Note a frame to the agent, before sending."""
        match header["type"]:
            case "hello":
                self._asked = header
            case "probe":
                target = header["target"], header["agent"]
                addresses, answers = self._probes.get(target, _NOT_ASKED)
                new = header["addresses"]
                # An answer for each address, and one for the failure of all.
                self._probes[target] = addresses.union(new), answers + len(new) + 1
            case "vouch":
                self._vouches[header["target"]] += 1
            case "start":
                self._starts += 1
            case "hold":
                self._holds += 1
            case "stdin":
                self._stdin[header["slot"]] += len(body)
            case "ack":
                self._acknowledged += header["bytes"]
            case "relay":
                self._relay.sent(header, len(body))
            case "bye":
                self._is_ending = True

    def remember(self, event: on.Event) -> None:
        """Note an event of the agent that a killed driver has recorded."""
        match event:
            case on.HostReady():
                self._had.add("hello")
            case on.RendezvousReached():
                self._had.add("reached")
                if event.relay_port is not None:
                    self._had.add("relay")
            case on.HostProbed():
                self._answers[event.target, event.agent] += 1
            case on.MasterPort():
                self._ports += 1
            case on.HostParting():
                self._is_ending = True
            case on.WorkerStarted() | on.WorkerNotStarted():
                self._workers += 1
                self._had |= {
                    ("start", event.slot, event.start),
                    (_KINDS[type(event)], event.slot, event.start),
                }
            case on.WorkerExited() | on.WorkerSuspended() | on.WorkerAlone():
                self._had.add((_KINDS[type(event)], event.slot, event.start))
            case _:
                pass

    def begin_epoch(self) -> None:
        """Allow more output after a takeover: the agent repeats frames, and starts with new credit."""
        self._spill += self._window + SELDOM

    def check(self, header: Mapping[str, Any], body: bytes) -> None:
        """Check an arrived frame, whose form fits. Raises BadFrame."""
        kind = header["type"]
        # After bye the agent only waits for its acknowledgement, and answers pings meanwhile.
        if "bye" in self._had and kind != "pong":
            raise BadFrame(f"a frame of type {kind} after bye")
        if kind in _OF_WORKERS:
            self._check_worker(kind, header, body)
            return
        match kind:
            case "hello":
                self._check_hello(header)
            case "reached":
                self._check_reached(header)
            case "probed":
                self._check_probed(header)
            case "vouched":
                self._vouches[header["target"]] -= 1
                if self._vouches[header["target"]] < 0:
                    raise BadFrame("a frame of type vouched that was not asked for")
            case "master_port":
                self._check_port(header["port"])
                self._check_more_ports(header.get("more", []))
                self._ports += 1
                if self._ports > self._starts or self._asked["elastic"] is None:
                    raise BadFrame("a port that was not asked for")
            case "held":
                self._held += 1
                if self._held > self._holds:
                    raise BadFrame("a frame of type held that was not asked for")
            case "no_preload":
                self._once("no_preload", kind)
            case "stdin_taken":
                self._check_taken(header["slot"], header["bytes"])
            case "relay":
                if "relay" not in self._had:
                    raise BadFrame("a relayed connection, and it does not relay")
                self._relay.heard(header, len(body))
            case "parting" | "fault":
                self._is_ending = True
            case "bye":
                self._once("bye", kind)
                if not self._is_ending:
                    raise BadFrame("a frame of type bye that was not asked for")

    def _once(self, key: object, kind: str) -> None:
        if key in self._had:
            raise BadFrame(f"a frame of type {kind} for the second time")
        self._had.add(key)

    def _check_hello(self, header: Mapping[str, Any]) -> None:
        # GPUs are looked up only if the number of slots depends on them.
        self._once("hello", "hello")
        for name in ("beacon_port", "master_port"):
            if header[name] is not None:
                self._check_port(header[name])
            elif self._asked["ports"] is None:
                raise BadFrame(f"a frame of type hello with no {name}")
        if header["master_port"] is not None:
            self._check_more_ports(header.get("more_ports", []))
        if ("gpus" in header["facts"]) is not self._asked["gpus"]:
            raise BadFrame("a frame of type hello with GPUs that were not asked for, or without")

    def _check_more_ports(self, ports: Sequence[int]) -> None:
        if len(ports) != self._asked.get("more_ports", 0):
            raise BadFrame("other ports than were asked for")
        for port in ports:
            self._check_port(port)

    def _check_port(self, port: int) -> None:
        # The user's range is what a firewall lets through.
        within = self._asked["ports"]
        if within is not None and not within[0] <= port <= within[1]:
            raise BadFrame(f"port {port}, which is not in the workers' range")

    def _check_reached(self, header: Mapping[str, Any]) -> None:
        self._once("reached", "reached")
        asked = self._asked["rendezvous"]
        if asked is None:
            raise BadFrame("a frame of type reached that was not asked for")
        candidates = {address for address, _ in asked["candidates"]}
        allowed = {None, *candidates}
        if header["relay_port"] is not None:
            if asked["relay"] == "never":
                raise BadFrame("a relay that was not asked for")
            self._had.add("relay")
            allowed = {_LOOPBACK}
        if header["address"] not in allowed or not candidates.issuperset(header["tried"]):
            raise BadFrame("an address of the rendezvous that it was not told")

    def _check_probed(self, header: Mapping[str, Any]) -> None:
        target, address = (header["target"], header["agent"]), header["address"]
        addresses, answers = self._probes.get(target, _NOT_ASKED)
        self._answers[target] += 1
        if self._answers[target] > answers or (address is not None and address not in addresses):
            raise BadFrame("a frame of type probed that was not asked for")

    def _check_taken(self, slot: int, size: int) -> None:
        # More than was sent would let the driver's window grow without bound.
        self._taken[slot] += size
        if self._taken[slot] > self._stdin[slot]:
            raise BadFrame("more of stdin taken than there was")

    def _check_worker(self, kind: str, header: Mapping[str, Any], body: bytes) -> None:
        slot, start = header["slot"], header["start"]
        born = self._born(slot, start)
        if born is None:
            raise BadFrame(f"a frame of type {kind} of a worker that was never started, in slot {slot}")
        if header["round"] != born:
            raise BadFrame(f"a frame of type {kind} of slot {slot} in round {header['round']}, not {born}")
        if kind == "output":
            self._check_output(header, body)
            return
        self._once((kind, slot, start), kind)
        # Started or not started, each start has one of the two.
        if kind in ("started", "not_started"):
            self._once(("start", slot, start), kind)
            self._workers += 1
        elif ("started", slot, start) not in self._had:
            raise BadFrame(f"a frame of type {kind} of a worker that has not started, in slot {slot}")
        if kind == "exited" and (header["code"] is None) is (header["signal"] is None):
            raise BadFrame("a frame of type exited with a code and a signal, or with neither")
        if kind == "suspended" and self._asked["elastic"] is None:
            raise BadFrame("a frame of type suspended that was not asked for")
        if kind == "alone" and self._asked["elastic"] is not None:
            raise BadFrame("a frame of type alone that was not asked for")

    def _check_output(self, header: Mapping[str, Any], body: bytes) -> None:
        slot, start, stream = header["slot"], header["start"], header["stream"]
        if ("started", slot, start) not in self._had:
            raise BadFrame(f"output of a worker that has not started, in slot {slot}")
        # The printer has finished the stream's last line at its end.
        end = (stream, slot, start)
        if end in self._had:
            raise BadFrame(f"output of slot {slot} after its end")
        if not body:
            self._had.add(end)
            return
        self._output += len(body) + FRAME_COST
        over = self._output - self._acknowledged - self._window - _CHUNK_COST
        if over > 0:
            self._check_last_output(over)

    def _check_last_output(self, over: int) -> None:
        """Check output beyond the credit: at an end of a worker, or its own, the agent empties pipes and its file."""
        chunks = LAST_OUTPUT // OUTPUT_CHUNK + 1
        if over > self._spill + self._workers * _STREAMS * chunks * _CHUNK_COST:
            raise BadFrame("output beyond its credit")


class _Connection:
    """Counts of bytes in both directions. Each byte passed on gives the agent credit for another."""

    def __init__(self) -> None:
        self.arrived = 0
        self.passed_on = 0
        self.sent = 0
        self.taken = 0
        self.is_ended = False


class RelayRules:
    """Checks an agent's relayed connections: numbers, count, and bytes on their way.

    sent() and heard() may be called by different threads.
    """

    def __init__(self) -> None:
        self._opened = 0
        self._open: dict[int, _Connection] = {}

    def sent(self, header: Mapping[str, Any], size: int) -> None:
        """Note a frame to the agent, with a body of `size` bytes."""
        connection = self._open.get(header["id"])
        if connection is None:
            return
        match header["what"]:
            case "credit":
                connection.passed_on += header["bytes"]
            case "data":
                connection.sent += size
            case "close":
                self._open.pop(header["id"], None)

    def heard(self, header: Mapping[str, Any], size: int) -> None:
        """Check a frame of the agent. Raises BadFrame."""
        number, kind = header["id"], header["what"]
        if kind == "open":
            self._opened += 1
            if number != self._opened or len(self._open) >= MOST_RELAYED:
                raise BadFrame("one relayed connection too many")
            self._open[number] = _Connection()
            return
        if number > self._opened:
            raise BadFrame("a relayed connection that was never opened")
        connection = self._open.get(number)
        if connection is None:
            return  # closed by the driver, before the agent heard of it
        match kind:
            case "data" | "end":
                connection.arrived += size
                if connection.is_ended or connection.arrived - connection.passed_on > RELAY_WINDOW:
                    raise BadFrame("relayed data beyond its window")
                connection.is_ended = kind == "end"
            case "credit":
                connection.taken += header["bytes"]
                if connection.taken > connection.sent:
                    raise BadFrame("credit for more than was relayed")
            case "close":
                self._open.pop(number, None)


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
        """Yield the agent's frames on arrival until its end; only frames with a form of REPORTS. Blocks.

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
