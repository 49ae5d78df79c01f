"""The loop's access to observing: samples, stacks, progress and the hang watch of a job's hosts.

Most jobs take no stacks and no samples; the modules for both are loaded when first needed.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvlaunch.driver.links.links import HostLinks
from hvlaunch.driver.observing.clues import Clues
from hvlaunch.driver.observing.hang_watch import HangWatch
from hvlaunch.driver.observing.observers import Observers
from hvlaunch.driver.observing.progress import Progress
from hvlaunch.driver.observing.requests import Inquiry, Observe, StacksWanted
from hvlaunch.engine.actions import Action, TakeStacks
from hvlaunch.engine.engine import Engine
from hvlaunch.engine.events import Event
from hvlaunch.job import JobSpec
from hvlaunch.rendezvous.serving.server import RendezvousServer
from hvlaunch.watch.rounds import Ranks

if TYPE_CHECKING:
    from hvlaunch.driver.observing.observation import Observation
    from hvlaunch.driver.observing.stacks import Stacks
    from hvlaunch.report.failure_report import Memory, Missing
    from hvlaunch.telemetry.stack import ProcessStack

__all__ = ["Observing"]

_PREPARE_AFTER = 5.0
"""Seconds after the first workers were started. Shorter jobs use only the stack tools that their hosts have."""


class Observing:
    """Observes a job, for the loop's thread. `post` puts events and requests on the loop's queue.

    `reading` returns the ranks with access to stdin, `tail` the last stderr of a rank. `say` prints a message.
    """

    def __init__(
        self,
        spec: JobSpec,
        links: HostLinks,
        ranks: Ranks,
        engine: Engine,
        rendezvous: RendezvousServer,
        directory: Path | None,
        post: Callable[[Event | Inquiry | Observe | StacksWanted], None],
        clock: Callable[[], float],
        *,
        reading: Callable[[], Collection[int]],
        tail: Callable[[int], bytes],
        say: Callable[[str], None],
    ) -> None:
        self._cwd = spec.cwd
        self._directory = directory
        self._engine = engine
        self._post = post
        self._clock = clock
        # Only an elastic job says at once what its workers did before they were stopped: other jobs have a report for it.
        self._say = None if spec.elastic is None else say
        self._observers = Observers(lambda: links, ranks.rank_of, clock)
        self.clues = Clues(ranks.rank_of, tail, lambda: self.observation)
        self.progress = Progress(rendezvous, lambda *worker: ranks.rank_of(*worker) is not None, clock)
        self.hang_watch = HangWatch(
            spec.hang_timeout,
            links,
            ranks,
            self.progress,
            reading,
            post,
            self._observers,
            clock,
            say=say,
        )
        self._stacks: Stacks | None = None
        self._is_prepared = False

    @cached_property
    def observation(self) -> "Observation":
        """The samples of the hosts; no host is asked before the first subscriber."""
        from hvlaunch.driver.observing.observation import Observation  # noqa: PLC0415 (for jobs that are watched)

        return Observation(self._observers, self._cwd, self._clock)

    def take_stacks(self, request: StacksWanted) -> None:
        """Take the stacks of workers as requested, and pass them to its `answer`."""
        self._loaded_stacks().take(request.ranks, request.answer, native=request.native)

    def prepare_stacks(self) -> None:
        """Have hosts prepared to take stacks soon, once workers are being started."""
        if not self._is_prepared:
            self._is_prepared = True
            prepare = Inquiry(lambda _state: self._loaded_stacks().prepare())
            # The agenda's thread must not touch the stacks: the request brings the call back to the loop.
            self._observers.at(self._clock() + _PREPARE_AFTER, lambda: self._post(prepare))

    def take_stacks_before_kill(self, event: Event, actions: Sequence[Action]) -> None:
        """Take the stacks of workers before a kill, if the actions order a kill."""
        self.clues.record_event(event)
        # The kill waits for these stacks, a fraction of a second at most.
        takes = [action for action in actions if isinstance(action, TakeStacks)]
        if takes:
            suspect = self.clues.find_suspect()
            sought = None if suspect is None else suspect.sought
            self._loaded_stacks().take_before_kill(
                takes, self._engine.workers, self._post, self._say_summary, sought
            )

    def stacks_before_kill(self) -> "Sequence[ProcessStack]":
        """Return the stacks of the workers that were killed last for a failure."""
        return () if self._stacks is None else self._stacks.before_kill()

    def missing(self) -> "Missing | None":
        """Return the missing module or file of the last failure, with the hosts that have it."""
        return None if self._stacks is None else self.clues.missing(self._stacks.has)

    def memory(self) -> "tuple[Memory, ...]":
        """Return the memory that hosts had at the last failure."""
        return self.clues.memory()

    def overview(self) -> Mapping[str, Any]:
        """Return the state of the job now, as data."""
        from hvlaunch.watch.overview import overview  # noqa: PLC0415 (for jobs that are asked)

        return overview(self._engine, self._clock(), self.progress.of)

    def _loaded_stacks(self) -> "Stacks":
        if self._stacks is None:
            from hvlaunch.driver.observing.stacks import Stacks  # noqa: PLC0415 (for jobs whose stacks are taken)

            self._stacks = Stacks(self._observers, self._directory)
        return self._stacks

    def _say_summary(self, stacks: "Sequence[ProcessStack]") -> None:
        if self._say is not None and stacks:
            from hvlaunch.telemetry.stack import summary  # noqa: PLC0415 (after a failure)

            self._say(f"before they were stopped: {summary(stacks)}")
