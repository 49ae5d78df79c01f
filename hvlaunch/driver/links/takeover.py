"""The takeover of a killed driver's job: its past turns, and connections to the waiting agents."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hvlaunch.driver.links.agent_channel import AgentConnection
from hvlaunch.driver.record.journal import OtherVersion, Past, PastTurn, digest
from hvlaunch.engine.actions import Action
from hvlaunch.job import Host

__all__ = ["Takeover"]


@dataclass
class Takeover:
    """A driver's takeover of a job, with the clocks of both drivers."""

    past: Past
    lost: Callable[[Host], AgentConnection]
    """Returns the lost connection to a host's agent, for the session to replace."""
    is_same_boot: bool
    """True if the machine has not booted since: every write of the killed driver is then in its files."""
    shift: float
    """Seconds from the machine's monotonic clock to the new driver's clock."""
    _now: float | None = None
    """The time of the turn under replay; None outside of a replay."""

    def clock(self) -> float:
        """Return the time of the driver's clock, a continuation of the killed driver's."""
        return time.monotonic() + self.shift

    def wall(self) -> float:
        """Return the time in seconds since 1970; during a replay the time of the replayed turn."""
        return time.time() if self._now is None else self._now

    def turns(self) -> Iterator[tuple[int, PastTurn]]:
        """Yield the past turns with their numbers."""
        # Watchers ask for the time, and must get that of the turn.
        for number, turn in enumerate(self.past.turns):
            self._now = turn.wall
            yield number, turn
        self._now = None

    @property
    def epoch(self) -> int:
        """The new driver's number."""
        return self.past.drivers[-1].epoch + 1

    def check(self, number: int, actions: Sequence[Action]) -> None:
        """Check the engine's actions at this turn against the journal. Raises OtherVersion."""
        # Another version, or another Python, may decide otherwise, and would then act on a state that never was.
        turn = self.past.turns[number]
        if digest(actions) != turn.digest:
            cause = f"job {self.past.begin.job_id}: this hvlaunch decides otherwise at turn {number} ({turn.event})"
            raise OtherVersion(cause, hint="the very program that began the job")
