"""What the nodes of one torchrun job know in common: who trains in the newest round, and who waits for the next.

Every function here takes the state that the server has and returns the one that it should have instead: the
same, where there is nothing to change. "Node" is torchrun's word: one torchrun, most often one per host.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Literal

__all__ = ["JobState", "Limits", "Outcome", "decode", "encode", "ended", "formed", "joined", "left"]

Outcome = Literal["", "done", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How many nodes a round has (`--nnodes`), and for how many seconds one waits for them."""

    min_nodes: int
    max_nodes: int
    join: float = 600.0
    """For a place in a round; a spare waits for as long as the job runs."""
    last_call: float = 30.0
    """From when min_nodes are there, for more to come; in a job's first round only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """One moment of a job. Nodes are named `ADDRESS/PID/RANDOM`."""

    epoch: str
    """Names this job among those that have used its run id."""
    round: int = -1
    """The newest; -1 before the first."""
    placed: tuple[str, ...] = ()
    """The newest round's nodes in order of rank, as it was formed."""
    active: tuple[str, ...] = ()
    """Those of them that are still in it: a round that lacks one is over."""
    waiting: tuple[str, ...] = ()
    """The nodes that want a place in the next round, in order of arrival."""
    outcome: Outcome = ""
    """How the job ended; "" while it has not."""
    cause: str = ""
    """The node that ended it."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """All that are there."""
        return self.active + self.waiting

    @property
    def running(self) -> bool:
        """Whether the newest round has all its nodes."""
        return bool(self.placed) and self.active == self.placed

    def calls_back(self, node: str, max_nodes: int) -> int:
        """How many nodes this one, which trains, shall leave the newest round for; 0 to go on training."""
        if self.outcome:
            return int(self.outcome == "failed")
        if node not in self.active or not self.running:
            return max(1, len(self.waiting))
        return len(self.waiting) if len(self.placed) < max_nodes else 0


def encode(state: JobState) -> bytes:
    """As JSON: unlike the state of torch's own backends, it is never unpickled."""
    return json.dumps(asdict(state)).encode()


def decode(data: bytes) -> JobState:
    """Raises ValueError for what encode() has not made."""
    try:
        fields = json.loads(data)
        for name in ("placed", "active", "waiting"):
            fields[name] = tuple(fields[name])
        return JobState(**fields)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no state of a job: {data[:80]!r}") from error


def joined(state: JobState | None, node: str, epoch: str) -> JobState:
    """The node waits for the next round, and has left the one that it was in.

    Where nobody is there any more, this is the first node of a new job, named epoch.
    """
    if state is None or not state.nodes:
        return JobState(epoch=epoch, waiting=(node,))
    if state.outcome or node in state.waiting:
        return state
    return replace(left(state, [node]), waiting=(*state.waiting, node))


def left(state: JobState, nodes: Collection[str]) -> JobState:
    """The nodes are gone."""
    return replace(
        state,
        active=tuple(node for node in state.active if node not in nodes),
        waiting=tuple(node for node in state.waiting if node not in nodes),
    )


def ended(state: JobState, outcome: Outcome, cause: str) -> JobState:
    """The job has ended; the first word on how stands."""
    return state if state.outcome else replace(state, outcome=outcome, cause=cause)


def formed(state: JobState, limits: Limits) -> JobState:
    """The next round, of those who wait, once all have left the newest one and enough wait.

    Who had a place keeps it, and the order of ranks, so that rank 0 is a survivor where there is one. New
    nodes follow in order of their names, numbers by value; where there are too many, first come, first served.
    """
    if state.outcome or state.active or len(state.waiting) < limits.min_nodes:
        return state
    ranks = {node: rank for rank, node in enumerate(state.placed)}
    new = len(ranks)
    first = sorted(state.waiting, key=lambda node: ranks.get(node, new))[: limits.max_nodes]
    placed = tuple(sorted(first, key=lambda node: (ranks.get(node, new), _natural(node))))
    rest = tuple(node for node in state.waiting if node not in placed)
    return replace(state, round=state.round + 1, placed=placed, active=placed, waiting=rest)


def _natural(node: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", node)]
