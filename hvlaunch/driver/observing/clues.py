"""What may explain a failure besides the worker's own words: who else has what it did not find, and how much memory there was."""

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
    """A worker that seems to be the cause of a failure."""

    rank: int
    end: on.WorkerExited
    sought: tuple[Literal["module", "file"], str] | None
    """What it did not find, as it said."""


class Clues:
    """For the loop's thread. `rank_of` has the rank of a worker, `tail` its last stderr; `observation` makes hosts measure."""

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
        """Of the suspect's host, from before its end."""
        self._is_sampled = False

    def see(self, event: object) -> None:
        """The next event, before what follows of it is carried out."""
        if isinstance(event, on.WorkerExited) and event.code != 0:
            self._failed.append(event)

    def follow(self) -> Suspect | None:
        """Others are about to be killed for a failure: find its cause, and ask the hosts for what they know."""
        failed, self._failed = self._failed, []
        end = next((one for one in failed if one.look == "cause"), failed[0] if failed else None)
        rank = None if end is None else self._rank_of(end.host, end.slot, end.start)
        if end is None or rank is None:
            return self._suspect
        words = self._tail(rank)[-_LAST_WORDS:]
        sought = None
        if any(mark in words for mark in _LACK):
            from hvlaunch.report.diagnosis import sought as sought_by  # noqa: PLC0415 (few failures are of this kind)

            sought = sought_by(words.decode(errors="replace"))
        self._suspect = Suspect(rank, end, sought)
        if end.oom_killed or end.signal == _SIGKILL or any(mark in words for mark in _MEMORY):
            self._is_sampled = True
            observation = self._observation()
            self._sample = next((one for one in observation.newest() if one.host == end.host), None)
            observation.keep_on(_SAMPLED_FOR)
        return self._suspect

    def missing(self, has: Mapping[str, bool]) -> "Missing | None":
        """What the suspect did not find; `has` tells by host whether it is there. None where its own host has it."""
        suspect = self._suspect
        if suspect is None or suspect.sought is None or has.get(suspect.end.host):
            return None
        from hvlaunch.report.failure_report import Missing  # noqa: PLC0415 (as above)

        others = sorted(host for host in has if host != suspect.end.host)
        there = tuple(host for host in others if has[host])
        return Missing(*suspect.sought, there, tuple(host for host in others if not has[host]))

    def memory(self) -> "tuple[Memory, ...]":
        """What the suspect's host and its GPUs had in use; a sample from before its end counts more."""
        suspect = self._suspect
        if suspect is None or not self._is_sampled:
            return ()
        from hvlaunch.report.failure_report import Memory  # noqa: PLC0415 (as above)

        host = suspect.end.host
        sample = self._sample or next((one for one in self._observation().newest() if one.host == host), None)
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
