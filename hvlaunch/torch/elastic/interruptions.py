"""Why a worker leaves a round: not failures of the script, so run() catches them and goes on."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed as dist

__all__ = [
    "CollectiveFailed",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "WorkersChanged",
    "as_failed",
    "is_groups",
]

_WRONG_CALL = "ProcessGroupGloo::"
"""How torch begins where a collective can't be begun with what it was given."""


class WorkersChanged(Exception):
    """Workers come or go: the round ends here, where all workers are at the same place. Nothing is lost."""


class CollectiveFailed(RuntimeError):
    """A peer is gone, or did not come in time, or the driver has declared the round broken: run() goes back to the last commit."""


HostsUpdatedInterrupt = WorkersChanged
"""Horovod's name for WorkersChanged."""
HorovodInternalError = CollectiveFailed
"""Horovod's name for CollectiveFailed."""


@contextmanager
def as_failed() -> Iterator[None]:
    """What torch raises of a collective that others have left is CollectiveFailed."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CollectiveFailed) or not is_groups(error):
            raise
        raise CollectiveFailed(str(error)) from error


def is_groups(error: BaseException) -> bool:
    """Whether an error comes from a group: from Gloo, which has no class of its own, or of torch's class for the others."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    is_gloos = "gloo/" in text or "Gloo" in text
    return isinstance(error, RuntimeError) and is_gloos and not text.startswith(_WRONG_CALL)
