"""What the loop has to do with stacks. Most jobs take none, and do not load what takes them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvlaunch.driver.observing.clues import Clues
from hvlaunch.driver.observing.inquiry import Inquiry, StacksWanted
from hvlaunch.driver.observing.observers import Observers
from hvlaunch.engine.actions import Action, TakeStacks
from hvlaunch.engine.engine import Engine
from hvlaunch.engine.events import Event, StacksTaken

if TYPE_CHECKING:
    from hvlaunch.driver.observing.stacks import Stacks
    from hvlaunch.report.failure_report import Missing
    from hvlaunch.telemetry.stack import ProcessStack

__all__ = ["StackTaking"]

_PREPARE_AFTER = 5.0
"""Seconds after the first workers were started. Shorter jobs need no more than what is on their hosts."""


class StackTaking:
    """For the loop's thread alone. `say` gets what an elastic job's workers did before they were stopped: it has no report."""

    def __init__(
        self,
        observers: Observers,
        directory: Path | None,
        engine: Engine,
        post: Callable[[StacksTaken | Inquiry], None],
        say: Callable[[str], None] | None,
        clues: Clues,
    ) -> None:
        self._observers = observers
        self._directory = directory
        self._engine = engine
        self._post = post
        self._say = say
        self.clues = clues
        self._stacks: Stacks | None = None
        self._is_prepared = False

    def take(self, wanted: StacksWanted) -> None:
        """Somebody wants to know."""
        self._made().take(wanted.ranks, wanted.answer, native=wanted.native)

    def prepare(self, now: float) -> None:
        """Workers are started: soon hosts are brought what stacks are taken with."""
        if not self._is_prepared:
            self._is_prepared = True
            prepare = Inquiry(lambda _state: self._made().prepare())
            self._observers.at(now + _PREPARE_AFTER, lambda: self._post(prepare))

    def carry_out(self, event: Event, actions: Sequence[Action]) -> None:
        """Workers are about to be killed, where there is a TakeStacks among the actions that followed the event."""
        self.clues.see(event)
        takes = [action for action in actions if isinstance(action, TakeStacks)]
        if takes:
            suspect = self.clues.follow()
            sought = None if suspect is None else suspect.sought
            self._made().take_before_kill(takes, self._engine.workers, self._post, self._tell, sought)

    def before_kill(self) -> "Sequence[ProcessStack]":
        """What the workers were doing that were killed last for a failure."""
        return () if self._stacks is None else self._stacks.before_kill()

    def missing(self) -> "Missing | None":
        """What the cause of the last failure did not find, and who has it."""
        return None if self._stacks is None else self.clues.missing(self._stacks.has)

    def _made(self) -> "Stacks":
        if self._stacks is None:
            from hvlaunch.driver.observing.stacks import Stacks  # noqa: PLC0415 (when somebody asks, or a worker has failed)

            self._stacks = Stacks(self._observers, self._directory)
        return self._stacks

    def _tell(self, found: "Sequence[ProcessStack]") -> None:
        if self._say is not None and found:
            from hvlaunch.telemetry.merge import summary  # noqa: PLC0415 (after a failure)

            self._say(f"before they were stopped: {summary(found)}")
