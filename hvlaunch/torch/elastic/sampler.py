"""The samples of each worker, when the number of workers changes in the middle of an epoch."""

import math
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import distributed as dist
from torch.utils.data import Sampler

__all__ = ["ElasticSampler"]


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class ElasticSampler(Sampler[int]):
    """Divides the samples of an epoch that are not recorded yet among the workers of the round.

    All workers go through the samples in one order, which depends only on `seed` and the epoch; each takes every
    size-th sample. So the samples that are done are always the beginning of that order, and one number counts them.
    Each iteration begins after the samples that record_batch() has recorded, with the ranks of that moment: no sample
    is lost or repeated because the number of workers changed.

    The last samples of an epoch can seldom be divided by the number of workers. With `pad`, workers that would have
    one sample less get an early sample of the rest again, so that all have as many (collectives need that); without
    it, some have one less, and every sample comes exactly once. `place` returns rank and size; by default those of
    torch's process group.
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int = 0,
        *,
        pad: bool = True,
        place: Callable[[], tuple[int, int]] = _place,
    ) -> None:
        self.epoch = 0
        """The epoch that set_epoch() has begun."""
        self.processed = 0
        """How many samples of this epoch are done, by all workers together."""
        self._total = len(dataset)
        self._shuffle = shuffle
        self._seed = seed
        self._pad = pad
        self._place = place
        self._begin = 0

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. In the current epoch, recorded samples stay recorded.

        So it may be called before an epoch, as with torch, or after one, as with Horovod.
        """
        if epoch != self.epoch:
            self.epoch = epoch
            self.processed = self._begin = 0

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002 (Horovod's users pass it)
        """Note that every worker has done a batch of `batch_size` samples; the last one may be shorter."""
        _, size = self._place()
        self.processed = min(self._total, self.processed + batch_size * size)

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many of its samples are done; the same on all workers."""
        return {"epoch": self.epoch, "processed": self.processed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the epoch of a state_dict(), and on behind the samples that are done in it."""
        self.epoch = int(state["epoch"])
        self.processed = self._begin = int(state["processed"])

    def __iter__(self) -> Iterator[int]:
        self._begin = self.processed
        rank, size = self._place()
        rest = self._order()[self._begin :]
        missing = -len(rest) % size
        if self._pad and missing and len(rest):
            rest = torch.cat([rest, rest.repeat(-(-missing // len(rest)))[:missing]])
        return iter(rest[rank::size].tolist())

    def __len__(self) -> int:
        """How many samples the current iteration, or the next, has for this worker."""
        rank, size = self._place()
        rest = self._total - self._begin
        return math.ceil((rest if self._pad else max(0, rest - rank)) / size)

    def _order(self) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._total)
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        return torch.randperm(self._total, generator=generator)
