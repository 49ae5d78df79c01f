"""The frames of an agent: the form of each, and when each may come. Any other frame ends the connection.

docs/internals/wire.md describes the frames. A fitting form says nothing about truth or order: Expected checks each frame
against earlier frames.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvlaunch.agent.facts.packages import PACKAGES
from hvlaunch.agent.wire.frames import (
    ERRAND_CHUNK,
    FRAME_COST,
    LAST_OUTPUT,
    LONGEST_ERROR,
    LONGEST_RESULT,
    LONGEST_TEXT,
    LONGEST_TRACEBACK,
    MOST_ADDRESSES,
    MOST_GPUS,
    MOST_PORTS,
    MOST_RELAYED,
    OUTPUT_CHUNK,
    PORT,
    RELAY_CHUNK,
    RELAY_WINDOW,
    SELDOM,
    STREAMS,
    BadFrame,
    Choice,
    Decoder,
    Form,
    address,
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
from hvlaunch.engine import events as on

if TYPE_CHECKING:
    from hvlaunch.agent.wire.frames import Shape

__all__ = ["REPORTS", "Expected", "RelayRules", "report_decoder"]

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
