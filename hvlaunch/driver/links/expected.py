"""What an agent may say now, by what it was told. A frame that was not to be expected is as bad as none: its host is lost.

reports.py has what a frame may look like at all.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from hvlaunch.agent.wire.frames import (
    FRAME_COST,
    LAST_OUTPUT,
    MOST_RELAYED,
    OUTPUT_CHUNK,
    RELAY_WINDOW,
    BadFrame,
)
from hvlaunch.agent.wire.session import SELDOM
from hvlaunch.engine import events as on

__all__ = ["Expected", "RelayRules"]


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
    """One agent's, from its first frame to its last.

    `born` has the round that a worker was started for, by slot and start; None where there was no such worker.
    `window` is how much output may be on its way, `spill` how much more after a loss of the connection. sent() is for who sends, all else for who receives.
    """

    def __init__(self, born: Callable[[int, int], int | None], window: int, spill: int = 0) -> None:
        self._born = born
        self._window = window
        self._spill = spill
        self._asked: Mapping[str, Any] = {}
        """The hello that it got."""
        self._had: set[object] = set()
        """What may come only once, and has."""
        # What one side writes, the other only reads: so neither needs a lock.
        self._probes: dict[tuple[str, int], tuple[frozenset[str], int]] = {}
        """By target and its agent: the addresses that were asked for, and how many answers there may be."""
        self._answers: Counter[tuple[str, int]] = Counter()
        self._stdin: Counter[int] = Counter()
        """Bytes by slot."""
        self._taken: Counter[int] = Counter()
        self._starts = self._ports = self._workers = 0
        self._is_ending = False
        self._output = 0
        self._acknowledged = 0
        self._relay = RelayRules()

    def may_end(self) -> None:
        """From now on the agent may end without having been asked to."""
        self._is_ending = True

    def sent(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        """The agent is about to get this frame."""
        match header["type"]:
            case "hello":
                self._asked = header
            case "probe":
                target = header["target"], header["agent"]
                addresses, answers = self._probes.get(target, _NOT_ASKED)
                more = header["addresses"]
                self._probes[target] = addresses.union(more), answers + len(more) + 1
            case "start":
                self._starts += 1
            case "stdin":
                self._stdin[header["slot"]] += len(body)
            case "ack":
                self._acknowledged += header["bytes"]
            case "relay":
                self._relay.sent(header, len(body))
            case "bye":
                self._is_ending = True

    def remember(self, event: on.Event) -> None:
        """The agent has said this to a driver before us."""
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
        """The agent has given itself new credit, beside all that it sends again."""
        self._spill += self._window + SELDOM

    def check(self, header: Mapping[str, Any], body: bytes) -> None:
        """A frame has come that fits its form. Raises BadFrame."""
        kind = header["type"]
        if "bye" in self._had and kind != "pong":  # it answers as long as it waits
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
            case "master_port":
                self._check_port(header["port"])
                self._ports += 1
                if self._ports > self._starts or self._asked["elastic"] is None:
                    raise BadFrame("a port that was not asked for")
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

    def _once(self, what: object, kind: str) -> None:
        if what in self._had:
            raise BadFrame(f"a frame of type {kind} for the second time")
        self._had.add(what)

    def _check_hello(self, header: Mapping[str, Any]) -> None:
        self._once("hello", "hello")
        for name in ("beacon_port", "master_port"):
            if header[name] is not None:
                self._check_port(header[name])
            elif self._asked["ports"] is None:
                raise BadFrame(f"a frame of type hello with no {name}")
        if ("gpus" in header["facts"]) is not self._asked["gpus"]:
            raise BadFrame("a frame of type hello with GPUs that were not asked for, or without")

    def _check_port(self, port: int) -> None:
        within = self._asked["ports"]
        if within is not None and not within[0] <= port <= within[1]:
            raise BadFrame(f"port {port}, which is not in the workers' range")

    def _check_reached(self, header: Mapping[str, Any]) -> None:
        self._once("reached", "reached")
        asked = self._asked["rendezvous"]
        if asked is None:
            raise BadFrame("a frame of type reached that was not asked for")
        candidates = {address for address, _ in asked["candidates"]}
        known = {None, *candidates}
        if header["relay_port"] is not None:
            if asked["relay"] == "never":
                raise BadFrame("a relay that was not asked for")
            self._had.add("relay")
            known = {_LOOPBACK}
        if header["address"] not in known or not candidates.issuperset(header["tried"]):
            raise BadFrame("an address of the rendezvous that it was not told")

    def _check_probed(self, header: Mapping[str, Any]) -> None:
        target, address = (header["target"], header["agent"]), header["address"]
        addresses, answers = self._probes.get(target, _NOT_ASKED)
        self._answers[target] += 1
        if self._answers[target] > answers or (address is not None and address not in addresses):
            raise BadFrame("a frame of type probed that was not asked for")

    def _check_taken(self, slot: int, size: int) -> None:
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
        end = (stream, slot, start)
        if end in self._had:
            raise BadFrame(f"output of slot {slot} behind its end")
        if not body:
            self._had.add(end)
            return
        self._output += len(body) + FRAME_COST
        over = self._output - self._acknowledged - self._window - _CHUNK_COST
        if over > 0:
            self._check_last_output(over)

    def _check_last_output(self, over: int) -> None:
        """At a worker's end, and at its own, the agent sends what the pipes and its file hold, whatever its credit is."""
        chunks = LAST_OUTPUT // OUTPUT_CHUNK + 1
        if over > self._spill + self._workers * _STREAMS * chunks * _CHUNK_COST:
            raise BadFrame("output beyond its credit")


class _Connection:
    """Bytes of both directions. What we have passed on of the agent's, it may send again."""

    def __init__(self) -> None:
        self.arrived = 0
        self.passed_on = 0
        self.sent = 0
        self.taken = 0
        self.is_ended = False


class RelayRules:
    """For one agent. sent() may be called by another thread than heard()."""

    def __init__(self) -> None:
        self._opened = 0
        self._open: dict[int, _Connection] = {}

    def sent(self, header: Mapping[str, Any], size: int) -> None:
        """The agent is about to get this frame, with a body of `size` bytes."""
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
        """The agent has sent this frame. Raises BadFrame."""
        number, what = header["id"], header["what"]
        if what == "open":
            self._opened += 1
            if number != self._opened or len(self._open) >= MOST_RELAYED:
                raise BadFrame("a relayed connection too many")
            self._open[number] = _Connection()
            return
        if number > self._opened:
            raise BadFrame("a relayed connection that was never opened")
        connection = self._open.get(number)
        if connection is None:
            return  # we have closed it, and the agent did not know yet
        match what:
            case "data" | "end":
                connection.arrived += size
                if connection.is_ended or connection.arrived - connection.passed_on > RELAY_WINDOW:
                    raise BadFrame("relayed data beyond its window")
                connection.is_ended = what == "end"
            case "credit":
                connection.taken += header["bytes"]
                if connection.taken > connection.sent:
                    raise BadFrame("credit for more than was relayed")
            case "close":
                self._open.pop(number, None)
