"""Whether a job hangs: all its ranks are silent, and none gets on. Pure: it is told what was measured, and when.

A rank gets on that reads or writes, that computes here and there, or that waits for input. One that computes does not get
on where it stands at one place all the time, in a collective or in a loop of Python: MPI and CUDA wait by
computing. Frames of C tell such a wait from a long call to a library that computes.

Where ranks tell their steps, these alone count: then it is known, and not inferred, whether one gets on.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from hvlaunch.telemetry.sample import HostSample, WorkerSample
from hvlaunch.telemetry.stack import Frame, ProcessStack, main_of
from hvlaunch.telemetry.verdict import Doing, Verdict, doing, is_collective, verdict

__all__ = ["Judge"]

_SILENT_PART = 1 / 4
"""Of the timeout, after which somebody looks."""
_LOOKS = 6
"""Within the timeout."""
_SHORTEST_PAUSE = 0.5
_BUSY = 0.05
"""Cores in use, where there are enough for all."""
_FRESH = 5.0
"""Seconds after which a sample says nothing of now."""
_AWAY = 3
"""Looks in which a host has not answered, or nobody has looked."""
_MOVED = 1 << 16
"""Bytes between two looks."""
_DISK_MOVES = 1 << 18
"""Bytes per second, of a host whose worker waits for a disk."""
_NETWORK_MOVES = 1 << 20
"""The same, for a disk that is elsewhere."""
_LEAST_STACKS = 3
_STEPS = 2
"""How much longer than any before a step may take, if that is more than the timeout."""
_LONGEST_PATIENCE = 5
"""Timeouts."""
_SYNCHRONIZING = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
)
"""How a GPU is waited for, whatever it does."""

_Place: TypeAlias = tuple[tuple[int, str, tuple[Frame, ...]], ...]


@dataclass(slots=True)
class _Rank:
    """What is known of one rank since it was last heard of."""

    host: str
    sample: WorkerSample | None = None
    at: float = 0.0
    is_busy: bool = False
    place: _Place = ()
    looks: int = 0
    """For how many looks in a row it was there, by its stacks, or because it did not compute."""
    stacks: list[ProcessStack] = field(default_factory=list)


class Judge:
    """Judges one job. Times are in seconds of one clock; `timeout` is --hang-timeout."""

    def __init__(self, timeout: float, now: float) -> None:
        self._timeout = timeout
        self._heard = now
        """When the job was last heard of."""
        self._got_on = now
        """When a rank was last seen to get on."""
        self._by_steps = False
        self._patience = timeout
        self._ranks: dict[int, _Rank] = {}
        self._has_said = False
        self._operations: dict[str, int] = {}
        self._looked = now
        self._next = now + timeout * _SILENT_PART

    @property
    def pause(self) -> float:
        """Seconds between two looks."""
        return max(_SHORTEST_PAUSE, self._timeout / _LOOKS)

    @property
    def next_look(self) -> float:
        """When to look, unless something is heard until then."""
        return self._next

    def heard(self, at: float, *, by_steps: bool = False) -> None:
        """A rank has printed, committed, told its progress, begun or ended, or the user has typed something.

        `by_steps`: ranks tell their steps, and are not through with them.
        """
        was_by_steps, self._by_steps = self._by_steps, by_steps
        if at <= self._heard:
            return
        if was_by_steps and by_steps:
            longest = min(_STEPS * (at - self._heard), _LONGEST_PATIENCE * self._timeout)
            self._patience = max(self._patience, longest)
        self._heard = self._got_on = at
        self._ranks.clear()
        self._has_said = False
        self._next = at + self._timeout * _SILENT_PART

    def operations(self, now: float, counts: Mapping[str, int]) -> None:
        """How many operations NCCL has begun, by who counts them: it says that while they go on."""
        if any(count > self._operations.get(name, count) for name, count in counts.items()):
            self._gets_on(now)
        self._operations.update(counts)

    @property
    def has_said(self) -> bool:
        """Whether the job hangs by what is known now."""
        return self._has_said

    def samples(self, now: float, hosts: Iterable[HostSample]) -> frozenset[int]:
        """What was measured. Returns the ranks whose stacks are to be shown to stacks(): those that compute, at first all."""
        is_first = not self._ranks
        known = dict(self._ranks)
        if not is_first and now > self._looked + _AWAY * self.pause:
            self._heard = self._got_on = now  # we were stopped: who knows what happened meanwhile
        self._looked = now
        for host in hosts:
            for worker in host.workers:
                rank = known.get(worker.rank)
                if rank is None or rank.sample is None or rank.sample.pid != worker.pid:
                    rank = _Rank(host.host)
                    self._ranks[worker.rank] = rank
                elif host.time <= rank.at:
                    continue  # its host has not answered since
                elif _has_moved(host, rank.sample, worker):
                    self._gets_on(now)
                rank.is_busy = _is_busy(rank, worker, host)
                if rank.looks and not rank.is_busy:
                    rank.looks += 1  # it has not moved
                rank.sample, rank.at = worker, host.time
        self._next = now + self.pause
        due = self._due
        if now < due < self._next:
            self._next = due
        if due <= now and self._is_late:
            self._next = now + _SHORTEST_PAUSE
        return frozenset(
            number for number, rank in self._ranks.items() if is_first or rank.is_busy or not rank.looks
        )

    def stacks(self, now: float, stacks: Iterable[ProcessStack]) -> None:
        """The stacks that samples() has asked for."""
        for number, found in _by_rank(stacks).items():
            rank = self._ranks.get(number)
            if rank is None:
                continue
            place = _place(found)
            if rank.looks and place != rank.place and rank.is_busy:
                self._gets_on(now)
            rank.looks = rank.looks + 1 if place == rank.place else 1
            rank.place, rank.stacks = place, found

    def is_due(self, now: float) -> bool:
        """Whether it is time for a verdict. The stacks of all are wanted then, with the frames of C of `computing`."""
        return not self._has_said and bool(self._ranks) and now >= self._due and not self._is_late

    @property
    def _is_late(self) -> bool:
        """Whether a host has not answered to the last look, and may still."""
        ages = (self._looked - rank.at for rank in self._ranks.values())
        return any(_FRESH < age <= _AWAY * self.pause for age in ages)

    @property
    def _due(self) -> float:
        return self._heard + self._patience if self._by_steps else self._got_on + self._timeout

    @property
    def computing(self) -> frozenset[int]:
        """Ranks that compute."""
        return frozenset(number for number, rank in self._ranks.items() if rank.is_busy)

    @property
    def steady(self) -> frozenset[int]:
        """Ranks that compute, and were always seen at one place: their frames of C tell more."""
        return frozenset(number for number in self.computing if self._ranks[number].looks >= _LEAST_STACKS)

    def verdict(
        self,
        now: float,
        stacks: Iterable[ProcessStack],
        native: Iterable[ProcessStack] = (),
        *,
        ended: Iterable[int] = (),
        reading: Iterable[int] = (),
        behind: Container[int] = (),
        apart: Mapping[int, str] | None = None,
    ) -> Verdict | None:
        """Whether the job hangs.

        `ended` are ranks that are no more; `reading` those that wait for stdin; `behind` those that have begun fewer of NCCL's
        operations than others; `apart` is as in telemetry.verdict.
        """
        found, deep = _by_rank(stacks), _by_rank(native)
        if any(self._reads(number, found) for number in reading):
            self._gets_on(now)
            return None
        busy = [number for number in self.computing if self._computes(number, found, deep, behind)]
        if busy and not self._by_steps:
            self._gets_on(now)
            return None
        ranks = {
            number: doing(
                _deepest(found.get(number, rank.stacks), deep.get(number, ())),
                rank.sample.state if rank.sample is not None else "",
                is_busy=rank.is_busy,
            )
            for number, rank in self._ranks.items()
        }
        if all(one.how == "computes" for one in ranks.values()) and not self._by_steps:
            self._gets_on(now)
            return None
        self._has_said = True
        if self._operations:  # NCCL's kernels wait on the GPU
            ranks |= {
                number: replace(ranks[number], how="collective")
                for number, frames in deep.items()
                if number in ranks
                and ranks[number].how == "computes"
                and _waits_for_gpu(_busiest(frames, self._ranks[number].sample))
            }
        ranks |= {number: replace(ranks[number], how="works") for number in busy}
        ranks |= {
            number: Doing("unseen") for number, rank in self._ranks.items() if self._looked > rank.at + _FRESH
        }
        ranks |= {number: Doing("ended") for number in ended if number not in ranks}
        since = self._heard if self._by_steps else self._got_on
        hosts = {number: rank.host for number, rank in self._ranks.items()}
        return verdict(now - since, ranks, hosts, apart or {})

    def _gets_on(self, at: float) -> None:
        """As heard(), but that it is known by looking only."""
        if self._by_steps:
            return
        self._got_on = max(self._got_on, at)
        self._has_said = False

    def _reads(self, number: int, found: Mapping[int, Sequence[ProcessStack]]) -> bool:
        """Whether a rank that may read stdin waits for that, by where the kernel holds it."""
        rank = self._ranks.get(number)
        if rank is None or rank.sample is None or rank.is_busy or rank.sample.state != "S":
            return False
        if rank.sample.waits_in is not None:
            return "read" in rank.sample.waits_in
        main = main_of(found[number]) if found.get(number) else None
        return main is None or not main.threads or not is_collective(main.threads[0].frames)

    def _computes(
        self,
        number: int,
        found: Mapping[int, Sequence[ProcessStack]],
        deep: Mapping[int, Sequence[ProcessStack]],
        behind: Container[int],
    ) -> bool:
        """Whether a rank that uses a processor gets on: it is not always at one place, or a library computes there, or its GPU.

        Who is behind, and waits for its GPU, waits for what that computes: not for others.
        """
        rank = self._ranks[number]
        now = found.get(number, rank.stacks)
        if not now or _place(now) != rank.place or rank.looks < _LEAST_STACKS:
            return True
        busiest = _busiest(now, rank.sample)
        if not busiest.is_python or not busiest.threads:
            return True  # a compiler, or any other program
        if is_collective(busiest.threads[0].frames):
            return False
        if number not in deep:
            return not busiest.threads[0].frames[-1].is_own
        shown = _busiest(deep[number], rank.sample)
        if not shown.is_python or _own(shown) != _own(busiest):
            return True  # py-spy was not ready in time, or it is elsewhere by now
        if _waits_for_gpu(shown):
            return number in behind
        frames = shown.threads[0].frames
        return not is_collective(frames) and (not frames or not frames[-1].is_own)


def _waits_for_gpu(stack: ProcessStack) -> bool:
    """By its frames of C."""
    return any(frame.function in _SYNCHRONIZING for thread in stack.threads[:1] for frame in thread.frames)


def _own(stack: ProcessStack) -> Frame | None:
    """The innermost of the user's own frames in its main thread: frames of C may leave no room for the outermost."""
    own = (frame for thread in stack.threads[:1] for frame in reversed(thread.frames) if frame.is_own)
    return next(own, None)


def _by_rank(stacks: Iterable[ProcessStack]) -> dict[int, list[ProcessStack]]:
    found: dict[int, list[ProcessStack]] = {}
    for one in stacks:
        found.setdefault(one.rank, []).append(one)
    return found


def _busiest(stacks: Sequence[ProcessStack], sample: WorkerSample | None) -> ProcessStack:
    """The process that uses the processor; the main one where its stack is not there."""
    return next((one for one in stacks if sample is not None and one.pid == sample.busiest), main_of(stacks))


def _place(stacks: Sequence[ProcessStack]) -> _Place:
    """Where all threads of all its processes are."""
    return tuple(
        (process.pid, thread.name, thread.frames)
        for process in sorted(stacks, key=lambda one: one.pid)
        for thread in process.threads
    )


def _deepest(stacks: Sequence[ProcessStack], native: Sequence[ProcessStack]) -> Sequence[ProcessStack]:
    """The stacks with frames of C, where they tell that a collective is what computes."""
    main = main_of(native) if native else None
    if main is not None and main.threads and is_collective(main.threads[0].frames):
        return native
    return stacks


def _has_moved(host: HostSample, before: WorkerSample, now: WorkerSample) -> bool:
    if now.io - before.io >= _MOVED or now.processes != before.processes:
        return True
    if now.cpu_time < before.cpu_time:
        return True  # a process has ended, and another begun
    return now.state == "D" and (
        host.disk_read + host.disk_write >= _DISK_MOVES
        or host.network_in + host.network_out >= _NETWORK_MOVES
    )


def _is_busy(rank: _Rank, worker: WorkerSample, host: HostSample) -> bool:
    """Whether it uses a processor, or would if it got one."""
    if worker.state == "T":
        return False
    least = _BUSY * min(1.0, host.cores / max(host.load, 1.0))
    if rank.sample is None:
        return worker.cpu >= least
    used = (worker.cpu_time - rank.sample.cpu_time) / (host.time - rank.at)
    return used >= least or worker.state == rank.sample.state == "R"
