"""torchrun's way to the rendezvous backend `hvlaunch`: the entry point in its group `torchrun.handlers`.

torch loads this module in every torchrun, and in every program that imports torch's elastic rendezvous. So it has no
import that costs anything or could fail; the backend itself is hvlaunch.torch.torchrun.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["handler"]


def handler() -> Callable[[Any], Any]:
    """What makes a torch RendezvousHandler out of torch's RendezvousParameters."""
    return _create


def _create(parameters: Any) -> Any:
    from hvlaunch.torch.torchrun.handler import Handler  # noqa: PLC0415 (see the top)
    from hvlaunch.torch.torchrun.settings import Settings  # noqa: PLC0415 (see the top)

    return Handler(Settings.of(parameters))
