"""What a client of the control socket asks the driver's loop."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hvlaunch.driver.observing.observation import Observation
    from hvlaunch.telemetry.stack import ProcessStack

__all__ = ["Inquiry", "Observe", "StacksWanted"]


class Inquiry(NamedTuple):
    """Asked on the driver's queue, where its loop answers between two events: what the engine knows is the loop's alone."""

    answer: Callable[[Mapping[str, Any]], None]


class Observe(NamedTuple):
    """Asked likewise, for what observes the hosts."""

    answer: "Callable[[Observation], None]"


class StacksWanted(NamedTuple):
    """Somebody wants to know what workers are doing."""

    answer: "Callable[[list[ProcessStack]], None]"
    """Called once, from any thread."""
    ranks: tuple[range, ...] | None = None
    """None is all."""
    native: bool = False
    """With the frames of C and C++."""
