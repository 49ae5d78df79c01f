"""What workers of benchmarks/training.py tell of their steps, and what it says of the rounds that they were in."""

import json
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Run", "Steps", "Worker"]

Worker = tuple[str, int]
"""Host, and pid as it counts."""


@dataclass(slots=True)
class Run:
    """One round's training: when each of its `size` workers did its first and its newest step (CLOCK_MONOTONIC)."""

    number: int
    size: int
    first: dict[Worker, float] = field(default_factory=dict)
    last: dict[Worker, float] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether every rank has done a step."""
        return len(self.first) == self.size

    @property
    def began(self) -> float:
        """When the slowest rank had done its first step."""
        return max(self.first.values())

    def pause(self, before: "Run") -> float:
        """The longest that a worker of both rounds stood still between them."""
        return max(self.first[one] - before.last[one] for one in self.first.keys() & before.last.keys())


class Steps:
    """The file, as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[int, Run] = {}
        self._offset = 0
        self.forget()

    def forget(self) -> None:
        """Begin anew, with an empty file."""
        self.path.write_bytes(b"")
        self.runs, self._offset = {}, 0

    def read(self) -> dict[int, Run]:
        """All rounds so far, by number, in order."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            told = file.read()
        told = told[: told.rfind(b"\n") + 1]
        self._offset += len(told)
        for line in told.splitlines():
            step = json.loads(line)
            run = self.runs.setdefault(step["run"], Run(step["run"], step["size"]))
            worker = step["host"], step["pid"]
            run.first.setdefault(worker, step["at"])
            run.last[worker] = step["at"]
        return self.runs

    def settled(self, size: int, seconds: float) -> Run | None:
        """The newest round, if it is one of `size` workers that have all trained for so long."""
        newest = next(reversed(self.read().values()), None)
        if newest is None or newest.size != size or not newest.is_whole:
            return None
        return newest if min(newest.last.values()) - newest.began >= seconds else None

    def new(self, before: set[int], size: int) -> Run | None:
        """The first round that is none of those before and has `size` workers, once each has done a step."""
        found = (run for number, run in self.read().items() if number not in before)
        return next((run for run in found if run.size == size and run.is_whole), None)
