"""What faults.py trains: sums over all workers, so that at any time the state shows whether a step was lost or done twice.

soak_training.py DIR: in the process, with Gloo, until DIR/end is there. Every worker tells of each beginning of a round, step and
save in DIR/told.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist

from hvlaunch.torch import current, elastic

COMMIT_EVERY = 8
PAUSE = 0.04
NUMBERS = 1000

Round = list[int]
"""Its number, its first step, and its size."""


class Told:
    """One line for each thing that happens: one write, so that workers can share the file."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def tell(self, what: str, step: int) -> None:
        place = current.world().place
        line = {"what": what, "worker": os.environ["HVLAUNCH_WORKER"], "round": place.round}
        line |= {"size": place.size, "step": step, "at": round(time.monotonic(), 3)}
        os.write(self._fd, f"{json.dumps(line)}\n".encode())


class Sums(elastic.ObjectState):
    """`weight` has, in each of its numbers, the sum of all rounds' steps times size; `rounds` are those that count."""

    def __init__(self, told: Told) -> None:
        super().__init__(step=0, weight=torch.zeros(NUMBERS, dtype=torch.int64), rounds=[])
        self.told = told

    def save(self) -> None:
        super().save()
        self.told.tell("saved", self.step)

    def check_sums(self) -> None:
        """Raises AssertionError where it is not what the steps say."""
        ends = [*(begin for _, begin, _ in self.rounds[1:]), self.step]
        counted = sum((end - begin) * size for (_, begin, size), end in zip(self.rounds, ends, strict=True))
        assert self.weight.eq(counted).all(), (self.weight.unique(), counted, self.rounds)
        assert self.step == self.commits * COMMIT_EVERY, (self.step, self.commits)


@elastic.run
def train(state: Sums, end: Path) -> None:
    if state.rounds:
        state.check_sums()
    place = current.world().place
    state.told.tell("began", state.step)
    state.rounds = [*state.rounds, [place.round, state.step, place.size]]
    while True:
        numbers = torch.cat([torch.ones(NUMBERS, dtype=torch.int64), torch.tensor([int(end.exists())])])
        dist.all_reduce(numbers)
        state.weight = state.weight + numbers[:-1]
        state.step += 1
        state.told.tell("step", state.step)
        if state.step % COMMIT_EVERY == 0:
            state.commit()
            if numbers[-1]:
                break
        time.sleep(PAUSE)
    state.check_sums()
    if place.rank == 0:
        (end.parent / "done").write_text(json.dumps({"step": state.step, "rounds": state.rounds}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    train(Sums(Told(directory / "told")), directory / "end")
