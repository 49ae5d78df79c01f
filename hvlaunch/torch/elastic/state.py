"""The state that workers of an elastic job share, commit and restore."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import distributed as dist

from hvlaunch.torch import current
from hvlaunch.torch.group_errors import WorkersChanged
from hvlaunch.torch.sharing import TensorSpec, join, split

__all__ = ["ObjectState", "Snapshot", "State", "TorchState", "TrainedRound", "receive", "send", "take"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A value as a skeleton and its tensors; see hvlaunch.torch.sharing."""

    skeleton: Any
    tensors: Sequence[torch.Tensor]


def take(value: Any) -> Snapshot:
    """A copy of the value; tensors stay on their devices."""
    skeleton, tensors = split(value)
    return Snapshot(copy.deepcopy(skeleton), [tensor.detach().clone() for tensor in tensors])


_BUCKET = 64 << 20
"""Bytes that are flattened together: enough to be as fast as one message, and little beside the model."""


def send(snapshot: Snapshot, group: dist.ProcessGroup, device: torch.device) -> None:
    """Give the snapshot to the others of the group, who call receive(). Collective.

    `device` is one that the group's backend takes tensors of.
    """
    root = dist.get_rank()
    specs = [TensorSpec.of(tensor) for tensor in snapshot.tensors]
    dist.broadcast_object_list([snapshot.skeleton, specs], root, group=group, device=device)
    for bucket in _buckets(snapshot.tensors):
        flat = torch.cat([tensor.reshape(-1).to(device) for tensor in bucket])
        dist.broadcast(flat.view(torch.uint8), root, group=group)


def receive(root: int, group: dist.ProcessGroup, device: torch.device) -> Snapshot:
    """What the worker of (global) rank `root` sends. Collective. Tensors come on the kind of device they had there."""
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
    """Runs of tensors of one dtype, the same on every worker; what has no element is not sent."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
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
    """A state's connection to the round that it is trained in; run() makes it."""

    def committed(self, commits: int) -> None:
        """Tell the driver that work goes on."""
        ...

    def see_whole(self) -> None:
        """Raise CollectiveFailed where what collectives have brought until now may be garbage: on a GPU those that were ended do not fail."""
        ...

    def check(self) -> None:
        """Raise WorkersChanged, on all workers at once, where workers come or go. Collective; raises as see_whole() does."""
        ...


class State:
    """The base of all states: when to save, and what to do when workers come and go.

    A subclass says what is saved, in `collect()`, and how it is restored, in `apply()`. Or, as one of Horovod's, it has its own `save()`,
    `restore()` and `sync()`; rank 0 is then a worker that was there before.
    """

    def __init__(self, bcast_object: object = None, get_rank: object = None) -> None:
        """bcast_object and get_rank are Horovod's, and not needed."""
        del bcast_object, get_rank
        self.commits = -1
        """The number of the last commit; -1 if nothing is saved yet."""
        self._saved: Snapshot | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._round: TrainedRound | None = None

    def collect(self) -> Any:
        """Everything that must be saved: tensors, plain values, and dicts and lists of them."""
        raise NotImplementedError

    def apply(self, value: Any) -> None:
        """Restore the result of collect(), which may be another worker's."""
        raise NotImplementedError

    def commit(self) -> None:
        """Save, and check whether workers come or go. Collective: every worker calls it at the same step.

        Raises WorkersChanged and CollectiveFailed, for run() to catch.
        """
        if self._round is not None:
            self._round.see_whole()
        self._save_and_count()
        if self._round is not None:
            self._round.committed(self.commits)
            self._round.check()

    def check_host_updates(self) -> None:
        """Check whether workers come or go, and save only then. Collective; raises as commit() does."""
        if self._round is not None:
            try:
                self._round.check()
            except WorkersChanged:
                self._save_and_count()
                raise

    def _save_and_count(self) -> None:
        """Save, by a subclass' own save() too, which does not count."""
        next_commit = self.commits + 1
        self.save()
        self.commits = max(self.commits, next_commit)

    def save(self) -> None:
        """Keep a copy of everything, on the same devices. The copy before it is kept until this one is complete."""
        self._saved = take(self.collect())
        self.commits += 1

    def restore(self) -> None:
        """Go back to what was saved last. Gradients are not saved: they are dropped."""
        if self._saved is not None:
            copies = [tensor.clone() for tensor in self._saved.tensors]  # an optimizer keeps what it is given
            self.apply(join(self._saved.skeleton, copies))

    def sync(self) -> None:
        """Give the newest saved state to the workers that lack it. Collective.

        It comes from the first worker with the most commits; workers with as many commits keep theirs. If no worker has
        saved anything, it comes from rank 0.

        Raises NotInitialized where torch's group is not one of init()'s.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            if self._saved is None:
                self.save()
            return
        device = current.world().carrier
        commits = _gathered(self.commits, device)
        newest = max(commits)
        root = commits.index(newest)
        lacking = [rank for rank, have in enumerate(commits) if rank != root and (have < newest or have < 0)]
        if dist.get_rank() == root and self._saved is None:
            self.save()
        if lacking and dist.get_rank() in (root, *lacking):
            self._transfer(root, lacking, device)
        self.commits = max(newest, 0)

    def _transfer(self, root: int, lacking: Sequence[int], device: torch.device) -> None:
        """Collective among the root and those who lack the state.

        Their group lives as long as the round: torch would give the next one of the same ranks its name, and
        its leftovers in the store.
        """
        ranks = sorted([root, *lacking])
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
        """Forget what was saved, for a training that begins: all go on from rank 0's state, whatever they saved before."""
        self.commits, self._saved = -1, None

    def hand_over(self) -> tuple[int, Snapshot | None]:
        """How many commits there are, and what was saved, for this worker's next life; none where only a subclass has what was saved."""
        return (-1 if self._saved is None else self.commits), self._saved

    def take_over(self, commits: int, saved: Snapshot | None) -> None:
        """Go on from what this worker's last life has handed over."""
        self.commits, self._saved = commits, saved
        if saved is not None:
            self.restore()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Functions to call in every new round but the first, when its groups are made and before sync()."""
        self._callbacks.extend(callbacks)

    def reset(self) -> None:
        """What a subclass does in every new round but the first, before the callbacks; Horovod's name."""

    def on_reset(self) -> None:
        """Call reset(), and what register_reset_callbacks() was given; run() does. Who joins gets what they have changed, too."""
        self.reset()
        for call in self._callbacks:
            call()
        if self._callbacks and self._saved is not None:
            self._saved = take(self.collect())

    def attach(self, trained: TrainedRound | None) -> None:
        """Say which round the state is trained in; run() does."""
        self._round = trained


class ObjectState(State):
    """Attributes by name. Those that have state_dict() and load_state_dict() are saved by these, in lists and dicts too."""

    def __init__(self, bcast_object: object = None, get_rank: object = None, **values: Any) -> None:
        """values: the attributes. bcast_object and get_rank are Horovod's, and not needed."""
        super().__init__(bcast_object, get_rank)
        self._names = tuple(values)
        for name, value in values.items():
            if hasattr(self, name):
                raise ValueError(f"the name {name!r} is one of a state's own; choose another")
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:  # for type checkers: the attributes are the user's
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    if TYPE_CHECKING:  # they may be set, too

        def __setattr__(self, name: str, value: Any) -> None: ...

    def collect(self) -> dict[str, Any]:
        """The values by name, or what state_dict() gives of those that have it."""
        return {name: _collected(getattr(self, name)) for name in self._names}

    def apply(self, value: Mapping[str, Any]) -> None:
        """Give the values back what collect() has made of them."""
        for name, saved in value.items():
            setattr(self, name, _applied(getattr(self, name), saved))


class TorchState(ObjectState):
    """The state of a usual training: its parts by name, those that it has, and whatever `more` there is."""

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
    """Whether it is a plain container of such; a copy of an optimizer, say, would have parameters of no model."""
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
    """The value with what _collected() made of it; or that, where nothing in the value has a state."""
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


def _gathered(number: int, device: torch.device) -> list[int]:
    """Every worker's number, by rank."""
    mine = torch.tensor([number], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [int(tensor) for tensor in everyone]
