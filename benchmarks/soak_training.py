"""What soak.py trains: every sample of every epoch is counted, so that one that was lost, or seen twice, shows at any time.

soak_training.py DIR: in the process, with Gloo, until DIR/end is there. Every worker tells of each beginning of a round, step and
save in DIR/told. SIGUSR1 makes it print where its threads are.
"""

import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist

from hvlaunch.torch import current, elastic

COMMIT_EVERY = 8
BATCH = 4
PAUSE = 0.05
SAMPLES, NUMBERS = 960, 256
DATA = torch.randint(-1000, 1000, (SAMPLES, NUMBERS), generator=torch.Generator().manual_seed(1))
"""Whole numbers: their sums are exact, in any order."""


class Told:
    """One line for each thing that happens: one write, so that workers can share the file."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def tell(self, what: str, step: int, **more: object) -> None:
        place = current.world().place
        line = {"what": what, "worker": os.environ["HVLAUNCH_WORKER"], "round": place.round}
        line |= {"size": place.size, "step": step, "at": round(time.monotonic(), 3), **more}
        os.write(self._fd, f"{json.dumps(line)}\n".encode())


class Sums(elastic.TorchState):
    """`weight` is the sum of all samples that were seen, `seen` how often each was in this epoch, `samples` how many in all."""

    weight: torch.Tensor
    seen: torch.Tensor

    def __init__(self, told: Told) -> None:
        sampler = elastic.ElasticSampler(DATA, pad=False)
        weight = torch.zeros(NUMBERS, dtype=torch.int64)
        seen = torch.zeros(SAMPLES, dtype=torch.int64)
        super().__init__(sampler=sampler, step=0, epoch=0, samples=0, weight=weight, seen=seen)
        self.told = told

    def save(self) -> None:
        super().save()
        self.told.tell("saved", self.step)

    def check_sums(self) -> None:
        """Raises AssertionError where a sample is missing, was seen twice, or is not in the weight."""
        assert self.weight.equal(self.epoch * DATA.sum(0) + self.seen @ DATA), (self.epoch, self.step)
        assert int(self.seen.max()) <= 1, self.seen.unique(return_counts=True)
        assert int(self.seen.sum()) == self.sampler.processed, (self.seen.sum(), self.sampler.processed)
        assert self.samples == self.epoch * SAMPLES + self.sampler.processed
        assert self.step == self.commits * COMMIT_EVERY or self.commits < 0, (self.step, self.commits)

    def digest(self) -> str:
        values = [
            self.step,
            self.epoch,
            self.samples,
            self.sampler.processed,
            *self.weight.tolist(),
            *self.seen.tolist(),
        ]
        return hashlib.sha256(repr(values).encode()).hexdigest()[:16]

    def learn(self, mine: list[int]) -> None:
        """One step: this worker's samples, and those of the others."""
        own = torch.zeros(SAMPLES, dtype=torch.int64)
        own[mine] += 1
        sums = torch.cat([DATA[mine].sum(0), own])
        dist.all_reduce(sums)
        self.weight = self.weight + sums[:NUMBERS]
        self.seen = self.seen + sums[NUMBERS:]
        self.samples += int(sums[NUMBERS:].sum())
        self.sampler.record_batch(0, BATCH)
        if self.sampler.processed == SAMPLES:
            assert self.seen.eq(1).all(), f"epoch {self.epoch}: {self.seen.unique(return_counts=True)}"
            self.seen = torch.zeros_like(self.seen)
            self.epoch += 1
            self.sampler.set_epoch(self.epoch)
        self.step += 1
        self.told.tell("step", self.step)


@elastic.run
def train(state: Sums, end: Path) -> None:
    state.check_sums()
    state.told.tell("began", state.step, digest=state.digest())
    is_over = False
    while not is_over:
        for mine in batches(state.sampler):
            state.learn(mine)
            if state.step % COMMIT_EVERY == 0:
                state.commit()
                if is_over := agreed(end.exists()):
                    break
            time.sleep(PAUSE)
    state.check_sums()
    if dist.get_rank() == 0:
        (end.parent / "done").write_text(json.dumps({"step": state.step, "samples": state.samples}))


def batches(sampler: elastic.ElasticSampler) -> list[list[int]]:
    """Those of this worker for the rest of the epoch; as many as the others have, of which the last may be empty."""
    count = -(-(SAMPLES - sampler.processed) // (BATCH * dist.get_world_size()))
    mine = list(sampler)
    return [mine[BATCH * number : BATCH * (number + 1)] for number in range(count)]


def agreed(is_so: bool) -> bool:
    """Whether it is so for any worker."""
    flag = torch.tensor([int(is_so)])
    dist.all_reduce(flag)
    return bool(flag)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    train(Sums(Told(directory / "told")), directory / "end")
