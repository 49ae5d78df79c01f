"""Training that goes on when hosts come and go, or fail. docs/elastic.md is the guide; the names are Horovod's."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from hvlaunch.torch import current
from hvlaunch.torch.elastic.sampler import ElasticSampler
from hvlaunch.torch.elastic.state import ObjectState, State, TorchState
from hvlaunch.torch.elastic.training import is_elastic, placed
from hvlaunch.torch.group_errors import (
    CollectiveFailed,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    WorkersChanged,
)

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


def run(train: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate `train(state, …)`: it is called once in each round, with a state that all workers share.

    In an elastic job of hvlaunch, run() makes the round's groups (see hvlaunch.torch) before the call, and closes them
    after it. Where the script has called init(), the first round is the one that it found, and the last one's groups stay. Objects for one
    group, such as a model in DistributedDataParallel, must be made inside `train`. In any other job, and in a single process, run() does
    init(), state.sync() and one call.

    An exception of `train` ends the worker, except for WorkersChanged, CollectiveFailed, and torch's own errors of
    collectives. A worker that is not needed any more ends by SystemExit(0). Raises AlreadyInitialized if, in an
    elastic job, there is a process group that is not init()'s.
    """

    @wraps(train)
    def wrapper(state: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not is_elastic():
            return _train_once(state, lambda: train(state, *args, **kwargs))
        with placed() as training:
            return training.run(state, lambda: train(state, *args, **kwargs))

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
