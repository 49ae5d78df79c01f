"""Some of the workers, for collectives of their own: the names are Horovod's."""

from __future__ import annotations

from collections.abc import Sequence

from torch import distributed as dist

from hvlaunch.torch.current import world
from hvlaunch.torch.world import World

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


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
