"""Errors of groups of workers, and the interruptions of a round."""

from collections.abc import Sequence
from itertools import pairwise

from hvlaunch.errors import HvlaunchError

__all__ = [
    "AlreadyInitialized",
    "BadParameter",
    "BadPlace",
    "CollectiveFailed",
    "GroupError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "NoMasterAddress",
    "NotInitialized",
    "NotOffered",
    "PlacesClash",
    "PortsTaken",
    "RankZeroGone",
    "RankZeroMissing",
    "RanksMissing",
    "StoreUnreachable",
    "TooFewGPUs",
    "WorkersChanged",
]


class GroupError(HvlaunchError, RuntimeError):
    """Base of the errors of groups, for `except`.

    Try: the message names the next step.
    """


# A ValueError too: torch raises one here, and scripts catch that.
class NotInitialized(GroupError, ValueError):
    """`rank()`, `size()` or a collective was called before `init()`, or after `shutdown()`."""

    def __init__(self) -> None:
        super().__init__("this process is not in a group yet", hint="call hvlaunch.torch.init() first")


class NotOffered(GroupError, NotImplementedError):
    """Horovod has this function and hvlaunch does not. `name` is the function.

    Try: the message names the replacement (docs/reference/horovod.md).
    """

    def __init__(self, name: str, instead: str) -> None:
        super().__init__(f"hvlaunch.torch has no {name}", hint=f"use {instead}")
        self.name = name
        """The missing function."""


class AlreadyInitialized(GroupError):
    """torch.distributed already has a process group, made by the script, Lightning or accelerate."""

    def __init__(
        self,
        hint: str = "call either hvlaunch.torch.init() or torch.distributed.init_process_group(), not both",
    ) -> None:
        super().__init__("torch.distributed has a process group already", hint=hint)


class BadParameter(GroupError, ValueError):
    """An address `hvlaunch://...` lacks the rank of this process or gives a wrong rank. `name` is the parameter.

    A ValueError in torch's words, as for `tcp://` and `file://`.

    Try: `hvlaunch://` alone is enough under hvlaunch.
    """

    def __init__(self, name: str, cause: str, *, hint: str | None = None) -> None:
        parameter = "port number" if name == "port" else f"{name} parameter"
        super().__init__(
            f"Error initializing torch.distributed using hvlaunch:// rendezvous: {parameter} {cause}",
            hint=hint,
        )
        self.name = name
        """The parameter in the address."""


class BadPlace(GroupError, ValueError):
    """The environment lacks the rank of this process or gives a wrong value: `RANK`, `WORLD_SIZE` or `LOCAL_RANK`. `name` is the variable.

    Try: start the script with `hvlaunch`.
    """

    def __init__(self, name: str, cause: str, *, hint: str | None = None) -> None:
        super().__init__(f"variable {name}: {cause}", hint=hint)
        self.name = name
        """The variable."""


class NoMasterAddress(GroupError):
    """The launcher sets no variable with rank 0's address. `missing` are the variables that would.

    Try: set the variables, alike on every rank.
    """

    def __init__(self, missing: Sequence[str], *, launcher: str, hint: str) -> None:
        names = " and ".join(missing)
        verb = "is" if len(missing) == 1 else "are"
        super().__init__(
            f"rank 0 can't be found: started by {launcher}, and {names} {verb} not set", hint=hint
        )
        self.missing = tuple(missing)
        """The missing variables."""


class RankZeroMissing(GroupError):
    """Rank 0 did not publish its store within `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"rank 0 did not open its store within {seconds:g} s: it has not called init() yet, or hangs before that",
            hint="look at rank 0's output; or a longer init(timeout=…), if it has much to load",
        )
        self.seconds = seconds
        """Seconds waited."""


class RankZeroGone(GroupError):
    """Rank 0 came, and ended before all peers came; its store ended with it."""

    def __init__(self) -> None:
        super().__init__(
            "rank 0 has ended, or has given up, before all other workers came", hint="look at rank 0's output"
        )


class RanksMissing(GroupError):
    """The ranks in `missing` did not reach `init()` within `seconds`. All ranks must call it equally often."""

    def __init__(self, missing: Sequence[int], size: int, seconds: float) -> None:
        which = f"rank {_fold(missing)}" if len(missing) == 1 else f"ranks {_fold(missing)}"
        super().__init__(
            f"{len(missing)} of {size} workers did not come within {seconds:g} s: {which}",
            hint="look at their output; or a longer init(timeout=…), if they have much to load",
        )
        self.missing = tuple(missing)
        """The missing ranks, in order."""
        self.size = size
        """Number of workers expected."""
        self.seconds = seconds
        """Seconds waited."""


class StoreUnreachable(GroupError):
    """Rank 0's store is at `address` and `port`, and this process can't connect: a firewall, or rank 0 has ended.

    Try: look at rank 0's output; open the firewall (docs/reference/rendezvous.md#what-to-open-in-a-firewall).
    """

    def __init__(self, address: str, port: int, cause: str) -> None:
        super().__init__(
            f"no connection to rank 0's store at {address} port {port}: {cause}",
            hint="look at rank 0's output, and whether a firewall lets this port through",
        )
        self.address = address
        """Address of rank 0's store."""
        self.port = port
        """Port of rank 0's store."""


class PortsTaken(GroupError):
    """No port for workers (`first` to `last`) is free on rank 0's host, where `hvlaunch.torch` takes a third."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__(
            f"none of the ports {first} to {last} is free for rank 0", hint="a wider --worker-port-range"
        )
        self.first = first
        """First port for workers."""
        self.last = last
        """Last port for workers."""


class PlacesClash(GroupError):
    """Two ranks claim the same local rank of the same host: machines share a name, or variables were set."""

    def __init__(self, ranks: tuple[int, int], local_rank: int) -> None:
        super().__init__(
            f"ranks {ranks[0]} and {ranks[1]} have the same local rank {local_rank} on the same host",
            hint="check LOCAL_RANK, and that no two hosts have the same name",
        )
        self.ranks = ranks
        """The two ranks."""
        self.local_rank = local_rank
        """The local rank that both claim."""


class TooFewGPUs(GroupError):
    """The worker's local rank exceeds the number of visible GPUs, `gpus`.

    Try: fewer slots on this host, `CUDA_VISIBLE_DEVICES`, or `init("gloo")`.
    """

    def __init__(self, local_rank: int, gpus: int, *, host: str) -> None:
        super().__init__(
            f"there is no GPU for local rank {local_rank}: only {gpus} are visible",
            host=host,
            hint=f"at most {gpus} workers on this host, or init('gloo')",
        )
        self.local_rank = local_rank
        """The worker's local rank."""
        self.gpus = gpus
        """Number of GPUs that the worker sees."""


def _fold(numbers: Sequence[int]) -> str:
    """Return numbers as `0, 3-5, 9`."""
    ordered = sorted(numbers)
    cuts = [index for index, (low, high) in enumerate(pairwise(ordered), 1) if high != low + 1]
    runs = [ordered[begin:end] for begin, end in pairwise([0, *cuts, len(ordered)])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


class WorkersChanged(Exception):
    """Not an error: hosts or workers come or leave, and the round ends without loss, at the same place in every worker.

    Try: leave this to `elastic.run`.
    """


class CollectiveFailed(RuntimeError):
    """A peer is gone or late, or the driver declared the round broken: `elastic.run` returns to the last commit.

    Try: leave this to `elastic.run`.
    """


HostsUpdatedInterrupt = WorkersChanged
"""Horovod's name for WorkersChanged."""
HorovodInternalError = CollectiveFailed
"""Horovod's name for CollectiveFailed."""
