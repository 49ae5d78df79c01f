"""What a client of the control socket asks the driver's loop."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hvlaunch.gloo.driver.observation import Observation

__all__ = ["Inquiry", "Observe"]


class Inquiry(NamedTuple):
    """Asked on the driver's queue, where its loop answers between two events: what the engine knows is the loop's alone."""

    answer: Callable[[Mapping[str, Any]], None]


class Observe(NamedTuple):
    """Asked likewise, for what observes the hosts."""

    answer: "Callable[[Observation], None]"
