"""Entry point of torchrun's rendezvous backend `hvlaunch`, in the group `torchrun.handlers`.

torch imports this module in every torchrun, and in every program that imports torch's elastic rendezvous. For
this reason it has only cheap imports that can't fail; the backend is hvlaunch.torch.torchrun.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["handler"]


def handler() -> Callable[[Any], Any]:
    """Return the function that makes a torch RendezvousHandler from RendezvousParameters."""
    return _create


def _create(parameters: Any) -> Any:
    from hvlaunch.torch.torchrun import Handler, TorchrunSettings  # noqa: PLC0415 (see the top)

    return Handler(TorchrunSettings.of(parameters))
