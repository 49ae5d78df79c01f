"""Clues to a failure besides the worker's own words: hosts with the missing file, and memory in use."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from hvlaunch.engine import events as on

if TYPE_CHECKING:
    from hvlaunch.driver.observing.observation import Observation
    from hvlaunch.report.failure_report import Memory, Missing
    from hvlaunch.telemetry.sample import HostSample

__all__ = ["Clues", "Suspect"]

_LACK = (b"No module named", b"No such file", b"can't open file")
_MEMORY = (b"out of memory", b"OutOfMemory", b"MemoryError", b"bad_alloc", b"allocate memory")
_SIGKILL = 9
_SAMPLED_FOR = 0.5
_LAST_WORDS = 2000


class Suspect(NamedTuple):
    """The worker that seems to have caused a failure."""

    rank: int
    end: on.WorkerExited
    sought: tuple[Literal["module", "file"], str] | None
    """The missing module or file, by the worker's own words."""


class Clues:
    """Collects clues, for the loop's thread.

    `rank_of` returns the rank of a worker, `tail` its last stderr, `observation` the samples of hosts.
    """

    def __init__(
        self,
        rank_of: Callable[[str, int, int], int | None],
        tail: Callable[[int], bytes],
        observation: "Callable[[], Observation]",
    ) -> None:
        self._rank_of = rank_of
        self._tail = tail
        self._observation = observation
        self._failed: list[on.WorkerExited] = []
        self._suspect: Suspect | None = None
        self._sample: HostSample | None = None
        """Sample of the suspect's host from before its end."""
        self._is_sampled = False

    def record_event(self, event: object) -> None:
        """Record an event, before its actions are carried out."""
        if isinstance(event, on.WorkerExited) and event.code != 0:
            self._failed.append(event)

    def find_suspect(self) -> Suspect | None:
        """Find the cause of a failure, just before other workers are killed for it, and have its host's memory measured."""
        failed, self._failed = self._failed, []
        # Workers that failed because of another worker look like consequences: the cause is among the others.
        end = next(
            (candidate for candidate in failed if candidate.look == "cause"), failed[0] if failed else None
        )
        rank = None if end is None else self._rank_of(end.host, end.slot, end.start)
        if end is None or rank is None:
            return self._suspect
        words = self._tail(rank)[-_LAST_WORDS:]
        sought = None
        # A cheap test first: the parser of tracebacks is loaded for these failures only.
        if any(mark in words for mark in _LACK):
            from hvlaunch.report.diagnosis import sought as sought_by  # noqa: PLC0415 (few failures are of this kind)

            sought = sought_by(words.decode(errors="replace"))
        self._suspect = Suspect(rank, end, sought)
        if end.oom_killed or end.signal == _SIGKILL or any(mark in words for mark in _MEMORY):
            self._is_sampled = True
            observation = self._observation()
            # Memory is free again once the process is gone, so an older sample says more than a new one.
            self._sample = next(
                (candidate for candidate in observation.newest() if candidate.host == end.host), None
            )
            observation.keep_on(_SAMPLED_FOR)
        return self._suspect

    def missing(self, has: Mapping[str, bool]) -> "Missing | None":
        """Describe the missing file or module of the suspect; `has` maps hosts to true or false.

        None if the suspect's host has the file after all.
        """
        suspect = self._suspect
        if suspect is None or suspect.sought is None or has.get(suspect.end.host):
            return None
        from hvlaunch.report.failure_report import Missing  # noqa: PLC0415 (as above)

        # Sorted, so that the report does not depend on the order of answers.
        others = sorted(host for host in has if host != suspect.end.host)
        having = tuple(host for host in others if has[host])
        return Missing(*suspect.sought, having, tuple(host for host in others if not has[host]))

    def memory(self) -> "tuple[Memory, ...]":
        """Return the memory in use on the suspect's host and its GPUs. A sample from before its end is preferred."""
        suspect = self._suspect
        if suspect is None or not self._is_sampled:
            return ()
        from hvlaunch.report.failure_report import Memory  # noqa: PLC0415 (as above)

        host = suspect.end.host
        sample = self._sample or next(
            (candidate for candidate in self._observation().newest() if candidate.host == host), None
        )
        if sample is None:
            return ()
        when = sample.time - suspect.end.at
        used = next((worker.gpus for worker in sample.workers if worker.rank == suspect.rank), ())
        gpus = [gpu for gpu in sample.gpus if gpu.index in used or not used]
        return (
            Memory(f"host {host}", sample.memory_used, sample.memory_total, when),
            *(
                Memory(f"GPU {gpu.index} of host {host}", gpu.memory_used, gpu.memory_total, when)
                for gpu in gpus
            ),
        )
