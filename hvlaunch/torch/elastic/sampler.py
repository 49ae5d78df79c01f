"""Each worker's samples when the number of workers changes within an epoch."""

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
    """Divides the unrecorded samples of an epoch among the workers of the round.

    All workers share one order of the samples, which depends only on `seed` and the epoch; each worker takes every size-th sample.
    Therefore finished samples are always the beginning of that order, and a single number counts the finished samples. Each
    iteration begins after the samples that record_batch() has recorded, with the ranks of that moment: no sample is lost or
    repeated because the number of workers changed.

    The last samples of an epoch can seldom be divided by the number of workers. With `pad`, workers with one sample less repeat an
    early remaining sample, since collectives need equal numbers. Without `pad`, every sample comes exactly once. `place` returns rank
    and size; the default asks torch's process group.
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
        """Number of samples of this epoch that all workers together have finished."""
        self._total = len(dataset)
        self._shuffle = shuffle
        self._seed = seed
        self._pad = pad
        self._place = place
        self._begin = 0

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch. Within the current epoch, recorded samples stay recorded.

        The call may come before an epoch, as with torch, or after one, as with Horovod.
        """
        if epoch != self.epoch:
            self.epoch = epoch
            self.processed = self._begin = 0

    def record_batch(self, batch_idx: int, batch_size: int) -> None:  # noqa: ARG002 (Horovod's users pass it)
        """Record that every worker has finished a batch of `batch_size` samples; the last batch may be shorter."""
        _, size = self._place()
        # Padding repeats samples, so the sum can exceed the total in the last batch.
        self.processed = min(self._total, self.processed + batch_size * size)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of finished samples, equal on all workers."""
        return {"epoch": self.epoch, "processed": self.processed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the epoch of a state_dict(), after its finished samples."""
        self.epoch = int(state["epoch"])
        self.processed = self._begin = int(state["processed"])

    def __iter__(self) -> Iterator[int]:
        self._begin = self.processed
        rank, size = self._place()
        remaining = self._order()[self._begin :]
        missing = -len(remaining) % size
        if self._pad and missing and len(remaining):
            remaining = torch.cat([remaining, remaining.repeat(-(-missing // len(remaining)))[:missing]])
        return iter(remaining[rank::size].tolist())

    def __len__(self) -> int:
        """Return this worker's number of samples in the current or next iteration."""
        rank, size = self._place()
        remaining = self._total - self._begin
        return math.ceil((remaining if self._pad else max(0, remaining - rank)) / size)

    def _order(self) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._total)
        # A generator of its own: the order must depend on seed and epoch alone, and the script's stays untouched.
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        return torch.randperm(self._total, generator=generator)
