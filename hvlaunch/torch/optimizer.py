"""An optimizer whose gradients are those of all workers: the names are Horovod's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from hvlaunch.torch.collectives import allreduce_async, sparse_allreduce_async
from hvlaunch.torch.compression import Compression, Compressor
from hvlaunch.torch.process_sets import ProcessSet, global_process_set
from hvlaunch.torch.reduction import Average, Op, chosen

__all__ = ["DistributedOptimizer", "Exchange"]

T = TypeVar("T", bound=torch.optim.Optimizer)


class Exchange:
    """Reduces the gradients of these parameters over the workers, as they become ready in backward passes.

    They are sent in one order on all workers, which is about that in which backward passes give them: from the last to
    the first.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        *,
        passes: int = 1,
        compression: type[Compressor] = Compression.none,
        op: Op = Average,
        predivide: float = 1.0,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """`passes` is how many backward passes make a gradient; `predivide` is by how much it is divided before it is sent."""
        self.passes = passes
        self._parameters = [each for each in reversed(list(parameters)) if each.requires_grad]
        self._numbers = {id(each): number for number, each in enumerate(self._parameters)}
        self._compression = compression
        self._op = op
        self._predivide = predivide
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._seen = [0] * len(self._parameters)
        self._begun: list[Callable[[], torch.Tensor]] = []
        """Those of the first parameters."""
        self.is_over = False
        """Whether there was no backward pass since the gradients were exchanged."""
        for each in self._parameters:
            each.register_post_accumulate_grad_hook(self._ready)

    @property
    def is_under_way(self) -> bool:
        return bool(self._begun)

    def forget(self) -> None:
        """What was begun is of a round that broke, and its batches come again."""
        self._begun.clear()
        self._seen = [0] * len(self._parameters)
        self.is_over = False

    def finish(self) -> None:
        """Send the rest, and give each parameter its reduced gradient; zeros are sent where there is none. Collective."""
        while len(self._begun) < len(self._parameters):
            self._begin_next()
        begun, self._begun = self._begun, []
        self._seen = [0] * len(self._parameters)
        for each, wait in zip(self._parameters, begun, strict=True):
            each.grad = wait()
        self.is_over = True

    def _ready(self, parameter: torch.Tensor) -> None:
        number = self._numbers[id(parameter)]
        self._seen[number] += 1
        self.is_over = False
        if self._seen[number] > self.passes:
            raise RuntimeError(
                f"more than {self.passes} backward passes before step(): set backward_passes_per_step, or call synchronize()"
            )
        while len(self._begun) < len(self._parameters) and self._seen[len(self._begun)] == self.passes:
            self._begin_next()

    def _begin_next(self) -> None:
        parameter = self._parameters[len(self._begun)]
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        if gradient.is_sparse and self._sparse_as_dense:
            gradient = gradient.to_dense()
        if gradient.is_sparse:
            self._begun.append(sparse_allreduce_async(gradient, None, self._op, self._process_set))
        else:
            self._begun.append(self._dense(gradient))

    def _dense(self, gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
        small, dtype = self._compression.compress(gradient)
        factors = 1.0 / self._predivide, self._predivide
        reduced = allreduce_async(small, None, None, self._op, *factors, self._process_set)
        return lambda: self._compression.decompress(reduced.wait(), dtype)


class _Distributed(torch.optim.Optimizer):
    """What an optimizer's class gets besides."""

    _exchange: Exchange
    _is_skipped: bool

    def synchronize(self) -> None:
        """Wait until all gradients are those of all workers: to clip them, say, before step(). Collective."""
        self._exchange.finish()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it step() takes the gradients as they are, as after synchronize()."""
        self._is_skipped = True
        try:
            yield
        finally:
            self._is_skipped = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on so many backward passes make a gradient."""
        self._exchange.passes = passes

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange the gradients, unless that is done, and make a step. Collective."""
        if not self._is_skipped and not self._exchange.is_over:
            self.synchronize()
        self._exchange.is_over = False
        return super().step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._exchange.forget()
        super().load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._exchange.is_under_way:
            raise RuntimeError("zero_grad() between backward() and step(): the gradients are on their way")
        super().zero_grad(set_to_none)


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
    """An optimizer of the same class, which makes its steps with the gradients of all workers.

    `named_parameters`, whose names are not needed, `num_groups` and `groups` are taken as Horovod takes them; that `named_parameters` are the optimizer's is
    checked. It has synchronize(), skip_synchronize() and set_backward_passes_per_step() besides. Gradients are sent while the backward pass
    goes on. With DistributedDataParallel, which does all this by itself, use none.

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
    wrapped = type(optimizer)
    made = cast("Any", type(wrapped.__name__, (_Distributed, wrapped), {}))
    distributed = made.__new__(made)
    distributed.__dict__.update(optimizer.__dict__)
    distributed._is_skipped = False  # noqa: SLF001 (of the class above)
    distributed._exchange = Exchange(  # noqa: SLF001 (as above)
        own,
        passes=backward_passes_per_step,
        compression=compression,
        op=op,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    return cast("T", distributed)


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
