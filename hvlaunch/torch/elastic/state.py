"""The state that workers of an elastic job share, commit and restore, and the sampler that divides an epoch's samples among them."""

import copy
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import distributed as dist
from torch.utils.data import Sampler

from hvlaunch.torch import current
from hvlaunch.torch.group_errors import WorkersChanged
from hvlaunch.torch.kept import BackgroundKeeper, Parts, Version
from hvlaunch.torch.sharing import TensorSpec, join, split

__all__ = [
    "ElasticSampler",
    "ObjectState",
    "Snapshot",
    "State",
    "TorchState",
    "TrainedRound",
    "receive",
    "send",
    "take",
]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A value as a skeleton and its tensors; see hvlaunch.torch.sharing."""

    skeleton: Any
    tensors: Sequence[torch.Tensor]


def take(value: Any) -> Snapshot:
    """Return a copy of the value; tensors stay on their devices."""
    skeleton, tensors = split(value)
    return Snapshot(copy.deepcopy(skeleton), [tensor.detach().clone() for tensor in tensors])


_BUCKET = 64 << 20
"""Bytes per message: large enough for full speed, small beside the model."""


def send(snapshot: Snapshot, group: dist.ProcessGroup, device: torch.device) -> None:
    """Send the snapshot to the group's other workers, which call receive(). Collective.

    `device` is a device whose tensors the group's backend accepts.
    """
    root = dist.get_rank()
    specs = [TensorSpec.of(tensor) for tensor in snapshot.tensors]
    dist.broadcast_object_list([snapshot.skeleton, specs], root, group=group, device=device)
    for bucket in _buckets(snapshot.tensors):
        flat = torch.cat([tensor.reshape(-1).to(device) for tensor in bucket])
        dist.broadcast(flat.view(torch.uint8), root, group=group)


def receive(root: int, group: dist.ProcessGroup, device: torch.device) -> Snapshot:
    """Receive the snapshot of the worker with global rank `root`. Collective. Tensors keep their kind of device."""
    parts: list[Any] = [None, None]
    dist.broadcast_object_list(parts, root, group=group, device=device)
    skeleton, specs = parts
    tensors = [spec.empty() for spec in specs]
    for bucket in _buckets(tensors):
        flat = torch.empty(sum(map(torch.numel, bucket)), dtype=bucket[0].dtype, device=device)
        dist.broadcast(flat.view(torch.uint8), root, group=group)
        for tensor, piece in zip(
            bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True
        ):
            tensor.copy_(piece.view(tensor.shape))
    return Snapshot(skeleton, tensors)


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield runs of tensors of one dtype, equal on every worker, without empty tensors."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    # cat() needs one dtype. dicts keep their order, so all ranks build equal buckets without talking.
    for alike in by_dtype.values():
        bucket: list[torch.Tensor] = []
        size = 0
        for tensor in alike:
            if bucket and size + tensor.nbytes > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


class TrainedRound(Protocol):
    """A state's connection to the round of its training; run() makes it."""

    number: int

    def committed(self, commits: int) -> None:
        """Report a commit to the driver as progress."""
        ...

    def see_whole(self) -> None:
        """Raise CollectiveFailed if results of earlier collectives may be garbage: an aborted collective does not fail on a GPU."""
        ...

    def check(self) -> None:
        """Raise WorkersChanged on all workers at once if workers come or leave. Collective; raises as see_whole() does."""
        ...


class State:
    """Base of all states: when to save, and how to react when workers come or leave.

    A subclass returns the saved value from `collect()` and restores it in `apply()`. A subclass of Horovod's kind instead has its own
    `save()`, `restore()` and `sync()`; rank 0 is then a worker of the earlier round.
    """

    def __init__(self, bcast_object: object = None, get_rank: object = None) -> None:
        """bcast_object and get_rank exist for Horovod's scripts; hvlaunch ignores both."""
        del bcast_object, get_rank
        self.commits = -1
        """The number of the last commit; -1 before the first."""
        self._synced_in = -1
        """The newest round in which this worker has had the newest state."""
        self._saved: Snapshot | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._round: TrainedRound | None = None
        self._keeper: BackgroundKeeper | None = None

    def collect(self) -> Any:
        """Return everything to save: tensors, plain values, dicts and lists."""
        raise NotImplementedError

    def apply(self, value: Any) -> None:
        """Restore the result of collect(), perhaps another worker's."""
        raise NotImplementedError

    def commit(self) -> None:
        """Save, then check whether workers come or leave. Collective: every worker calls it at the same step.

        Raises WorkersChanged and CollectiveFailed, which run() catches.
        """
        if self._round is not None:
            self._round.see_whole()
        begun = time.monotonic()
        self._save_and_count()
        if self._round is not None:
            self._keep(time.monotonic() - begun)
            self._round.committed(self.commits)
            self._round.check()

    def check_host_updates(self) -> None:
        """Check whether workers come or leave, and save only in that case. Collective; raises as commit() does."""
        if self._round is not None:
            try:
                self._round.check()
            except WorkersChanged:
                begun = time.monotonic()
                self._save_and_count()
                self._keep(time.monotonic() - begun)
                raise

    def _save_and_count(self) -> None:
        """Save and count one commit, also if a subclass has its own save(), which does not count."""
        # A subclass's save() may or may not call ours, which counts; the commit counts once either way.
        next_commit = self.commits + 1
        self.save()
        self.commits = max(self.commits, next_commit)

    def _keep(self, delayed: float) -> None:
        """Write the commit to this host's memory, where it outlives the worker, in the background. `delayed`: seconds of save()."""
        if self._keeper is not None and self._saved is not None:
            self._keeper.keep(self.commits, (self._saved.skeleton, self._saved.tensors), delayed)

    def save(self) -> None:
        """Keep a copy of everything, on the same devices. The earlier copy stays until the new copy is complete."""
        self._saved = take(self.collect())
        self.commits += 1

    def restore(self) -> None:
        """Return to the last saved state. Gradients are not saved and are dropped."""
        if self._saved is not None:
            copies = [tensor.clone() for tensor in self._saved.tensors]  # an optimizer keeps what it is given
            self.apply(join(self._saved.skeleton, copies))

    def sync(self) -> None:
        """Send the newest saved state to workers without it. Collective.

        The first worker with the most commits sends; workers with as many commits keep their own state. If no worker has saved anything,
        the newest commit in the hosts' memory counts, and without one rank 0 sends.

        Raises NotInitialized if torch's group was not made by init().
        """
        self._share()
        if self._round is not None:
            self._synced_in = self._round.number

    def _share(self) -> None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            if self._saved is None and not self._take_kept():
                self.save()
            return
        device = current.world().carrier
        # The round counts before the commits: others may have gone on without a silent host, and made its last commits anew.
        versions = list(zip(_gathered(self._synced_in, device), _gathered(self.commits, device), strict=True))
        newest = max(versions)
        if newest[1] < 0 and self._take_kept():
            return
        root = versions.index(newest)
        lacking = [
            rank for rank, have in enumerate(versions) if rank != root and (have < newest or have[1] < 0)
        ]
        if dist.get_rank() == root and self._saved is None:
            self.save()
        if lacking and dist.get_rank() in (root, *lacking):
            self._transfer(root, lacking, device)
        self.commits = max(newest[1], 0)

    def _take_kept(self) -> bool:
        """Take over the newest whole commit in the memory of hosts; return False without one. Collective.

        Workers of its hosts load the commit, and the others receive it.
        """
        if self._keeper is None:
            return False
        tried: set[Version] = set()
        while True:
            versions = zip(*map(_gathered, self._keeper.newest(tried)), strict=True)
            newest = max(versions)
            if newest < (0, 0):
                return self._take_saved()
            tried.add(newest)
            parts = self._keeper.state.load(newest)
            is_here = _gathered(parts is not None)
            # A corrupt copy is no copy. If no other one is whole, the version before it counts.
            if any(is_here):
                break
        self._take_parts(newest[1], parts, is_here)
        return True

    def _take_saved(self) -> bool:
        """Take over the newest whole commit in the directory of --save-to; return False if there is none. Collective."""
        # Rank 0 alone reads: each host would read the same bytes of the same disk.
        is_reader = not dist.is_initialized() or dist.get_rank() == 0
        restored = self._keeper.load_saved() if is_reader and self._keeper is not None else None
        commits = max(_gathered(-1 if restored is None else restored[0][1]))
        if commits < 0:
            return False
        if restored is not None:
            sys.stderr.write(
                f"hvlaunch: training continues from commit {commits} in the directory of --save-to\n"
            )
        parts = None if restored is None else restored[1]
        self._take_parts(commits, parts, _gathered(parts is not None))
        return True

    def _take_parts(self, commits: int, parts: Parts | None, is_here: list[int]) -> None:
        """Restore a commit, and send the state to workers without it. Collective."""
        self.commits = commits
        if parts is not None:
            self._saved = Snapshot(*parts)
            self.restore()
        lacking = [rank for rank, has_it in enumerate(is_here) if not has_it]
        root = is_here.index(1)
        if lacking and dist.get_rank() in (root, *lacking):
            self._transfer(root, lacking, current.world().carrier)

    def _transfer(self, root: int, lacking: Sequence[int], device: torch.device) -> None:
        """Transfer the state from `root` to the workers without it. Collective among these workers.

        Their group lives as long as the round: torch would name the next group of the same ranks alike and find leftovers in the store.
        """
        ranks = sorted([root, *lacking])
        # The world serves if all members take part: another group would cost time and a name.
        everyone = len(ranks) == dist.get_world_size()
        timeout = current.world().timeout
        group = (
            dist.group.WORLD
            if everyone
            else dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        )
        if group is None:
            raise RuntimeError("torch.distributed has no default group")
        if self._saved is not None and dist.get_rank() == root:
            send(self._saved, group, device)
        else:
            self._saved = receive(root, group, device)
            self.restore()

    def forget(self) -> None:
        """Forget saved states when a training begins: all workers start from rank 0's state."""
        self.commits, self._saved = -1, None

    def hand_over(self) -> tuple[int, Snapshot | None]:
        """Return the number of commits and the saved state for this worker's next life; no state if only a subclass has it."""
        return (-1 if self._saved is None else self.commits), self._saved

    def take_over(self, commits: int, saved: Snapshot | None, last_round: int) -> None:
        """Continue from the state that this worker's last life handed over, after its last round."""
        self.commits, self._saved, self._synced_in = commits, saved, last_round
        if saved is not None:
            self.restore()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Register functions to call in every later round, after its groups are made and before sync()."""
        self._callbacks.extend(callbacks)

    def reset(self) -> None:
        """Hook for subclasses, called in every later round before the callbacks; Horovod's name."""

    def on_reset(self) -> None:
        """Call reset() and the registered callbacks; run() does. New workers receive the callbacks' changes too."""
        self.reset()
        for call in self._callbacks:
            call()
        # Callbacks may change the state, a learning rate for example; a new worker must get the changed
        # state.
        if self._callbacks and self._saved is not None:
            self._saved = take(self.collect())

    def attach(self, trained: TrainedRound | None, keeper: BackgroundKeeper | None = None) -> None:
        """Set the round in which the state is trained, and the keeper of its commits; run() does."""
        self._round, self._keeper = trained, keeper


class ObjectState(State):
    """Attributes by name. Objects with state_dict() and load_state_dict() are saved by these, in lists and dicts too."""

    def __init__(self, bcast_object: object = None, get_rank: object = None, **values: Any) -> None:
        """`values` are the attributes. bcast_object and get_rank exist for Horovod's scripts; hvlaunch ignores both."""
        super().__init__(bcast_object, get_rank)
        self._names = tuple(values)
        for name, value in values.items():
            if hasattr(self, name):
                raise ValueError(f"the name {name!r} is one of a state's own; choose another")
            setattr(self, name, value)

    # Without this method type checkers would refuse the attributes that only the user knows.
    def __getattr__(self, name: str) -> Any:  # for type checkers: the attributes are the user's
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    if TYPE_CHECKING:  # they may be set, too

        def __setattr__(self, name: str, value: Any) -> None: ...

    def collect(self) -> dict[str, Any]:
        """Return the values by name, as state_dict() if a value has one."""
        return {name: _collected(getattr(self, name)) for name in self._names}

    def apply(self, value: Mapping[str, Any]) -> None:
        """Restore the values that collect() returned."""
        for name, saved in value.items():
            setattr(self, name, _applied(getattr(self, name), saved))


class TorchState(ObjectState):
    """The state of a usual training: its parts by name, as far as given, and any `more`."""

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        sampler: Any = None,
        scaler: Any = None,
        scheduler: Any = None,
        **more: Any,
    ) -> None:
        parts = {
            "model": model,
            "optimizer": optimizer,
            "sampler": sampler,
            "scaler": scaler,
            "scheduler": scheduler,
        }
        super().__init__(**{name: part for name, part in parts.items() if part is not None}, **more)


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _holds_stateful(value: Any) -> bool:
    """Return True for a plain container of such objects. A copied optimizer would hold parameters of no model."""
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return any(_is_stateful(item) or _holds_stateful(item) for item in items)


def _collected(value: Any) -> Any:
    if _is_stateful(value):
        return value.state_dict()
    if not _holds_stateful(value):
        return value
    if isinstance(value, dict):
        return {key: _collected(item) for key, item in value.items()}
    return [_collected(item) for item in value]


def _applied(value: Any, saved: Any) -> Any:
    """Apply a collected value to `value`; return the saved value itself if `value` holds no state."""
    if _is_stateful(value):
        value.load_state_dict(saved)
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            value.zero_grad()  # what was accumulated since is of batches that come again
        return value
    if not _holds_stateful(value):
        return saved
    if isinstance(value, dict):
        return {key: _applied(value[key], item) for key, item in saved.items()}
    return type(value)(_applied(item, kept) for item, kept in zip(value, saved, strict=True))


def _gathered(number: int, device: torch.device | None = None) -> list[int]:
    """Return every worker's number, by rank. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [int(number)]
    device = device or current.world().carrier
    mine = torch.tensor([number], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [int(tensor) for tensor in everyone]


def _rank_and_size() -> tuple[int, int]:
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
        place: Callable[[], tuple[int, int]] = _rank_and_size,
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
