"""Observing a job: requests to the loop, which answers them between two events. Only its thread may look at the engine."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hvlaunch.driver.observing.observation import Observation
    from hvlaunch.telemetry.stack import ProcessStack

__all__ = ["Inquiry", "Observe", "StacksWanted"]


class Inquiry(NamedTuple):
    """A request for the overview of the job."""

    answer: Callable[[Mapping[str, Any]], None]


class Observe(NamedTuple):
    """A request for the object that has the samples of the hosts."""

    answer: "Callable[[Observation], None]"


class StacksWanted(NamedTuple):
    """A request for the stacks of workers."""

    answer: "Callable[[list[ProcessStack]], None]"
    """Called once, from any thread."""
    ranks: tuple[range, ...] | None = None
    """Ranks to take stacks of, or None for every rank."""
    native: bool = False
    """Include the frames of C and C++."""
