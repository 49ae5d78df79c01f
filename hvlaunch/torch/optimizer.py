"""An optimizer whose gradients are those of all workers: the names are Horovod's.

Gradients are sent by step() or synchronize(), and none while the backward pass goes on: which of them a pass gives may differ from worker to
worker, and then the order of all that is sent would differ, too. Where the script calls these two, all workers are at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from typing import Any, TypeVar, cast

import torch

from hvlaunch.torch.collectives import allreduce_async, sparse_allreduce_async
from hvlaunch.torch.current import ProcessSet, global_process_set
from hvlaunch.torch.reduction import Average, Compression, Compressor, Op, chosen

__all__ = ["DistributedOptimizer"]

T = TypeVar("T", bound=torch.optim.Optimizer)

_BUCKETS = {"cpu": 1 << 20}
_LARGE_BUCKET = 25 << 20
"""Bytes that are sent as one tensor: many small ones take longer. With Gloo a large one takes longer than several that are sent at once; for
NCCL it is DistributedDataParallel's."""


class _Exchange:
    """How gradients are reduced over the workers."""

    def __init__(
        self,
        *,
        compression: type[Compressor],
        op: Op,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        """`predivide` is by how much a gradient is divided before it is sent."""
        self._compression = compression
        self._op = op
        self._factors = 1.0 / predivide, predivide
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set

    def reduce(self, parameters: Iterable[torch.Tensor]) -> None:
        """Give each its reduced gradient; zeros are sent where there is none. Collective; nothing happens outside of the process set."""
        if not self._process_set.included():
            return
        learning = [each for each in parameters if each.requires_grad]
        begun = [self._begin(bucket) for bucket in _buckets(map(self._gradient, learning))]
        reduced = chain.from_iterable(wait() for wait in begun)
        for parameter, gradient in zip(learning, reduced, strict=True):
            parameter.grad = gradient

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter.grad is None:
            return torch.zeros_like(parameter)
        return parameter.grad.to_dense() if self._sparse_as_dense else parameter.grad

    def _begin(self, bucket: list[torch.Tensor]) -> Callable[[], Iterable[torch.Tensor]]:
        if bucket[0].is_sparse:
            rows = sparse_allreduce_async(bucket[0], None, self._op, self._process_set)
            return lambda: [rows()]
        shapes = [each.shape for each in bucket]
        parts = [each.detach().reshape(-1) for each in bucket]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        small, dtype = self._compression.compress(flat)
        reduced = allreduce_async(small, None, None, self._op, *self._factors, self._process_set)
        return lambda: _cut(self._compression.decompress(reduced.wait(), dtype), shapes)


def _buckets(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Those that follow each other, are alike, and are not too large together; a sparse one is alone."""
    bucket: list[torch.Tensor] = []
    room = 0
    for each in gradients:
        room -= _bytes(each)
        if bucket and (room < 0 or each.is_sparse or _likeness(each) != _likeness(bucket[0])):
            yield bucket
            bucket = []
        if not bucket:
            room = _BUCKETS.get(each.device.type, _LARGE_BUCKET) - _bytes(each)
        bucket.append(each)
    if bucket:
        yield bucket


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _likeness(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.device, tensor.layout


def _cut(flat: torch.Tensor, shapes: list[torch.Size]) -> Iterator[torch.Tensor]:
    parts = flat.split([shape.numel() for shape in shapes])
    return (part.view(shape) for part, shape in zip(parts, shapes, strict=True))


class _Distributed(torch.optim.Optimizer):
    """What an optimizer's class gets besides."""

    _exchange: _Exchange
    _patched_step: Callable[..., Any] | None
    """What a scheduler has put in place of the optimizer's own, to count the steps."""
    _is_skipped: bool
    _is_exchanged: bool
    """Whether there was no backward pass since the gradients were exchanged."""

    def synchronize(self) -> None:
        """Give all parameters the gradients of all workers: to clip them, say, before step(). Collective."""
        self._exchange.reduce(each for group in self.param_groups for each in group["params"])
        self._is_exchanged = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it step() takes the gradients as they are, as after synchronize()."""
        self._is_skipped = True
        try:
            yield
        finally:
            self._is_skipped = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Horovod's, and not needed: however many backward passes there were, step() takes what they have come to."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange the gradients, unless that is done, and make a step. Collective.

        closure: one that makes the gradients, as torch's optimizers have it; they are exchanged behind each call of it.
        """
        if closure is not None and not self._is_skipped:
            closure = self._exchanging(closure)
        elif not self._is_skipped and not self._is_exchanged:
            self.synchronize()
        self._is_exchanged = False
        return (self._patched_step or super().step)(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._is_exchanged = False
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._watch(self.param_groups[-1]["params"])

    def _exchanging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def exchanged() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        return exchanged

    def _watch(self, parameters: Iterable[torch.Tensor]) -> None:
        for each in parameters:
            if each.requires_grad:
                each.register_post_accumulate_grad_hook(self._changed)

    def _changed(self, _: torch.Tensor) -> None:
        self._is_exchanged = False


def DistributedOptimizer(  # noqa: N802, PLR0917 (Horovod's)
    optimizer: T,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op | str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> T:
    """The optimizer, which from now on makes its steps with the gradients of all workers.

    Its class is one of its own, made of that which it had: schedulers and all else that knows it go on. It has synchronize(),
    skip_synchronize() and set_backward_passes_per_step() besides. step() and synchronize() are collective: there the gradients are
    exchanged, with zeros where a parameter was not used. Workers outside of `process_set` make their steps alone. With
    DistributedDataParallel, which does this by itself and while the backward pass goes on, use none.

    optimizer: one of torch's; if it is distributed already, it is so in this way from now on. named_parameters: names are not needed; that
    they are the optimizer's parameters is checked. compression: how gradients are sent. op: Average, Sum, Min, Max or Product.
    gradient_predivide_factor: by how much gradients are divided before they are sent; the rest is divided after that. sparse_as_dense:
    sparse gradients are made dense. backward_passes_per_step, num_groups and groups are Horovod's, and not needed.

    Raises ValueError for a name that comes twice, for parameters that are not the optimizer's, for no passes, and for a factor with another
    operator than Average; NotOffered for Adasum.
    """
    del num_groups, groups
    op = chosen(op)
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be at least 1")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor is for op=Average alone")
    own = [each for group in optimizer.param_groups for each in group["params"]]
    _check(list(named_parameters or ()), own)
    distributed = optimizer if isinstance(optimizer, _Distributed) else _made_distributed(optimizer, own)
    distributed._exchange = _Exchange(  # noqa: SLF001 (of the class above)
        compression=compression,
        op=op,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    return cast("T", distributed)


def _made_distributed(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> _Distributed:
    wrapped = type(optimizer)
    distributed = cast("_Distributed", optimizer)
    distributed.__class__ = cast("Any", type(wrapped.__name__, (_Distributed, wrapped), {}))
    distributed._is_skipped = distributed._is_exchanged = False  # noqa: SLF001 (as above)
    distributed._patched_step = patched = vars(optimizer).get("step")  # noqa: SLF001 (as above)
    if patched is not None:

        @wraps(patched)
        def step(closure: Callable[[], Any] | None = None) -> Any:
            return _Distributed.step(distributed, closure)

        vars(optimizer)["step"] = step
    distributed._watch(parameters)  # noqa: SLF001 (as above)
    return distributed


def _check(named: list[tuple[str, torch.Tensor]], own: list[torch.Tensor]) -> None:
    names = [name for name, _ in named]
    if len(names) != len(set(names)):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"named_parameters has {twice!r} twice")
    if named:
        known = {id(each) for _, each in named}
        missing = sum(id(each) not in known for each in own)
        if missing:
            raise ValueError(f"named_parameters lacks {missing} of the optimizer's parameters")
