"""The judge of hangs, and the wording of its verdict: the waiting ranks, and the ranks to blame. Pure: callers pass samples and times.

A job hangs if all its ranks are silent and no rank makes progress. A rank makes progress if it reads or writes, computes at changing places,
or waits for input. A rank that computes at one place all the time, in a collective or in a loop of Python, does not: MPI and CUDA wait by
computing. Frames of C tell such a wait from a long call to a library that computes.

If ranks report their steps, only the steps count: progress is then reported and not inferred.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from hvlaunch.hosts.parse import fold_ranks
from hvlaunch.telemetry.sample import HostSample, WorkerSample
from hvlaunch.telemetry.stack import Frame, ProcessStack, main_of, where

__all__ = ["Doing", "How", "Judge", "Verdict", "doing", "steps_apart", "verdict"]


How = Literal["collective", "waits", "computes", "works", "stopped", "unseen", "ended"]
"""State of a rank. `collective`: waits for other ranks in a collective. `computes`: computes at one place all the time.
`works`: computes at changing places. `unseen`: its host does not answer.
"""

_PLACES_INSIDE = 3
"""Number of places of children and other threads in the text."""
_MOST_STEPS = 3
"""Number of different steps above which no step is usual."""
_COLLECTIVE_FILES = (
    "torch/distributed/",
    "torch/nn/parallel/",
    "torch/autograd/",
    "hvlaunch/torch/",
    "horovod/",
)
"""Libraries with waits for other ranks. DistributedDataParallel reduces gradients below autograd."""
_COLLECTIVE_CALLS = ("MPI_", "PMPI_", "gloo::", "c10d::", "nccl", "pncclComm")


@dataclass(frozen=True, slots=True)
class Doing:
    """State and place of a rank. `inside` has the places of its children and other threads."""

    how: How
    place: str = ""
    inside: tuple[str, ...] = ()
    apart: str = ""
    """Another difference from most ranks, such as its step."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The job hangs: no rank has made progress for `seconds`."""

    seconds: float
    ranks: tuple[int, ...]
    """The ranks to blame; every rank if no rank stands out."""
    text: str
    """One paragraph about these ranks and the waiting ranks."""


def _is_collective(frames: Sequence[Frame]) -> bool:
    """True if a thread with these frames waits for other ranks."""
    # Only calls below the innermost user frame count: user code may run inside a library's training loop.
    last_own = max((number for number, frame in enumerate(frames) if frame.is_own), default=-1)
    return any(
        frame.short_file.startswith(_COLLECTIVE_FILES) or frame.function.startswith(_COLLECTIVE_CALLS)
        for frame in frames[last_own + 1 :]
    )


def doing(stacks: Sequence[ProcessStack], state: str, *, is_busy: bool) -> Doing:
    """Derive a rank's state from the stacks of its processes and the kernel state of the busiest process."""
    # A host without py-spy may have no stacks: the kernel's state is all there is.
    if not stacks:
        return Doing("stopped" if state == "T" else "waits")
    main = main_of(stacks)
    frames = main.threads[0].frames if main.threads else ()
    place = where(frames)
    others = [
        where(thread.frames)
        for process in stacks
        for number, thread in enumerate(process.threads)
        if not (process is main and number == 0) and not thread.is_helper
    ]
    # The same place in several threads is worth one mention.
    inside = tuple(other for other in dict.fromkeys(others) if other != place)[:_PLACES_INSIDE]
    if state == "T":
        return Doing("stopped", place, inside)
    if _is_collective(frames):
        return Doing("collective", place, inside)
    return Doing("computes" if is_busy else "waits", place, inside)


def verdict(
    seconds: float,
    ranks: Mapping[int, Doing],
    hosts: Mapping[int, str],
    apart: Mapping[int, str],
    *,
    agreed: str = "",
) -> Verdict:
    """Word the verdict on a job without progress.

    `hosts` maps ranks to hosts. `apart` has a difference from most other ranks, for some ranks. `agreed` is the
    collective that all ranks have begun last, if that is known.
    """
    groups = _groups({rank: replace(state, apart=apart.get(rank, "")) for rank, state in ranks.items()})
    # In a healthy job all ranks meet in a collective: a rank that is elsewhere keeps the others waiting.
    odd = [group for group in groups if group[0].how != "collective"]
    if not odd or len(odd) == len(groups):
        # All ranks are in collectives, or none is: steps and NCCL's counts may still tell who is behind.
        odd = [group for group in groups if group[0].apart]
    waiting = [group for group in groups if group not in odd]
    if not odd or not waiting:
        odd, waiting = _apart(groups)
    texts = [_said(state, members, hosts) for state, members in odd]
    if waiting and odd:
        object_ = "it" if sum(len(members) for _, members in odd) == 1 else "them"
        texts += [_waits(state, members, object_) for state, members in waiting]
    elif waiting:
        state, members = waiting[0]
        texts.append(f"all of them wait {_at(state)}" if len(members) > 1 else _said(state, members, hosts))
        if state.how == "collective" and len(members) > 1:
            # All ranks in one collective: the counts of NCCL, if any, have shown no difference.
            dead = "a connection between them may be dead"
            behind = f"{dead}, or one of them is a collective behind"
            texts.append(f"each has begun {agreed}, so {dead}" if agreed else behind)
    culprits = sorted(rank for _, members in (odd or waiting) for rank in members)
    return Verdict(seconds, tuple(culprits), "; ".join(texts))


def _groups(ranks: Mapping[int, Doing]) -> list[tuple[Doing, list[int]]]:
    """Group ranks by state, the smallest group first."""
    by_state: dict[Doing, list[int]] = {}
    for rank, state in ranks.items():
        by_state.setdefault(state, []).append(rank)
    return sorted(by_state.items(), key=lambda group: (len(group[1]), min(group[1])))


def steps_apart(steps: Mapping[int, int]) -> dict[int, str]:
    """Describe ranks whose newest step differs from the majority's; on a tie, the ranks that are behind."""
    counts = Counter(steps.values())
    # Ranks that count different things have no usual step.
    if not 1 < len(counts) <= _MOST_STEPS:
        return {}
    usual = max(counts, key=lambda step: (counts[step], step))
    return {
        rank: f"at step {step}, {'others' if len(counts) > 2 else 'the others'} at {usual}"  # noqa: PLR2004 (two steps)
        for rank, step in steps.items()
        if step != usual
    }


def _apart(
    groups: Sequence[tuple[Doing, list[int]]],
) -> tuple[list[tuple[Doing, list[int]]], list[tuple[Doing, list[int]]]]:
    """Split groups if all or no ranks wait in collectives: the largest group waits for the others, if it waits."""
    # Groups of one size do not show which group waits for which.
    is_even = len(groups) > 1 and len(groups[0][1]) == len(groups[-1][1])
    if is_even or groups[-1][0].how not in ("collective", "waits"):
        return list(groups), []
    return list(groups[:-1]), list(groups[-1:])


def _said(state: Doing, members: Iterable[int], hosts: Mapping[int, str]) -> str:
    members = list(members)
    group_hosts = list(dict.fromkeys(hosts[rank] for rank in members if rank in hosts))
    name = fold_ranks(members) + (f" (host {group_hosts[0]})" if len(group_hosts) == 1 else "")
    many = len(members) > 1
    match state.how:
        case "ended":
            return f"{name} {'have' if many else 'has'} ended"
        case "stopped":
            text = f"{name} {'are' if many else 'is'} stopped (SIGSTOP, or a debugger)" + (
                f" {_at(state)}" if state.place else ""
            )
        case "computes":
            text = f"{name} {'compute' if many else 'computes'} {_at(state)}, always there"
        case "unseen":
            text = f"{name} can't be seen: the host does not answer"
        case "works":
            text = f"{name} {'compute' if many else 'computes'}, now {_at(state)}"
        case _:
            text = f"{name} {'wait' if many else 'waits'} {_at(state)}"
    text += f" ({state.apart})" if state.apart else ""
    return text + (f" [also there: {', '.join(state.inside)}]" if state.inside else "")


def _waits(state: Doing, members: Sequence[int], object_: str) -> str:
    return f"{fold_ranks(members)} {'wait' if len(members) > 1 else 'waits'} for {object_} {_at(state)}"


def _at(state: Doing) -> str:
    return f"in {state.place or 'an unknown place'}"


_SILENT_PART = 1 / 4
"""Part of the timeout before the first look."""
_LOOKS = 6
"""Looks within the timeout."""
_SHORTEST_PAUSE = 0.5
_BUSY = 0.05
"""Cores in use of a busy worker, on a host with enough cores for all."""
_FRESH = 5.0
"""Seconds after which a sample is too old to describe the present."""
_AWAY = 3
"""Looks without an answer of a host, or without any look, after which the past is unknown."""
_MOVED = 1 << 16
"""Bytes of input and output between two looks, at which a rank counts as moving."""
_DISK_MOVES = 1 << 18
"""Bytes per second of a busy local disk, for a worker that waits for a disk."""
_NETWORK_MOVES = 1 << 20
"""Bytes per second of a busy network disk."""
_LEAST_STACKS = 3
_STEPS = 2
"""Factor on the longest step so far: a step may take that long, or the timeout if longer."""
_LONGEST_PATIENCE = 5
"""Timeouts that a long step may take at most."""
_SYNCHRONIZING = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
)
"""Functions that wait for a GPU, whatever the GPU does."""

_Place: TypeAlias = tuple[tuple[int, str, tuple[Frame, ...]], ...]


@dataclass(slots=True)
class _Rank:
    """Knowledge of a rank since the job's last sign of life."""

    host: str
    sample: WorkerSample | None = None
    at: float = 0.0
    is_busy: bool = False
    place: _Place = ()
    looks: int = 0
    """Looks in a row with the rank at `place`, or without computing."""
    stacks: list[ProcessStack] = field(default_factory=list)


class Judge:
    """Judges one job. Times are seconds of one clock; `timeout` is --hang-timeout."""

    def __init__(self, timeout: float, now: float) -> None:
        self._timeout = timeout
        self._heard = now
        """Time of the last sign of life: a line, a commit, a step."""
        self._got_on = now
        """Time of the last progress that a look has seen."""
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
        """Time of the next look, unless the job gives a sign of life before."""
        return self._next

    def heard(self, at: float, *, by_steps: bool = False) -> None:
        """Record a sign of life: a line, a commit, progress, a start, an exit, or typed input.

        `by_steps` is true while ranks report steps and have not finished the last.
        """
        was_by_steps, self._by_steps = self._by_steps, by_steps
        # Threads report in any order: an older sign of life must not move the clock back.
        if at <= self._heard:
            return
        if was_by_steps and by_steps:
            longest = min(_STEPS * (at - self._heard), _LONGEST_PATIENCE * self._timeout)
            # Steps differ: a validation epoch may take longer than any training step before it.
            self._patience = max(self._patience, longest)
        self._heard = self._got_on = at
        self._ranks.clear()
        self._has_said = False
        self._next = at + self._timeout * _SILENT_PART

    def operations(self, now: float, counts: Mapping[str, int]) -> None:
        """Record how many operations NCCL has begun, by host. More operations are progress."""
        if any(count > self._operations.get(name, count) for name, count in counts.items()):
            self._gets_on(now)
        self._operations.update(counts)

    @property
    def got_on_at(self) -> float:
        """Time of the last sign of life or progress. An older report on ranks may be out of date."""
        return max(self._heard, self._got_on)

    @property
    def has_said(self) -> bool:
        """True while the last verdict, a hang, still holds."""
        return self._has_said

    def samples(self, now: float, hosts: Iterable[HostSample]) -> frozenset[int]:
        """Record samples. Return the ranks to take stacks of for stacks(): at first every rank, later the computing ranks."""
        # After a sign of life nothing is known: the first look needs every stack.
        is_first = not self._ranks
        previous = dict(self._ranks)
        if not is_first and now > self._looked + _AWAY * self.pause:
            self._heard = self._got_on = now  # we were stopped: who knows what happened meanwhile
        self._looked = now
        for host in hosts:
            for worker in host.workers:
                rank = previous.get(worker.rank)
                if rank is None or rank.sample is None or rank.sample.pid != worker.pid:
                    rank = _Rank(host.host)
                    self._ranks[worker.rank] = rank
                # A host that has not answered since the last look repeats its sample: that is no news of its workers.
                elif host.time <= rank.at:
                    continue  # its host has not answered since
                elif _has_moved(host, rank.sample, worker):
                    self._gets_on(now)
                rank.is_busy = _is_busy(rank, worker, host)
                # A rank that does not compute can't have moved: no new stack is needed to count this look.
                if rank.looks and not rank.is_busy:
                    rank.looks += 1  # it has not moved
                rank.sample, rank.at = worker, host.time
        self._next = now + self.pause
        due = self._due
        # A due verdict must not wait for the regular look.
        if now < due < self._next:
            self._next = due
        # A late host gets a little time: without its answer the verdict would name its ranks as unseen.
        if due <= now and self._is_late:
            self._next = now + _SHORTEST_PAUSE
        return frozenset(
            number for number, rank in self._ranks.items() if is_first or rank.is_busy or not rank.looks
        )

    def stacks(self, now: float, stacks: Iterable[ProcessStack]) -> None:
        """Record the stacks of the ranks from samples()."""
        for number, rank_stacks in _by_rank(stacks).items():
            rank = self._ranks.get(number)
            if rank is None:
                continue
            place = _place(rank_stacks)
            if rank.looks and place != rank.place and rank.is_busy:
                self._gets_on(now)
            rank.looks = rank.looks + 1 if place == rank.place else 1
            rank.place, rank.stacks = place, rank_stacks

    def is_due(self, now: float) -> bool:
        """True at the time for a verdict, which needs the stacks of all ranks, and native frames of `steady` ranks."""
        return not self._has_said and bool(self._ranks) and now >= self._due and not self._is_late

    @property
    def _is_late(self) -> bool:
        """True if a host has not answered the last look, and may still answer."""
        ages = (self._looked - rank.at for rank in self._ranks.values())
        return any(_FRESH < age <= _AWAY * self.pause for age in ages)

    @property
    def _due(self) -> float:
        return self._heard + self._patience if self._by_steps else self._got_on + self._timeout

    @property
    def computing(self) -> frozenset[int]:
        """Computing ranks."""
        return frozenset(number for number, rank in self._ranks.items() if rank.is_busy)

    @property
    def steady(self) -> frozenset[int]:
        """Computing ranks at a constant place: their native frames tell more."""
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
        agreed: str = "",
    ) -> Verdict | None:
        """Return the verdict if the job hangs.

        `ended` are ranks that have exited; `reading` ranks may wait for stdin; `behind` ranks have begun fewer of NCCL's
        operations than others; `apart` and `agreed` are as in verdict().
        """
        stacks_by_rank, native_by_rank = _by_rank(stacks), _by_rank(native)
        if any(self._reads(number, stacks_by_rank) for number in reading):
            self._gets_on(now)
            return None
        busy = [
            number
            for number in self.computing
            if self._computes(number, stacks_by_rank, native_by_rank, behind)
        ]
        if busy and not self._by_steps:
            self._gets_on(now)
            return None
        ranks = {
            number: doing(
                _deepest(stacks_by_rank.get(number, rank.stacks), native_by_rank.get(number, ())),
                rank.sample.state if rank.sample is not None else "",
                is_busy=rank.is_busy,
            )
            for number, rank in self._ranks.items()
        }
        if all(state.how == "computes" for state in ranks.values()) and not self._by_steps:
            self._gets_on(now)
            return None
        # From here on the job hangs: what remains is the wording of the verdict.
        self._has_said = True
        if self._operations:  # NCCL's kernels wait on the GPU
            ranks |= {
                number: replace(ranks[number], how="collective")
                for number, frames in native_by_rank.items()
                if number in ranks
                and ranks[number].how == "computes"
                and _waits_for_gpu(_busiest(frames, self._ranks[number].sample))
            }
        # With reported steps a busy rank does not prevent the verdict, but the user has to see that it computes.
        ranks |= {number: replace(ranks[number], how="works") for number in busy}
        ranks |= {
            number: Doing("unseen") for number, rank in self._ranks.items() if self._looked > rank.at + _FRESH
        }
        ranks |= {number: Doing("ended") for number in ended if number not in ranks}
        since = self._heard if self._by_steps else self._got_on
        hosts = {number: rank.host for number, rank in self._ranks.items()}
        return verdict(now - since, ranks, hosts, apart or {}, agreed=agreed)

    def _gets_on(self, at: float) -> None:
        """Record inferred progress. Reported steps outrank it."""
        if self._by_steps:
            return
        self._got_on = max(self._got_on, at)
        self._has_said = False

    def _reads(self, number: int, stacks_by_rank: Mapping[int, Sequence[ProcessStack]]) -> bool:
        """True if a rank with access to stdin waits for input, by its kernel function."""
        rank = self._ranks.get(number)
        if rank is None or rank.sample is None or rank.is_busy or rank.sample.state != "S":
            return False
        # Some kernels hide the function (kptr_restrict): the Python frames have to do.
        if rank.sample.waits_in is not None:
            return "read" in rank.sample.waits_in
        main = main_of(stacks_by_rank[number]) if stacks_by_rank.get(number) else None
        return main is None or not main.threads or not _is_collective(main.threads[0].frames)

    def _computes(
        self,
        number: int,
        stacks_by_rank: Mapping[int, Sequence[ProcessStack]],
        native_by_rank: Mapping[int, Sequence[ProcessStack]],
        behind: Container[int],
    ) -> bool:
        """True if a rank that uses a processor makes progress: at changing places, in a library that computes, or by its GPU.

        A rank that is behind and waits for its GPU waits for the GPU's work and not for other ranks.
        """
        rank = self._ranks[number]
        current = stacks_by_rank.get(number, rank.stacks)
        if not current or _place(current) != rank.place or rank.looks < _LEAST_STACKS:
            return True
        busiest = _busiest(current, rank.sample)
        if not busiest.is_python or not busiest.threads:
            return True  # a compiler, or any other program
        if _is_collective(busiest.threads[0].frames):
            return False
        if number not in native_by_rank:
            return not busiest.threads[0].frames[-1].is_own
        native = _busiest(native_by_rank[number], rank.sample)
        if not native.is_python or _own(native) != _own(busiest):
            return True  # py-spy was not ready in time, or it is elsewhere by now
        if _waits_for_gpu(native):
            return number in behind
        frames = native.threads[0].frames
        return not _is_collective(frames) and (not frames or not frames[-1].is_own)


def _waits_for_gpu(stack: ProcessStack) -> bool:
    """True if native frames show a wait for the GPU."""
    return any(frame.function in _SYNCHRONIZING for thread in stack.threads[:1] for frame in thread.frames)


def _own(stack: ProcessStack) -> Frame | None:
    """Innermost frame of user code in the main thread. Native frames may leave no room for the outermost frames."""
    own_frames = (frame for thread in stack.threads[:1] for frame in reversed(thread.frames) if frame.is_own)
    return next(own_frames, None)


def _by_rank(stacks: Iterable[ProcessStack]) -> dict[int, list[ProcessStack]]:
    by_rank: dict[int, list[ProcessStack]] = {}
    for stack in stacks:
        by_rank.setdefault(stack.rank, []).append(stack)
    return by_rank


def _busiest(stacks: Sequence[ProcessStack], sample: WorkerSample | None) -> ProcessStack:
    """Process that uses the processor, or the main process if its stack is missing."""
    return next(
        (stack for stack in stacks if sample is not None and stack.pid == sample.busiest), main_of(stacks)
    )


def _place(stacks: Sequence[ProcessStack]) -> _Place:
    """Return the places of every thread of a rank."""
    return tuple(
        (process.pid, thread.name, thread.frames)
        for process in sorted(stacks, key=lambda stack: stack.pid)
        for thread in process.threads
    )


def _deepest(stacks: Sequence[ProcessStack], native: Sequence[ProcessStack]) -> Sequence[ProcessStack]:
    """Native stacks if they show that the computation is a collective; else the plain stacks."""
    main = main_of(native) if native else None
    if main is not None and main.threads and _is_collective(main.threads[0].frames):
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
    """True for a worker on a processor, or in the queue for a processor."""
    # A stopped process keeps its figures: the last processor time says nothing.
    if worker.state == "T":
        return False
    # On an overloaded host a rank that computes gets less of a core: the threshold shrinks with the load.
    least = _BUSY * min(1.0, host.cores / max(host.load, 1.0))
    if rank.sample is None:
        return worker.cpu >= least
    used = (worker.cpu_time - rank.sample.cpu_time) / (host.time - rank.at)
    return used >= least or worker.state == rank.sample.state == "R"
