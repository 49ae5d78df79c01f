"""What all laws have in common."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.job import JobResult

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Law"]


class Law:
    """Looks on at a world. Raises AssertionError where the law is broken."""

    def __init__(self, world: "ElasticWorld") -> None:
        self.world = world
        self.ledger = world.ledger

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        """The ledger has the event, and not yet the actions."""

    def after(self) -> None:
        """The ledger has both."""

    def end(self, result: JobResult) -> None:
        """The job is over."""
