"""Observing a job: requests to the loop, which answers them between two events. Only its thread may look at the engine."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.driver.observing.observation import Observation
    from hvlaunch.engine.events import MoveWanted
    from hvlaunch.job import CollectOptions
    from hvlaunch.telemetry.stack import ProcessStack

__all__ = ["CollectWanted", "Collector", "Inquiry", "MoveRequest", "Observe", "StacksWanted"]


class Inquiry(NamedTuple):
    """A request for the overview of the job."""

    answer: Callable[[Mapping[str, Any]], None]


class Observe(NamedTuple):
    """A request for the object that has the samples of the hosts."""

    answer: "Callable[[Observation], None]"


class MoveRequest(NamedTuple):
    """A user's request to move a host's workers."""

    event: "MoveWanted"
    answer: Callable[[str | None], None]
    """Called once, with the reason of a refusal, or None if the move begins."""


class StacksWanted(NamedTuple):
    """A request for the stacks of workers."""

    answer: "Callable[[list[ProcessStack]], None]"
    """Called once, from any thread."""
    ranks: tuple[range, ...] | None = None
    """Ranks to take stacks of, or None for every rank."""
    native: bool = False
    """Include the frames of C and C++."""


class CollectWanted(NamedTuple):
    """A request for files of the workers."""

    answer: Callable[[Mapping[str, Any]], None]
    """Called once, from any thread."""
    options: "tuple[CollectOptions, ...]"
    """The files, or nothing for the files of `--collect`."""


class Collector(Protocol):
    """Brings files of the workers back."""

    def release(self, link: "HostLink", directory: str, then: Callable[[], None]) -> None:
        """Collect the files of `--collect` from a host; call `then` at the end, in any thread."""

    def collect(self, hosts: "Sequence[tuple[HostLink, str]]", request: CollectWanted) -> None:
        """Collect files of running workers' hosts. The hosts come with the workers' directories."""
