"""Elastic training: it continues when hosts come, leave or fail. docs/guides/lost-host.md is the guide; the names are Horovod's."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from hvlaunch.torch import current
from hvlaunch.torch.elastic.state import ElasticSampler, ObjectState, State, TorchState
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
    """Decorate `train(state, ...)` to be called once per round, with a state that all workers share.

    In an elastic job of hvlaunch, run() makes the round's groups before each call (see hvlaunch.torch) and closes the groups afterwards.
    If the script has called init(), training begins in init()'s round, and the groups of the last round stay open. Objects that
    belong to a group, such as a model in DistributedDataParallel, must be made inside `train`. Outside elastic jobs run() does
    init(), state.sync() and a single call.

    An exception of `train` ends the worker, except WorkersChanged, CollectiveFailed and torch's own errors of collectives. A worker
    that the job no longer needs ends by SystemExit(0). Raises AlreadyInitialized if an elastic job has a process group that init()
    did not make.
    """

    @wraps(train)
    def wrapper(state: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not is_elastic():
            return _train_once(state, lambda: train(state, *args, **kwargs))
        with placed() as training:
            return training.run(state, lambda: train(state, *args, **kwargs))

    return wrapper


def _train_once(state: State, train: Callable[[], T]) -> T:
    # Groups that the script made stay open after training: the script may still use its groups.
    is_ours = not current.is_initialized()
    current.init()
    state.forget()
    state.sync()
    result = train()
    if is_ours:
        current.shutdown()
    return result
