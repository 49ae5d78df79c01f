"""What a client of the control socket asks the driver's loop."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ["Inquiry"]


class Inquiry(NamedTuple):
    """Asked on the driver's queue, where its loop answers between two events: what the engine knows is the loop's alone."""

    answer: Callable[[Mapping[str, Any]], None]
