"""The group of all workers that this process is in, and process sets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
from torch import distributed as dist

from hvlaunch.rendezvous.client import Client
from hvlaunch.torch.group_errors import NotInitialized
from hvlaunch.torch.meeting import meet
from hvlaunch.torch.place import Place
from hvlaunch.torch.world import World

__all__ = [
    "ProcessSet",
    "add_process_set",
    "cross_group",
    "cross_rank",
    "cross_size",
    "device",
    "enter",
    "global_process_set",
    "init",
    "is_initialized",
    "is_world",
    "leave",
    "local_group",
    "local_rank",
    "local_size",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
    "world",
]

_world: World | None = None


def init(backend: str | None = None, timeout: timedelta | None = None) -> None:
    """As hvlaunch.torch.init(), of a place that the environment has."""
    if _world is not None:
        return
    place = Place.from_environment()
    enter(World.form(place, partial(meet, client=_job_client(place)), backend=backend, timeout=timeout))


def shutdown() -> None:
    """Wait until all workers call it, then leave the group. Collective. Without a group it does nothing."""
    if _world is not None:
        _world.leave()
        leave()


def enter(new: World) -> None:
    """Make this the process' world: the elastic way in, with a world formed elsewhere."""
    global _world  # noqa: PLW0603 (torch's group is the process', too)
    _world = new


def leave() -> None:
    """End the process' world at once, whatever others do; the elastic way out of a round that broke."""
    global _world  # noqa: PLW0603
    if _world is not None:
        _world.abandon()
    _world = None


def world() -> World:
    """The process' world. Raises NotInitialized, as all functions below do."""
    if _world is None:
        raise NotInitialized
    return _world


def is_world(one: World | None) -> bool:
    """Whether the process is in this one."""
    return one is not None and one is _world


def is_initialized() -> bool:
    """Whether the process is between init() and shutdown()."""
    return _world is not None


def rank() -> int:
    """The worker's number among all workers, from 0. Raises NotInitialized before init()."""
    return world().place.rank


def size() -> int:
    """How many workers there are. Raises NotInitialized before init()."""
    return world().place.size


def local_rank() -> int:
    """The worker's number among the workers of its host, from 0. Raises NotInitialized before init()."""
    return world().place.local_rank


def local_size() -> int:
    """How many workers its host has. Raises NotInitialized before init()."""
    return len(world().local_ranks)


def cross_rank() -> int:
    """The worker's number among the workers with its local rank, one on each host. Raises NotInitialized before init()."""
    return world().cross_rank


def cross_size() -> int:
    """How many hosts have a worker with this local rank. Raises NotInitialized before init()."""
    return len(world().cross_ranks)


def local_group() -> dist.ProcessGroup:
    """The workers of this host, for torch's `group=`. Raises NotInitialized before init()."""
    return world().local_group


def cross_group() -> dist.ProcessGroup:
    """The workers with this one's local rank, one on each host, for torch's `group=`. Raises NotInitialized before init()."""
    return world().cross_group


def device() -> torch.device:
    """The device for this worker's model: its own GPU, or the processor. Raises NotInitialized before init()."""
    return world().device


def _job_client(place: Place) -> Client | None:
    """None where hvlaunch did not give this place, or told nobody on this host where the rendezvous is."""
    if place.launcher != "hvlaunch" or place.size == 1:
        return None
    return Client.from_environment() if "HVLAUNCH_RENDEZVOUS" in os.environ else None


class ProcessSet:
    """These ranks of the world, in order; it is of use once add_process_set() has been called with it, in each world anew."""

    def __init__(self, ranks: Sequence[int] | None) -> None:
        """None is all ranks."""
        self._ranks = None if ranks is None else tuple(sorted(set(ranks)))
        self._made: tuple[World, dist.ProcessGroup | None] | None = None

    @property
    def is_all(self) -> bool:
        """Whether it is all workers, however many there are."""
        return self._ranks is None

    @property
    def ranks(self) -> list[int]:
        """The global ranks, in order. Raises NotInitialized where it is all, and there is no world."""
        return list(range(world().place.size)) if self._ranks is None else list(self._ranks)

    def size(self) -> int:
        """How many ranks are in it."""
        return len(self.ranks)

    def rank(self) -> int:
        """The worker's number in it. Raises ValueError where it is not in it."""
        return self.ranks.index(world().place.rank)

    def included(self) -> bool:
        """Whether this worker is in it."""
        return world().place.rank in self.ranks

    @property
    def group(self) -> dist.ProcessGroup:
        """Torch's group of it. Raises ValueError where it was not added in this world, or this worker is not in it."""
        if self._ranks is None:
            world()
            if dist.group.WORLD is None:
                raise ValueError("torch.distributed has no default group")
            return dist.group.WORLD
        if self._made is None or self._made[0] is not world():
            raise ValueError(f"{self} was not added: every worker calls add_process_set() with it")
        if self._made[1] is None:
            raise ValueError(f"rank {world().place.rank} is not in {self}")
        return self._made[1]

    def add(self) -> None:
        """Make its group. Collective among all workers. Raises ValueError for ranks that there are not."""
        if self._ranks is None:
            return
        if not self._ranks or not 0 <= self._ranks[0] <= self._ranks[-1] < world().place.size:
            raise ValueError(f"{self}: the world has the ranks 0 to {world().place.size - 1}")
        made = dist.new_group(list(self._ranks), timeout=world().timeout)
        self._made = world(), made if isinstance(made, dist.ProcessGroup) else None

    def remove(self) -> bool:
        """End its group; whether there was one. Collective among all workers."""
        if self._made is None or self._made[0] is not world():
            return False
        _, group = self._made
        self._made = None
        if group is not None:
            dist.destroy_process_group(group)
        return True

    def __repr__(self) -> str:
        return "ProcessSet(all ranks)" if self._ranks is None else f"ProcessSet({list(self._ranks)})"


global_process_set = ProcessSet(None)
"""All workers."""


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make the group of these ranks. Collective: all workers call it with the same ranks, those that are not in it too."""
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    added.add()
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """End the group of a set; False where it was not added. Collective among all workers."""
    return process_set.remove()
