"""Training that goes on when hosts come and go, or fail. docs/elastic.md is the guide; the names are Horovod's."""

import os
from collections.abc import Callable
from functools import cache, wraps
from typing import Concatenate, ParamSpec, TypeVar

from torch import distributed as dist

from hvlaunch.rendezvous.client import Client
from hvlaunch.torch import current
from hvlaunch.torch.elastic.interruptions import (
    CollectiveFailed,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    WorkersChanged,
)
from hvlaunch.torch.elastic.membership import Dismissed, Membership
from hvlaunch.torch.elastic.sampler import ElasticSampler
from hvlaunch.torch.elastic.state import ObjectState, State, TorchState
from hvlaunch.torch.elastic.training import Training
from hvlaunch.torch.group_errors import AlreadyInitialized
from hvlaunch.torch.world import let_go

__all__ = [
    "CollectiveFailed",
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "WorkersChanged",
    "run",
]

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=State)

_BEATS_PER_TIMEOUT = 10
_BEAT_RANGE = (0.2, 5.0)
_OWN_GROUPS = (
    "call no hvlaunch.torch.init() or init_process_group() before a function under elastic.run, which makes"
    " its own groups; and call no such function inside another one"
)


def run(train: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate `train(state, …)`: it is called once in each round, with a state that all workers share.

    In an elastic job of hvlaunch, run() makes the round's groups (see hvlaunch.torch) before the call, and closes them
    after it. Objects for one group, such as a model in DistributedDataParallel, must be made inside `train`. In any
    other job, and in a single process, run() does init(), state.sync() and one call.

    An exception of `train` ends the worker, except for WorkersChanged, CollectiveFailed, and torch's own errors of
    collectives. A worker that is not needed any more ends by SystemExit(0). Raises AlreadyInitialized if, in an
    elastic job, there is a process group already.
    """

    @wraps(train)
    def wrapper(state: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if os.environ.get("HVLAUNCH_ELASTIC") != "1":
            return _train_once(state, lambda: train(state, *args, **kwargs))
        if dist.is_initialized():
            raise AlreadyInitialized(_OWN_GROUPS)
        state.forget()
        client, membership = _job()
        membership.start()
        is_done = False
        try:
            result = Training(client, membership, state).run(lambda: train(state, *args, **kwargs))
            is_done = True
        except Dismissed:
            let_go()
            raise SystemExit(0) from None
        finally:
            membership.finish(is_done=is_done)
        return result

    return wrapper


def _train_once(state: State, train: Callable[[], T]) -> T:
    own = not current.is_initialized()
    current.init()
    state.forget()
    state.sync()
    result = train()
    if own:
        current.shutdown()
    return result


@cache
def _job() -> tuple[Client, Membership]:
    """One for the process: the driver knows it by the rounds that it was in, over all its trainings."""
    client = Client.from_environment()
    least, most = _BEAT_RANGE
    beat = min(most, max(least, float(os.environ["HVLAUNCH_WORKER_TIMEOUT"]) / _BEATS_PER_TIMEOUT))
    return client, Membership(client, os.environ["HVLAUNCH_WORKER"], beat=beat)
