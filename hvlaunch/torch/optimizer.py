"""An optimizer that uses every worker's gradients; the names are Horovod's.

step() or synchronize() send the gradients, and the backward pass sends nothing. Workers may differ in which gradients a pass
gives, and then in the order of messages. At a call of step() or synchronize() all workers are at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from typing import Any, TypeVar, cast

import torch

from hvlaunch.torch.collective_log import Op
from hvlaunch.torch.collectives import (
    Average,
    Compression,
    Compressor,
    allreduce_async,
    chosen,
    sparse_allreduce_async,
)
from hvlaunch.torch.current import ProcessSet, global_process_set

__all__ = ["DistributedOptimizer"]

T = TypeVar("T", bound=torch.optim.Optimizer)

_BUCKETS = {"cpu": 1 << 20}
_LARGE_BUCKET = 25 << 20
"""Bytes per message: many small messages take longer. With Gloo a large message takes longer than several at once. For NCCL
the size is DistributedDataParallel's.
"""


class _Exchange:
    """The reduction of gradients over the workers."""

    def __init__(
        self,
        *,
        compression: type[Compressor],
        op: Op,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        """`predivide` divides gradients before they are sent."""
        self._compression = compression
        self._op = op
        self._factors = 1.0 / predivide, predivide
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set

    def reduce(self, parameters: Iterable[torch.Tensor]) -> None:
        """Replace each parameter's gradient by the reduced one; a missing gradient counts as zeros. Collective in the process set."""
        if not self._process_set.included():
            return
        learning = [tensor for tensor in parameters if tensor.requires_grad]
        # Every bucket is on its way before the first is awaited: they overlap.
        begun = [self._begin(bucket) for bucket in _buckets(map(self._gradient, learning))]
        reduced = chain.from_iterable(wait() for wait in begun)
        for parameter, gradient in zip(learning, reduced, strict=True):
            parameter.grad = gradient

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter.grad is None:
            # All workers must send the same messages, also if only some have used the parameter.
            return torch.zeros_like(parameter)
        return parameter.grad.to_dense() if self._sparse_as_dense else parameter.grad

    def _begin(self, bucket: list[torch.Tensor]) -> Callable[[], Iterable[torch.Tensor]]:
        if bucket[0].is_sparse:
            rows = sparse_allreduce_async(bucket[0], None, self._op, self._process_set)
            return lambda: [rows()]
        shapes = [tensor.shape for tensor in bucket]
        parts = [tensor.detach().reshape(-1) for tensor in bucket]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        # Compressed after joining, so the work is one operation per bucket.
        small, dtype = self._compression.compress(flat)
        reduced = allreduce_async(small, None, None, self._op, *self._factors, self._process_set)
        return lambda: _cut(self._compression.decompress(reduced.wait(), dtype), shapes)


def _buckets(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group consecutive gradients of one kind, up to a bucket's size; a sparse gradient is alone."""
    bucket: list[torch.Tensor] = []
    room = 0
    for tensor in gradients:
        room -= _bytes(tensor)
        if bucket and (room < 0 or tensor.is_sparse or _likeness(tensor) != _likeness(bucket[0])):
            yield bucket
            bucket = []
        if not bucket:
            room = _BUCKETS.get(tensor.device.type, _LARGE_BUCKET) - _bytes(tensor)
        bucket.append(tensor)
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
    """Methods added to an optimizer's class."""

    _exchange: _Exchange
    _patched_step: Callable[..., Any] | None
    """The step() that a scheduler has put on the optimizer to count steps; None without one."""
    _is_skipped: bool
    _is_exchanged: bool
    """True from an exchange of gradients until the next backward pass."""

    def synchronize(self) -> None:
        """Give every parameter the reduced gradients, for example to clip them before step(). Collective."""
        self._exchange.reduce(tensor for group in self.param_groups for tensor in group["params"])
        self._is_exchanged = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context step() uses the gradients as they are, as after synchronize()."""
        self._is_skipped = True
        try:
            yield
        finally:
            self._is_skipped = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: step() uses the sum of all backward passes anyway. The method exists for Horovod's scripts."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange the gradients, unless already exchanged, and make a step. Collective.

        closure: computes the gradients, as in torch's optimizers; each call is followed by an exchange.
        """
        if closure is not None and not self._is_skipped:
            closure = self._exchanging(closure)
        # A script may have called synchronize() to clip gradients; a second exchange would scale them again.
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
        for tensor in parameters:
            if tensor.requires_grad:
                # A new backward pass after an exchange makes local gradients again; forgetting that would
                # train each worker apart.
                tensor.register_post_accumulate_grad_hook(self._changed)

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
    """Return the optimizer, changed to step with the gradients of every worker.

    Its class becomes a subclass of its former class, so schedulers keep working. New methods are synchronize(), skip_synchronize() and
    set_backward_passes_per_step(). step() and synchronize() are collective: they exchange gradients, with zeros for unused parameters.
    Workers outside `process_set` step alone. Do not use it with DistributedDataParallel, which exchanges gradients itself, during the
    backward pass.

    optimizer: an optimizer of torch; a distributed one gets the new settings. named_parameters: checked to contain the optimizer's
    parameters; the names are not used. compression: the form in which gradients travel. op: Average, Sum, Min, Max or Product.
    gradient_predivide_factor: divides gradients before they are sent; the remaining division follows. sparse_as_dense: make sparse
    gradients dense. backward_passes_per_step, num_groups and groups exist for Horovod's scripts.

    Raises ValueError for a repeated name, missing parameters, fewer than one pass, or a factor with another operator than
    Average; NotOffered for Adasum.
    """
    del num_groups, groups
    op = chosen(op)
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be at least 1")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor is for op=Average alone")
    parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    _check(list(named_parameters or ()), parameters)
    distributed = (
        optimizer if isinstance(optimizer, _Distributed) else _made_distributed(optimizer, parameters)
    )
    distributed._exchange = _Exchange(  # noqa: SLF001 (of the class above)
        compression=compression,
        op=op,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    return cast("T", distributed)


def _made_distributed(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> _Distributed:
    # The class changes instead of the object: schedulers and scripts hold references to this optimizer.
    wrapped = type(optimizer)
    distributed = cast("_Distributed", optimizer)
    distributed.__class__ = cast("Any", type(wrapped.__name__, (_Distributed, wrapped), {}))
    distributed._is_skipped = distributed._is_exchanged = False  # noqa: SLF001 (as above)
    # A scheduler that exists already counts steps by a patch on the instance; our step() must stand before
    # it.
    distributed._patched_step = patched = vars(optimizer).get("step")  # noqa: SLF001 (as above)
    if patched is not None:

        @wraps(patched)
        def step(closure: Callable[[], Any] | None = None) -> Any:
            return _Distributed.step(distributed, closure)

        vars(optimizer)["step"] = step
    distributed._watch(parameters)  # noqa: SLF001 (as above)
    return distributed


def _check(named: list[tuple[str, torch.Tensor]], parameters: list[torch.Tensor]) -> None:
    names = [name for name, _ in named]
    if len(names) != len(set(names)):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"named_parameters has {twice!r} twice")
    if named:
        named_ids = {id(tensor) for _, tensor in named}
        missing = sum(id(tensor) not in named_ids for tensor in parameters)
        if missing:
            raise ValueError(f"named_parameters lacks {missing} of the optimizer's parameters")
