"""An event on its way through the loop, with what it was made of: once it is in the journal, nobody need say that again."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on

__all__ = ["Arrival", "FrameSource", "Turn"]


class FrameSource(Protocol):
    """Whose frame an event was made of: a link."""

    number: int
    """Of the connection to the host, counted over the job."""
    offset: float | None
    """Seconds from the host's clock to the driver's, as far as they are known."""

    hello: Mapping[str, Any]
    """What its agent was greeted with."""

    def settle(self, frame: int) -> None:
        """The agent need not keep this frame any more."""


class Arrival(NamedTuple):
    """An event, and the frame of an agent's, or the change at the rendezvous, that it was made of."""

    event: on.Event
    source: FrameSource | None = None
    frame: int = 0
    """Its number in the lasting stream, from 1."""
    version: int = 0
    """That of the change."""

    def settle(self) -> None:
        """Whoever sent what it was made of need not keep that."""
        if self.source is not None:
            self.source.settle(self.frame)


class Turn(NamedTuple):
    """An event at a time (seconds of the driver's clock), and what the engine made of it."""

    at: float
    arrival: Arrival
    actions: Sequence[do.Action]
    is_decided: bool = True
    """Whether the engine was asked: a journal has no other turns."""
    is_idle: bool = False
    """Whether it has changed nothing but what a Lull has."""
