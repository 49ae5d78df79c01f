"""Whether what the workers of faults.py told is right: no worker began a round with less than was saved, and what was lost."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Soak", "Told"]


@dataclass(slots=True)
class Began:
    """A round: the steps that its workers began with, and the most that one of them had saved before."""

    steps: set[int] = field(default_factory=set)
    saved: int = -1
    workers: set[str] = field(default_factory=set)
    reached: int = -1


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

    def add(self, lines: Iterable[dict[str, Any]]) -> "Soak":
        for line in lines:
            worker, number, step = line["worker"], line["round"], line["step"]
            began = self.rounds.setdefault(number, Began())
            if line["what"] == "began":
                began.steps.add(step)
                began.workers.add(worker)
                began.saved = max(began.saved, self._saved.get(worker, -1))
                self._saved[worker] = step
            elif line["what"] == "saved":
                self._saved[worker] = step
            elif line["what"] == "step":
                self.done += step > began.reached
                began.reached = max(began.reached, step)
                if number >= self.newest:
                    self.newest, self.step, self.size = number, step, line["size"]
        return self

    def lost(self) -> list[int]:
        """Steps that were done and had to be done again, for each round but the first that got as far as to begin."""
        found = []
        before = None
        for _, began in sorted(self.rounds.items()):
            if not began.steps:
                continue
            if before is not None:
                found.append(before - min(began.steps))
            before = max(began.reached, min(began.steps))
        return found

    def problems(self) -> list[str]:
        found = []
        for number, began in sorted(self.rounds.items()):
            if len(began.steps) > 1:
                found.append(f"round {number} began at different steps: {sorted(began.steps)}")
            if began.steps and min(began.steps) < began.saved:
                found.append(
                    f"round {number} began at step {min(began.steps)}, and one of it had saved {began.saved}"
                )
        most = max(self.lost(), default=0)
        if most > self._commit_every:
            found.append(f"{most} steps were lost at once, with a commit after every {self._commit_every}")
        if min(self.lost(), default=0) < 0:
            found.append("a round began with steps that nobody had done")
        return found
