"""What Horovod has of each collective besides: in place, of several tensors, waited for. Made of the one that it is a variant of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from hvlaunch.torch.handles import Handle, together

__all__ = ["each", "grouped", "in_place", "waited"]

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def in_place(
    begin: Callable[Concatenate[torch.Tensor, P], Handle[torch.Tensor]],
) -> Callable[Concatenate[torch.Tensor, P], Handle[torch.Tensor]]:
    """The same, and the tensor itself gets the result."""

    @wraps(begin)
    def begin_in_place(tensor: torch.Tensor, *args: P.args, **kwargs: P.kwargs) -> Handle[torch.Tensor]:
        return begin(tensor, *args, **kwargs).then(tensor.detach().copy_).then(lambda _: tensor)

    return _named(  # type: ignore[return-value]  # it takes the tensor by name, too
        begin_in_place, f"{begin.__name__}_", f"As {begin.__name__}(), and the tensor itself gets the result."
    )


def grouped(
    begin: Callable[Concatenate[torch.Tensor, P], Handle[T]],
) -> Callable[Concatenate[Sequence[torch.Tensor], P], Handle[list[T]]]:
    """The same of several tensors at once."""

    def begin_all(tensors: Sequence[torch.Tensor], *args: P.args, **kwargs: P.kwargs) -> Handle[list[T]]:
        return together([begin(tensor, *args, **kwargs) for tensor in tensors])

    begin_all.__signature__ = _of_several(begin)  # type: ignore[attr-defined]  # which inspect looks at
    return _named(  # type: ignore[return-value]  # as above
        begin_all, f"grouped_{begin.__name__}", f"Begin {begin.__name__}() of several tensors."
    )


def each(
    collective: Callable[Concatenate[torch.Tensor, P], T],
) -> Callable[Concatenate[Sequence[torch.Tensor], P], list[T]]:
    """The same of each of several tensors; gradients flow through it."""

    def of_each(tensors: Sequence[torch.Tensor], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        return [collective(tensor, *args, **kwargs) for tensor in tensors]

    of_each.__signature__ = _of_several(collective)  # type: ignore[attr-defined]  # as above
    return _named(  # type: ignore[return-value]  # as above
        of_each, f"grouped_{collective.__name__}", f"{collective.__name__}() of each tensor. Collective."
    )


def waited(begin: Callable[P, Handle[T]]) -> Callable[P, T]:
    """The same, which is waited for; no gradients flow."""

    @wraps(begin)
    def wait(*args: P.args, **kwargs: P.kwargs) -> T:
        return begin(*args, **kwargs).wait()

    name = begin.__name__.replace("_async", "")
    return _named(wait, name, f"{begin.__name__}(), and wait for it; no gradients flow. Collective.")


def _named(function: F, name: str, doc: str) -> F:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def _of_several(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    first, *more = signature.parameters.values()
    first = first.replace(name="tensors", annotation="Sequence[torch.Tensor]")
    result = str(signature.return_annotation).replace("torch.Tensor", "list[torch.Tensor]")
    return signature.replace(parameters=[first, *more], return_annotation=result)
