"""The life of a worker: its states and transitions. A transition that is not in the table is a defect. Pure.

The form is that of h11's `_state.py`; the story of an InvalidTransition is dask's idea.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from hvlaunch.errors import Defect

__all__ = [
    "ENDING",
    "LIVING",
    "TRANSITIONS",
    "InvalidTransition",
    "Life",
    "Transition",
    "WorkerState",
    "WorkerTrigger",
]

_REMEMBERED = 16


class WorkerState(Enum):
    STARTING = "was started to ask for a place, and has not asked yet"
    WAITING = "has asked for a place, and has none"
    WORKING = "is in a round"
    DISMISSED = "waited for a place; was told that there is none, and to end well"
    STOPPING = "was told to end"
    HANGING = "did not do what it should, and is killed: its end is a failure"
    ENDED = "is no more"


class WorkerTrigger(Enum):
    """Causes of a change of a worker's state."""

    ASKED = "it asked for a place"
    PLACED = "it was given a place in a round"
    TAKEN_BACK = "the first worker asked: so the round that all were started for is still to come"
    DISMISSED = "there is no place for it any more"
    STOPPED = "it is to end"
    HANGS = "it hangs"
    ENDED = "its end was reported"
    LOST = "its host is gone"


_FROM_NOW_ON: Mapping[WorkerTrigger, WorkerState] = {
    WorkerTrigger.STOPPED: WorkerState.STOPPING,
    WorkerTrigger.HANGS: WorkerState.HANGING,
    WorkerTrigger.ENDED: WorkerState.ENDED,
    WorkerTrigger.LOST: WorkerState.ENDED,
}
"""Possible transitions of every worker that was not told to end."""


def _to_the_end(state: WorkerState) -> Mapping[WorkerTrigger, WorkerState]:
    """Return the transitions of a stopped worker, which keeps its state to the end."""
    return {
        WorkerTrigger.STOPPED: state,
        WorkerTrigger.TAKEN_BACK: state,
        WorkerTrigger.ENDED: WorkerState.ENDED,
        WorkerTrigger.LOST: WorkerState.ENDED,
    }


TRANSITIONS: dict[WorkerState, Mapping[WorkerTrigger, WorkerState]] = {
    WorkerState.STARTING: {
        WorkerTrigger.ASKED: WorkerState.WAITING,
        **_FROM_NOW_ON,
    },
    WorkerState.WAITING: {
        WorkerTrigger.ASKED: WorkerState.WAITING,
        WorkerTrigger.PLACED: WorkerState.WORKING,
        WorkerTrigger.DISMISSED: WorkerState.DISMISSED,
        **_FROM_NOW_ON,
    },
    WorkerState.WORKING: {
        WorkerTrigger.ASKED: WorkerState.WAITING,
        WorkerTrigger.TAKEN_BACK: WorkerState.STARTING,
        **_FROM_NOW_ON,
    },
    WorkerState.DISMISSED: _to_the_end(WorkerState.DISMISSED),
    WorkerState.STOPPING: _to_the_end(WorkerState.STOPPING),
    WorkerState.HANGING: _to_the_end(WorkerState.HANGING),
    WorkerState.ENDED: {},
}

LIVING = (WorkerState.STARTING, WorkerState.WAITING, WorkerState.WORKING)
"""States of workers that were not told to end."""
ENDING = (WorkerState.DISMISSED, WorkerState.STOPPING, WorkerState.HANGING)
"""States of workers that were told to end, and have not ended."""


S = TypeVar("S", bound=Enum)
T = TypeVar("T", bound=Enum)


class Transition(NamedTuple):
    """One transition, at `when` (seconds of the driver's clock)."""

    when: float
    before: Enum
    trigger: Enum
    after: Enum


class InvalidTransition(Defect):
    """The table lacks this transition. `name` says whose life it is, `story` has its last transitions."""

    def __init__(
        self, name: str, state: Enum, trigger: Enum, now: float, story: Sequence[Transition]
    ) -> None:
        steps = "; ".join(
            f"{step.when - now:+.2f} s {step.before.name} -{step.trigger.name}-> {step.after.name}"
            for step in story
        )
        super().__init__(
            f"{name} is {state.name}, where {trigger.name} can't come; before: {steps or 'nothing'}"
        )
        self.name = name
        self.state = state
        self.trigger = trigger
        self.story = tuple(story)


class Life(Generic[S, T]):
    """The state of a worker or round, with its last transitions. Only the table's transitions are possible.

    `name` is for messages.
    """

    def __init__(self, name: str, state: S, table: Mapping[S, Mapping[T, S]]) -> None:
        self._name = name
        self._table = table
        self.state = state
        self.story: tuple[Transition, ...] = ()
        """The last transitions, oldest first."""

    def go(self, trigger: T, now: float) -> S:
        """Make the table's transition for the trigger, and return the new state. Raises InvalidTransition."""
        after = self._table[self.state].get(trigger)
        if after is None:
            raise InvalidTransition(self._name, self.state, trigger, now, self.story)
        self.story = (*self.story[1 - _REMEMBERED :], Transition(now, self.state, trigger, after))
        self.state = after
        return after
