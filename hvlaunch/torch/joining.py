"""join(): workers that have no more data wait for the others, and take part in what these do meanwhile. The name is Horovod's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from hvlaunch.torch.collectives import (
    allgather_async,
    allreduce_async,
    alltoall_async,
    barrier,
    broadcast_async,
)
from hvlaunch.torch.current import world
from hvlaunch.torch.reduction import Op
from hvlaunch.torch.trail import GAP, Step, trail

__all__ = ["join"]


def join(device: int = -1) -> int:
    """Wait until all workers have called it; the rank that did so last. Collective.

    Until then this worker takes part in the functions of hvlaunch.torch on tensors that the others call for all workers: with zeros where
    values are reduced, and with no rows where they are gathered. An average is over all workers, those that have joined too. `device` is
    Horovod's, and not needed.

    Raises RuntimeError where the others wait for a broadcast of this worker's, or are too far ahead.
    """
    del device
    place = world().place
    return place.rank if place.size == 1 else trail().follow(_take_part)


def _take_part(step: Step) -> None:
    _PARTS[step.kind](step)


def _zeros(step: Step) -> torch.Tensor:
    return torch.zeros(step.shape, dtype=step.dtype)


def _no_rows(step: Step) -> torch.Tensor:
    return torch.zeros((0, *step.shape[1:]), dtype=step.dtype)


def _broadcast(step: Step) -> None:
    root = int(str(step.how))
    if root == world().place.rank:
        raise RuntimeError(f"rank {root} has joined, and others wait for its broadcast: call join() after it")
    broadcast_async(_zeros(step), root).wait()


def _gap(_: Step) -> None:
    raise RuntimeError("the others are too many collectives ahead of this worker, which has joined")


_PARTS: Mapping[str, Callable[[Step], object]] = {
    "allreduce": lambda step: allreduce_async(_zeros(step), op=Op.__members__[str(step.how)]).wait(),
    "allgather": lambda step: allgather_async(_no_rows(step)).wait(),
    "alltoall": lambda step: alltoall_async(_no_rows(step), [0] * world().place.size).wait(),
    "broadcast": _broadcast,
    GAP: _gap,
    "barrier": lambda _: barrier(),
}
