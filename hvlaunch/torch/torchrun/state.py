"""The shared state of one torchrun job, and a node's way to a place in its next round, without I/O, clock or thread.

Every function takes the server's state and returns the state that should replace it; an equal state changes nothing. "Node" is
torchrun's word for one torchrun, usually one per host.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Literal

__all__ = [
    "Barrier",
    "BarrierStep",
    "Ended",
    "FormRound",
    "JobState",
    "JoinWaiting",
    "Late",
    "NodeLimits",
    "NodePlace",
    "Outcome",
    "WaitForChange",
    "decode",
    "encode",
    "ended",
    "formed",
    "joined",
    "left",
]


Outcome = Literal["", "done", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """Number of nodes of a round (`--nnodes`), and the seconds to wait for them."""

    min_nodes: int
    max_nodes: int
    join: float = 600.0
    """Longest wait for a place in a round; a spare waits as long as the job runs."""
    last_call: float = 30.0
    """Wait for more nodes once min_nodes have come; in a job's first round only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A job at one moment. A node's name is `ADDRESS/PID/RANDOM`."""

    epoch: str
    """Distinguishes this job from others with its run id."""
    round: int = -1
    """Number of the newest round; -1 before the first."""
    placed: tuple[str, ...] = ()
    """The newest round's nodes in order of rank, as it was formed."""
    active: tuple[str, ...] = ()
    """Nodes still in the newest round; a round that lacks a node is over."""
    waiting: tuple[str, ...] = ()
    """Nodes that want a place in the next round, in order of arrival."""
    outcome: Outcome = ""
    """How the job ended; "" while it runs."""
    cause: str = ""
    """The node that ended the job."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Every present node."""
        return self.active + self.waiting

    @property
    def running(self) -> bool:
        """True while the newest round has every node."""
        return bool(self.placed) and self.active == self.placed

    def calls_back(self, node: str, max_nodes: int) -> int:
        """Return the number of nodes for whose sake this training node should leave the round; 0 to continue."""
        if self.outcome:
            return int(self.outcome == "failed")
        if node not in self.active or not self.running:
            return max(1, len(self.waiting))
        return len(self.waiting) if len(self.placed) < max_nodes else 0


def encode(state: JobState) -> bytes:
    """Return the state as JSON. Unlike the state of torch's own backends, it is never unpickled."""
    return json.dumps(asdict(state)).encode()


def decode(data: bytes) -> JobState:
    """Return the state of encode()'s result. Raises ValueError for other input."""
    try:
        fields = json.loads(data)
        for name in ("placed", "active", "waiting"):
            fields[name] = tuple(fields[name])
        return JobState(**fields)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no state of a job: {data[:80]!r}") from error


def joined(state: JobState | None, node: str, epoch: str) -> JobState:
    """Add the node to the waiting ones and remove it from its round. Without other nodes it begins a new job, named `epoch`."""
    if state is None or not state.nodes:
        return JobState(epoch=epoch, waiting=(node,))
    if state.outcome or node in state.waiting:
        return state
    return replace(left(state, [node]), waiting=(*state.waiting, node))


def left(state: JobState, nodes: Collection[str]) -> JobState:
    """Remove the nodes."""
    return replace(
        state,
        active=tuple(node for node in state.active if node not in nodes),
        waiting=tuple(node for node in state.waiting if node not in nodes),
    )


def ended(state: JobState, outcome: Outcome, cause: str) -> JobState:
    """End the job; the first call decides the outcome."""
    return state if state.outcome else replace(state, outcome=outcome, cause=cause)


def formed(state: JobState, limits: NodeLimits) -> JobState:
    """Form the next round of the waiting nodes, once the newest round is empty and enough nodes wait.

    A node of the last round keeps its place and the order of ranks, so rank 0 is a survivor if any. New nodes follow in order of
    their names, with numbers compared by value; if too many wait, the first to arrive get a place.
    """
    if state.outcome or state.active or len(state.waiting) < limits.min_nodes:
        return state
    ranks = {node: rank for rank, node in enumerate(state.placed)}
    new = len(ranks)
    first = sorted(state.waiting, key=lambda node: ranks.get(node, new))[: limits.max_nodes]
    placed = tuple(sorted(first, key=lambda node: (ranks.get(node, new), _natural(node))))
    others = tuple(node for node in state.waiting if node not in placed)
    return replace(state, round=state.round + 1, placed=placed, active=placed, waiting=others)


def _natural(node: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", node)]


@dataclass(frozen=True, slots=True)
class JoinWaiting:
    """Add this node to the waiting ones."""


@dataclass(frozen=True, slots=True)
class FormRound:
    """Form the next round of the waiting nodes."""


@dataclass(frozen=True, slots=True)
class WaitForChange:
    """Ask again after a change of the state, or at `until`."""

    until: float | None = None


@dataclass(frozen=True, slots=True)
class NodePlace:
    """The node's place in a new round."""

    epoch: str
    round: int
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The job has ended."""

    outcome: Outcome
    cause: str


@dataclass(frozen=True, slots=True)
class Late:
    """The time to join is over, and only `came` have come."""

    came: tuple[str, ...]


BarrierStep = JoinWaiting | FormRound | WaitForChange | NodePlace | Ended | Late


class Barrier:
    """The way from a node's arrival to its place: call next() after each change, and follow its answer.

    last: the node's previous place, if any. Times are seconds of this node's monotonic clock; clocks of different nodes are never
    compared.
    """

    def __init__(self, node: str, limits: NodeLimits, last: NodePlace | None = None) -> None:
        self._node = node
        self._limits = limits
        self._last = last
        self._arrived: float | None = None
        self._called: float | None = None

    def next(self, state: JobState | None, now: float, *, alive: bool = False) -> BarrierStep:
        """Return the next step. alive: True if another node of the state has sent a heartbeat since this node began to look."""
        if state is None:
            return JoinWaiting()
        if state.outcome:
            return self._at_the_end(state, alive=alive)
        if self._node in state.active and self._is_new(state):
            rank = state.placed.index(self._node)
            return NodePlace(state.epoch, state.round, rank, len(state.placed))
        if self._node not in state.waiting:
            return JoinWaiting()
        return self._waiting(state, now)

    def _is_new(self, state: JobState) -> bool:
        last = self._last
        return last is None or (last.epoch, last.round) != (state.epoch, state.round)

    def _at_the_end(self, state: JobState, *, alive: bool) -> BarrierStep:
        """Return True if the end belongs to this node's job: to a participant always, to a new node only while the job's nodes live.

        Otherwise an earlier job with this run id has ended, and its nodes were killed before they could leave.
        """
        took_part = self._last is not None and self._last.epoch == state.epoch
        if took_part or alive or self._node in state.nodes:
            return Ended(state.outcome, state.cause)
        return WaitForChange() if state.nodes else JoinWaiting()

    def _waiting(self, state: JobState, now: float) -> BarrierStep:
        limits = self._limits
        if state.running and len(state.placed) >= limits.max_nodes:  # a spare: this can last
            self._arrived = self._called = None
            return WaitForChange()
        self._arrived = now if self._arrived is None else self._arrived
        deadline = self._arrived + limits.join
        if state.active or len(state.waiting) < limits.min_nodes:
            self._called = None
            return WaitForChange(deadline) if now < deadline else Late(state.waiting)
        self._called = now if self._called is None else self._called
        deadline = min(deadline, self._called + limits.last_call)
        survivors = any(node in state.placed for node in state.waiting)
        if survivors or len(state.waiting) >= limits.max_nodes or now >= deadline:
            return FormRound()
        return WaitForChange(deadline)
