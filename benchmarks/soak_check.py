"""Whether what the workers of soak.py told is right: how each round began, what was lost, and how long training stood still."""

import bisect
import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Fault", "Soak", "Stood", "Told", "longest", "standstills"]


@dataclass(slots=True)
class Fault:
    """`began` is when it was done, `over` when it was no more; `done` is whether there was something to do it to."""

    kind: str
    host: str
    began: float = 0.0
    over: float = 0.0
    done: bool = False


@dataclass(slots=True)
class Began:
    """A round: the steps and states that its workers began with, and the most that one of them had saved before."""

    steps: set[int] = field(default_factory=set)
    digests: set[str] = field(default_factory=set)
    saved: int = -1
    reached: int = -1
    at: float = 0.0
    """When its last worker began."""


class Told:
    """The file, as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        path.touch()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """What is new."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        return map(json.loads, text.splitlines())


class Soak:
    """What was told so far; `problems` is what is wrong with it."""

    def __init__(self, commit_every: int) -> None:
        self._commit_every = commit_every
        self._saved: dict[str, int] = {}
        self.rounds: dict[int, Began] = {}
        self.step = 0
        """The newest that the newest round has done."""
        self.size = 0
        """Of the newest round that has done a step."""
        self.newest = -1
        self.done = 0
        """Steps in all, those that were lost again included."""
        self.saves = 0
        self.steps: list[float] = []
        """When each of them was done, in the order in which workers told of them."""

    def add(self, lines: Iterable[dict[str, Any]]) -> "Soak":
        for line in lines:
            worker, number, step = line["worker"], line["round"], line["step"]
            began = self.rounds.setdefault(number, Began())
            if line["what"] == "began":
                began.steps.add(step)
                began.at = line["at"]
                began.digests.add(line["digest"])
                began.saved = max(began.saved, self._saved.get(worker, -1))
                self._saved[worker] = step
            elif line["what"] == "saved":
                self._saved[worker] = step
                self.saves += 1
            elif line["what"] == "step":
                if step > began.reached:
                    self.done += 1
                    self.steps.append(line["at"])
                began.reached = max(began.reached, step)
                if number >= self.newest:
                    self.newest, self.step, self.size = number, step, line["size"]
        return self

    @property
    def goodput(self) -> float:
        """Share of the time since the first step in which steps were made that were not done again, by the median time of a step."""
        times = sorted(self.steps)
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return (self.step - 1) * statistics.median(gaps) / (times[-1] - times[0]) if gaps else 0.0

    def lost(self) -> list[tuple[int, float]]:
        """Steps that were done and had to be done again, and when, for each round but the first that got as far as to begin."""
        found = []
        before = None
        for _, began in sorted(self.rounds.items()):
            if not began.steps:
                continue
            if before is not None:
                found.append((before - min(began.steps), began.at))
            before = max(began.reached, min(began.steps))
        return found

    def problems(self) -> list[str]:
        found = []
        for number, began in sorted(self.rounds.items()):
            if len(began.steps) > 1:
                found.append(f"round {number} began at different steps: {sorted(began.steps)}")
            if len(began.digests) > 1:
                found.append(f"round {number} began with {len(began.digests)} different states")
            if began.steps and min(began.steps) < began.saved:
                found.append(
                    f"round {number} began at step {min(began.steps)}, and one of it had saved {began.saved}"
                )
        most, at = max(self.lost(), default=(0, 0.0))
        if most > self._commit_every:
            found.append(
                f"{most} steps were lost at once, with a commit after every {self._commit_every}, before {at:.0f}"
            )
        if min(self.lost(), default=(0, 0.0))[0] < 0:
            found.append("a round began with steps that nobody had done")
        return found


@dataclass(slots=True)
class Stood:
    """How long training stood still at the faults of a kind, in seconds: the whole, and what is beyond the fault's own time."""

    whole: list[float] = field(default_factory=list)
    beyond: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.whole)


def standstills(steps: Sequence[float], faults: Sequence[Fault]) -> dict[str, Stood]:
    """By kind of fault. A fault counts until the next one begins that was not done at the same time."""
    times = sorted(steps)
    starts = sorted(fault.began for fault in faults)
    found: dict[str, Stood] = {}
    for fault in faults:
        later = starts[bisect.bisect_right(starts, max(fault.over, fault.began + 4.0)) :]
        first = max(0, bisect.bisect_left(times, fault.began) - 1)
        last = bisect.bisect_right(times, later[0]) if later else len(times)
        gaps = list(itertools.pairwise(times[first:last])) or [(fault.began, fault.began)]
        stood = found.setdefault(fault.kind, Stood())
        stood.whole.append(max(end - begin for begin, end in gaps))
        stood.beyond.append(max(end - begin - _under_faults(faults, begin, end) for begin, end in gaps))
    return found


def longest(steps: Sequence[float], faults: Sequence[Fault], most: int) -> Iterator[str]:
    """The longest standstills, and the faults from some seconds before on."""
    gaps = sorted(itertools.pairwise(sorted(steps)), key=lambda gap: gap[0] - gap[1])
    for begin, end in gaps[:most]:
        then = [fault for fault in faults if begin - 15.0 <= fault.began <= end]
        names = "; ".join(
            f"{fault.kind}, {fault.host} ({fault.began - begin:+.1f} to {fault.over - begin:+.1f} s)"
            for fault in then
        )
        yield f"{end - begin:.1f} s from {begin:.0f} on: {names}"


def _under_faults(faults: Sequence[Fault], begin: float, end: float) -> float:
    """Seconds of this time in which any fault was there."""
    total, until = 0.0, begin
    for fault in sorted(faults, key=lambda fault: fault.began):
        total += max(0.0, min(end, fault.over) - max(until, fault.began))
        until = max(until, fault.over)
    return total
