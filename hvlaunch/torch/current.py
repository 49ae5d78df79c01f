"""The group of all workers to which this process belongs, and process sets."""

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
    """Do the work of hvlaunch.torch.init() for a place that the environment gives."""
    if _world is not None:
        return
    place = Place.from_environment()
    enter(World.form(place, partial(meet, client=_job_client(place)), backend=backend, timeout=timeout))


def shutdown() -> None:
    """Wait until all workers call it, then leave the group. Collective. Does nothing without a group."""
    if _world is not None:
        _world.leave()
        leave()


def enter(new: World) -> None:
    """Make `new` the process's world: the elastic entry, with a world formed elsewhere."""
    global _world  # noqa: PLW0603 (torch's group is the process', too)
    _world = new


def leave() -> None:
    """Leave the process's world at once, without waiting for peers; the elastic exit from a broken round."""
    global _world  # noqa: PLW0603
    if _world is not None:
        _world.abandon()
    _world = None


def world() -> World:
    """Return the process's world. Raises NotInitialized, like every function below."""
    if _world is None:
        raise NotInitialized
    return _world


def is_world(other: World | None) -> bool:
    """Return True if the process is in this world."""
    return other is not None and other is _world


def is_initialized() -> bool:
    """Return True between init() and shutdown()."""
    return _world is not None


def rank() -> int:
    """Return the worker's number among all workers, from 0. Raises NotInitialized before init()."""
    return world().place.rank


def size() -> int:
    """Return the number of workers. Raises NotInitialized before init()."""
    return world().place.size


def local_rank() -> int:
    """Return the worker's number among the workers of its host, from 0. Raises NotInitialized before init()."""
    return world().place.local_rank


def local_size() -> int:
    """Return the number of workers on this host. Raises NotInitialized before init()."""
    return len(world().local_ranks)


def cross_rank() -> int:
    """Return the worker's number among the workers with its local rank, one per host. Raises NotInitialized before init()."""
    return world().cross_rank


def cross_size() -> int:
    """Return the number of hosts with a worker of this local rank. Raises NotInitialized before init()."""
    return len(world().cross_ranks)


def local_group() -> dist.ProcessGroup:
    """Return the group of this host's workers, for torch's `group=`. Raises NotInitialized before init()."""
    return world().local_group


def cross_group() -> dist.ProcessGroup:
    """Return the group of the workers with this local rank, one per host, for torch's `group=`. Raises NotInitialized before init()."""
    return world().cross_group


def device() -> torch.device:
    """Return the device for this worker's model: its own GPU, or the processor. Raises NotInitialized before init()."""
    return world().device


def _job_client(place: Place) -> Client | None:
    """Return a client of the job's rendezvous; None if hvlaunch did not give this place or no rendezvous is reachable."""
    if place.launcher != "hvlaunch" or place.size == 1:
        return None
    return Client.from_environment() if "HVLAUNCH_RENDEZVOUS" in os.environ else None


class ProcessSet:
    """A set of ranks of the world, in order. It works after add_process_set(), once in each world."""

    def __init__(self, ranks: Sequence[int] | None) -> None:
        """`ranks` None means all ranks."""
        self._ranks = None if ranks is None else tuple(sorted(set(ranks)))
        self._made: tuple[World, dist.ProcessGroup | None] | None = None

    @property
    def is_all(self) -> bool:
        """True for the set of all workers, whatever their number."""
        return self._ranks is None

    @property
    def ranks(self) -> list[int]:
        """The global ranks, in order. Raises NotInitialized for the set of all workers without a world."""
        return list(range(world().place.size)) if self._ranks is None else list(self._ranks)

    def size(self) -> int:
        """Return the number of ranks in the set."""
        return len(self.ranks)

    def rank(self) -> int:
        """Return the worker's number in the set. Raises ValueError for a worker outside the set."""
        return self.ranks.index(world().place.rank)

    def included(self) -> bool:
        """Return True if this worker is in the set."""
        return world().place.rank in self.ranks

    @property
    def group(self) -> dist.ProcessGroup:
        """Torch's group of the set. Raises ValueError if the set was not added in this world, or this worker is outside."""
        if self._ranks is None:
            # For its NotInitialized: torch may have a group that the script has made itself.
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
        """Make the set's group. Collective among all workers. Raises ValueError for ranks that do not exist."""
        if self._ranks is None:
            return
        if not self._ranks or not 0 <= self._ranks[0] <= self._ranks[-1] < world().place.size:
            raise ValueError(f"{self}: the world has the ranks 0 to {world().place.size - 1}")
        # torch gives workers outside the set a marker instead of a group.
        made = dist.new_group(list(self._ranks), timeout=world().timeout)
        self._made = world(), made if isinstance(made, dist.ProcessGroup) else None

    def remove(self) -> bool:
        """End the set's group; return False if there was none. Collective among all workers."""
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
"""The set of all workers."""


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make the group of these ranks. Collective: every worker calls it with the same ranks, also workers outside the set."""
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    added.add()
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """End the group of a set; return False if it was not added. Collective among all workers."""
    return process_set.remove()
