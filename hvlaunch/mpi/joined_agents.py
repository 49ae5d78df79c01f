"""The agents of one host's ranks, joined to the one agent that the driver speaks with. Pure: frames in, frames out.

A launcher starts each rank by itself, so each has an agent of its own, whose slot is its place among the host's
ranks. What is about the host is done by the first of them, the leader.
"""

import json
import signal
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hvlaunch.agent.frames import FRAME_COST, BadFrame

if TYPE_CHECKING:
    from hvlaunch.agent.frames import Frame

__all__ = ["JoinedAgents"]

_LEADER = 0
_BY_THE_LAUNCHER = ("got SIG", "its guardian was killed")
_ENDING = (signal.SIGTERM, signal.SIGKILL)
_FOR_THE_LEADER = ("probe", "relay")
_OF_THE_LEADER = ("probed", "relay", "reached")


class JoinedAgents:
    """Sends each of the driver's frames to those whom it concerns, and makes one answer of all agents'."""

    def __init__(self, size: int) -> None:
        """`size` agents, of slots 0 to size - 1."""
        self._size = size
        self._hellos: dict[int, Mapping[str, Any]] = {}
        self._left: dict[int, int] = {}
        self._parted: set[int] = set()
        self._exits_told: set[int] = set()
        """Whose worker's end was told."""
        self.is_ended = False
        """The launcher has ended a worker, or before it was started. Which rank was the cause, if any was, the launcher may tell."""
        self._unprinted: deque[tuple[int, int]] = deque()

    def to_agents(self, header: Mapping[str, Any], body: bytes) -> Iterator[tuple[int, "Frame"]]:
        """Slots, and what is for them, of a frame of the driver's."""
        kind = header["type"]
        if kind == "hello":
            yield _LEADER, (dict(header), body)
            for slot in range(1, self._size):
                yield slot, ({**header, "rendezvous": None}, body)
        elif kind == "start":
            yield from self._start(header, body)
        elif kind == "ack":
            yield from self._credit(header["bytes"])
        else:
            for slot in self._concerned(header):
                yield slot, (dict(header), body)

    def _start(self, header: Mapping[str, Any], body: bytes) -> Iterator[tuple[int, "Frame"]]:
        plan = json.loads(body.decode("ascii"))
        for worker in plan["workers"]:
            own = json.dumps({**plan, "workers": [worker]}).encode("ascii")
            yield worker["slot"], (dict(header), own)

    def _credit(self, size: int) -> Iterator[tuple[int, "Frame"]]:
        """Output is printed in the order in which it came, so the oldest was whose credit this is."""
        shares: dict[int, int] = {}
        while size and self._unprinted:
            slot, waiting = self._unprinted.popleft()
            taken = min(size, waiting)
            size -= taken
            shares[slot] = shares.get(slot, 0) + taken
            if taken < waiting:
                self._unprinted.appendleft((slot, waiting - taken))
        for slot, taken in shares.items():
            yield slot, ({"type": "ack", "bytes": taken}, b"")

    def _concerned(self, header: Mapping[str, Any]) -> list[int]:
        if header["type"] in _FOR_THE_LEADER:
            return [_LEADER]
        if "slot" in header:
            return [header["slot"]]
        slots = header.get("slots")
        return [slot for slot in range(self._size) if slots is None or slot in slots]

    def to_driver(self, slot: int, header: Mapping[str, Any], body: bytes) -> Iterator["Frame"]:
        """What the driver is told of a frame of an agent's. Raises BadFrame for what this agent may not tell."""
        kind = header["type"]
        if header.get("slot", slot) != slot or (slot != _LEADER and kind in _OF_THE_LEADER):
            raise BadFrame(f"a frame of type {kind} of another one's from the agent of slot {slot}")
        if kind == "hello":
            self._hellos[slot] = header
            if len(self._hellos) == self._size:
                yield self._hello(), b""
        elif kind == "bye":
            self._left[slot] = header["left"]
            self.is_ended = self.is_ended or (slot in self._parted and slot not in self._exits_told)
            if len(self._left) == self._size:
                yield {"type": "bye", "left": sum(self._left.values())}, b""
        elif kind == "parting" and header["cause"].startswith(_BY_THE_LAUNCHER):
            self._parted.add(slot)
        elif kind == "exited" and slot in self._parted and header["signal"] in _ENDING:
            self.is_ended = True
        else:
            if kind == "output" and body:
                self._unprinted.append((slot, len(body) + FRAME_COST))
            elif kind == "exited":
                self._exits_told.add(slot)
            yield dict(header), body

    def _hello(self) -> dict[str, Any]:
        """The leader's, with what is wrong at any of them."""
        merged = dict(self._hellos[_LEADER])
        for name in ("cwd_error", "trouble"):
            found = [hello[name] for hello in self._hellos.values() if hello[name] is not None]
            merged[name] = found[0] if found else None
        return merged

    def has_ended(self, slot: int) -> bool:
        """Whether the agent has said bye."""
        return slot in self._left
