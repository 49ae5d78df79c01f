"""A worker's way through the rounds of an elastic job: ask, join, train, leave, and again."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
from torch import distributed as dist
from torch.distributed import Store

from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.client_errors import WaitTimeout
from hvlaunch.rendezvous.round_messages import Grant, worker_of
from hvlaunch.torch import current
from hvlaunch.torch.elastic.escape import Baggage, Escape, can_start_over, start_over, unpack
from hvlaunch.torch.elastic.interruptions import CollectiveFailed, WorkersChanged
from hvlaunch.torch.elastic.membership import Membership, patiently
from hvlaunch.torch.elastic.sockets import GroupSockets
from hvlaunch.torch.elastic.state import State
from hvlaunch.torch.group_errors import RanksMissing, RankZeroGone, RankZeroMissing, StoreUnreachable
from hvlaunch.torch.meeting import meet
from hvlaunch.torch.place import Place
from hvlaunch.torch.world import World

__all__ = ["Training"]

T = TypeVar("T")

_LOOK = 2.0
"""Seconds between looks whether a round broke, while rank 0's address is waited for."""
_DOUBT = 1.0
"""Seconds for the driver to say whether a round is broken, where an error does not tell."""
_PEERS_FAILED = (
    CollectiveFailed,
    RanksMissing,
    RankZeroMissing,
    RankZeroGone,
    StoreUnreachable,
    dist.DistError,
)


class Training:
    """Trains `state` in round after round, as the driver places this worker."""

    def __init__(self, client: Client, membership: Membership, state: State) -> None:
        self._client = client
        self._membership = membership
        self._state = state
        self._sockets = GroupSockets()
        self._is_first_training = membership.last_round < 0
        """Whoever starts over comes to its first training first."""

    def run(self, train: Callable[[], T]) -> T:
        """What train() returns in the round that it is done in.

        Raises Dismissed, RendezvousError, and what train() raises for reasons of its own.
        """
        cause = self._resume()
        while True:
            self._membership.ask(self._state.commits, cause)
            first = self._membership.last_round < 0
            grant = self._membership.grant()
            try:
                return self._train_in(grant, train, first=first)
            except WorkersChanged:
                cause = None
            except CollectiveFailed as failed:
                cause = str(failed)
                self._state.restore()

    def _resume(self) -> str | None:
        """Why this process has started over, if it has; then the state is what it took along."""
        baggage = unpack() if self._is_first_training else None
        if baggage is None:
            return None
        self._membership.last_round = baggage.last_round
        self._state.take_over(baggage.commits, baggage.saved)
        return baggage.cause

    def _start_over(self, round_number: int) -> None:
        """Where the process can't be replaced, the driver ends it after --reset-timeout."""
        notice = self._membership.broken(round_number, 0.0)
        if notice is None or not self._is_first_training or not can_start_over():
            return
        self._membership.finish()  # it is silent until it is back
        try:
            start_over(Baggage(round_number, *self._state.hand_over(), notice.cause))
        except Exception as error:  # noqa: BLE001 (whatever pickling the user's objects raises)
            sys.stderr.write(f"hvlaunch: can't start over: {type(error).__name__}: {error}\n")
            self._membership.start()

    def _train_in(self, grant: Grant, train: Callable[[], T], *, first: bool) -> T:
        """One round. Raises CollectiveFailed where it broke, whatever that raised here, and as run()."""
        self._sockets.release()  # a new round is made when all have left the last one
        self._sockets = GroupSockets()
        with Escape(
            partial(_end_collectives, self._sockets), partial(self._start_over, grant.round)
        ) as escape:
            self._membership.enter(grant.round, escape.begin)
            return self._train_among(grant, train, first=first)

    def _train_among(self, grant: Grant, train: Callable[[], T], *, first: bool) -> T:
        try:
            with self._sockets.watch():
                current.enter(World.form(self._place(grant), self._meet))
            self._membership.met()
            self._state.attach(_TrainedRound(self._membership))
            if not first:
                self._state.on_reset()
            self._state.sync()
            result = train()
            current.shutdown()
        except WorkersChanged:
            raise
        except Exception as error:
            # While our groups stand: once they are gone, the others fail because of us, and the round breaks in any case.
            cause = self._why_left(grant.round, error)
            if cause is None:
                raise
            raise CollectiveFailed(cause) from error
        finally:
            self._state.attach(None)
            self._membership.leave()
            current.leave()
        return result

    def _why_left(self, round_number: int, error: Exception) -> str | None:
        """What broke the round, where it was not this worker; None where it was."""
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        if isinstance(error, _PEERS_FAILED) or _is_groups(error):
            return text
        is_doubtful = isinstance(error, RuntimeError)  # torch's word for nearly all that can go wrong
        return text if is_doubtful and self._membership.broken(round_number, _DOUBT) else None

    def _place(self, grant: Grant) -> Place:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
            if grant.interface is not None:
                os.environ[name] = grant.interface
        return Place(
            rank=grant.rank,
            size=grant.size,
            local_rank=grant.local_rank,
            slot=worker_of(os.environ["HVLAUNCH_WORKER"])[1],
            host=os.environ["HVLAUNCH_HOST"],
            launcher="hvlaunch",
            round=grant.round,
            master_addr=grant.master_addr,
        )

    def _meet(self, place: Place, timeout: timedelta) -> Store:
        return meet(place, timeout, _RoundPost(self._client, self._membership, place.round))


class _TrainedRound:
    """See TrainedRound."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def committed(self, commits: int) -> None:
        self._membership.committed(commits)

    def check(self) -> None:
        changing = torch.tensor([int(self._membership.is_changing)], device=current.world().carrier)
        dist.all_reduce(changing, dist.ReduceOp.MAX)
        if changing.item():
            raise WorkersChanged("workers come or go")


class _RoundPost:
    """The rendezvous for meet(): nobody waits there for a round that is broken."""

    def __init__(self, client: Client, membership: Membership, round_number: int) -> None:
        self._client = client
        self._membership = membership
        self._round = round_number

    def put(self, scope: str, key: str, value: bytes) -> None:
        patiently(lambda: self._client.put(scope, key, value))

    def wait(self, scope: str, key: str, timeout: float) -> bytes:
        deadline = time.monotonic() + timeout
        while self._membership.broken(self._round, 0.0) is None:
            left = min(_LOOK, max(deadline - time.monotonic(), 0.0))
            with suppress(WaitTimeout):
                return patiently(partial(self._client.wait, scope, key, left))
            if time.monotonic() >= deadline:
                raise RankZeroMissing(timeout)
        raise CollectiveFailed("the round broke before rank 0 published its address")


def _end_collectives(sockets: GroupSockets) -> None:
    """Let every collective of this process end now."""
    if dist.is_initialized() and dist.get_backend() == dist.Backend.NCCL:
        # The only way to end NCCL's kernels. Without a group, torch 2.6 aborts no group but the global one.
        dist.distributed_c10d._abort_process_group(dist.group.WORLD)  # noqa: SLF001
    sockets.shut_down()


def _is_groups(error: Exception) -> bool:
    """Whether a RuntimeError comes from Gloo, which has no class of its own."""
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo/" in text or "Gloo" in text)
