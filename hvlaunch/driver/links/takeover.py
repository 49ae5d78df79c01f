"""What a driver needs that takes a job over: all that was, and the ways to agents that wait."""

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
    """One driver takes the place of another."""

    past: Past
    lost: Callable[[Host], AgentConnection]
    """The connection to a host's agent, which is lost: another can be made in its place."""
    is_same_boot: bool
    """Whether the machine has not started again since: then all is there that was written."""
    shift: float
    """What the new driver's clock has more than the machine's monotonic one."""
    _now: float | None = None
    """While turns are told again: when the one was that is told now."""

    def clock(self) -> float:
        """The driver's clock, which goes on where it was."""
        return time.monotonic() + self.shift

    def wall(self) -> float:
        """The time, in seconds since 1970; that of a past turn while it is told again."""
        return time.time() if self._now is None else self._now

    def turns(self) -> Iterator[tuple[int, PastTurn]]:
        """All past turns, by their numbers."""
        for number, turn in enumerate(self.past.turns):
            self._now = turn.wall
            yield number, turn
        self._now = None

    @property
    def epoch(self) -> int:
        """The new driver's number."""
        return self.past.drivers[-1].epoch + 1

    def check(self, number: int, actions: Sequence[Action]) -> None:
        """That the engine wants the same done at this turn. Raises OtherVersion."""
        turn = self.past.turns[number]
        if digest(actions) != turn.digest:
            cause = f"job {self.past.begin.job_id}: this hvlaunch decides otherwise at turn {number} ({turn.event})"
            raise OtherVersion(cause, hint="the very program that began the job")
