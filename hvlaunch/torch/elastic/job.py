"""The elastic job that this process is a worker of, if it is one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from hvlaunch.rendezvous.client import Client
from hvlaunch.torch.elastic.membership import Dismissed, Membership
from hvlaunch.torch.elastic.training import Training
from hvlaunch.torch.world import let_go

__all__ = ["is_elastic", "placed"]

_BEATS_PER_TIMEOUT = 10
_BEAT_RANGE = (0.2, 5.0)


def is_elastic() -> bool:
    """Whether hvlaunch gives this process its places, round after round."""
    return os.environ.get("HVLAUNCH_ELASTIC") == "1"


@contextmanager
def placed() -> Iterator[Training]:
    """The training of this process. Raises SystemExit(0) where the block finds that the job does not need this worker any more."""
    try:
        yield _training()
    except Dismissed:
        let_go()
        raise SystemExit(0) from None


@cache
def _training() -> Training:
    client = Client.from_environment()
    least, most = _BEAT_RANGE
    beat = min(most, max(least, float(os.environ["HVLAUNCH_WORKER_TIMEOUT"]) / _BEATS_PER_TIMEOUT))
    return Training(client, Membership(client, os.environ["HVLAUNCH_WORKER"], beat=beat))
