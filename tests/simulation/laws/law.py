"""What all laws share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.job import JobResult

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Law"]


class Law:
    """Watches a world. Raises AssertionError if the law is broken."""

    def __init__(self, world: "ElasticWorld") -> None:
        self.world = world
        self.ledger = world.ledger

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        """Check a turn: the ledger has the event, but not the actions yet."""

    def after(self) -> None:
        """Check after a turn: the ledger has event and actions."""

    def end(self, result: JobResult) -> None:
        """Check the end of the job."""
