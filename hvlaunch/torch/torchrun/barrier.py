"""One node's way to a place in the next round, without I/O, clock or thread."""

from __future__ import annotations

from dataclasses import dataclass

from hvlaunch.torch.torchrun.state import JobState, NodeLimits, Outcome

__all__ = [
    "Barrier",
    "BarrierStep",
    "Ended",
    "FormRound",
    "JoinWaiting",
    "Late",
    "NodePlace",
    "WaitForChange",
]


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
