"""The world that this process is in now, and the functions of a training script that need it."""

from __future__ import annotations

import os
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
    "cross_group",
    "cross_rank",
    "cross_size",
    "device",
    "enter",
    "init",
    "is_initialized",
    "is_world",
    "leave",
    "local_group",
    "local_rank",
    "local_size",
    "rank",
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
