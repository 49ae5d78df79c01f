"""The world of this process: one round's groups, made and ended together, and process sets.

A process may live through many rounds, but is in one world at a time. A world begins with meet(): its workers find their common
store, and the port of rank 0.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch

# Imported before any group: DistributedDataParallel would import this module within one, and its
# functions' default arguments would hold that group for ever.
import torch.distributed.nn.functional
from torch import distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from hvlaunch.rendezvous import WaitTimeout
from hvlaunch.rendezvous.client import Client
from hvlaunch.torch.backends import abort_groups, answer_agent, wait_until_idle
from hvlaunch.torch.group_errors import (
    AlreadyInitialized,
    BadPlace,
    NoMasterAddress,
    NotInitialized,
    PlacesClash,
    PortsTaken,
    RanksMissing,
    RankZeroGone,
    RankZeroMissing,
    StoreUnreachable,
    TooFewGPUs,
)
from hvlaunch.torch.place import Place

__all__ = [
    "Post",
    "ProcessSet",
    "World",
    "add_process_set",
    "choose_device",
    "cross_group",
    "cross_rank",
    "cross_size",
    "device",
    "enter",
    "global_process_set",
    "init",
    "is_initialized",
    "is_world",
    "leave",
    "let_go",
    "local_group",
    "local_rank",
    "local_size",
    "meet",
    "members",
    "port_range",
    "rank",
    "remove_process_set",
    "reserve",
    "round_scope",
    "shutdown",
    "size",
    "world",
]


_over: list[dist.ProcessGroup] = []
"""The groups of the last world.

A Gloo group waits for its threads when its last owner releases it, and a thread that returns a Python tensor waits for Python's
lock. If DistributedDataParallel is the last owner, it holds that lock meanwhile, and neither ends. This list is released
without the lock.
"""

_PATIENCE = 1.0
"""Seconds for the threads of the last world's groups to end; most are idle by then."""


@dataclass(frozen=True)
class World:
    """The workers of a round as this worker sees them: a global, a local and a cross group.

    `form` makes a world; `leave` or `abandon` ends it. A process has at most one, since torch has one global group.
    """

    place: Place
    store: Store
    device: torch.device
    """The device for this worker's model: its own GPU, or the processor."""
    local_ranks: tuple[int, ...]
    """Global ranks on this host, in order, including this worker."""
    cross_ranks: tuple[int, ...]
    """Global ranks with this worker's local rank, a rank per host with so many workers, in order."""
    local_group: dist.ProcessGroup
    cross_group: dist.ProcessGroup
    timeout: timedelta | None
    """Longest duration of a collective; None means torch's."""
    excepthook: Callable[..., object]
    """The exception hook from before torch's, which adds `[rank0]` to the lines of a traceback."""

    @classmethod
    def form(
        cls,
        place: Place,
        meet: Callable[[Place, timedelta], Store],
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> World:
        """Meet the round's other workers and make the groups. Collective.

        `meet` returns their common store. `backend` is a backend's name in torch; the default is NCCL with CUDA, else Gloo. `timeout`
        bounds the wait for peers and each collective; the default is torch's.

        Raises AlreadyInitialized, TooFewGPUs, PlacesClash, and errors of `meet`; then there is no group.
        """
        if dist.is_initialized():
            raise AlreadyInitialized
        backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        device = choose_device(place, backend)
        if device.type == "cuda":
            # Before the group: NCCL takes the current device, and a default of GPU 0 would put every rank
            # there.
            torch.cuda.set_device(device)
        store = meet(place, timeout or default_pg_timeout)
        excepthook = sys.excepthook
        answer_agent()
        # No device_id: with it, NCCL would connect every group in its making, and every rank be part of that.
        with _local_rank(device):
            dist.init_process_group(
                backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout
            )
        try:
            local, cross = members(place, _homes(place, _carrier(backend, device)))
            # Every rank makes its local group first: so no two groups wait for each other. They cost each rank
            # two small groups, however many there are; used or not, local_group() is then no collective.
            local_group, cross_group = (_group(ranks, timeout) for ranks in (local, cross))
        except BaseException:
            dist.destroy_process_group()
            _restore(excepthook)
            raise
        # Training goes on meanwhile: releasing takes as long as making the groups.
        let_go(is_awaited=False)
        return cls(place, store, device, local, cross, local_group, cross_group, timeout, excepthook)

    @property
    def cross_rank(self) -> int:
        """The worker's index among the workers with its local rank, one per host."""
        return self.cross_ranks.index(self.place.rank)

    @property
    def carrier(self) -> torch.device:
        """The device whose tensors the global group's backend accepts."""
        return _carrier(dist.get_backend(), self.device)

    def leave(self) -> None:
        """End the groups after every worker has called it. Collective; does not wait for a lost worker."""
        have_all_come = False
        # A failing worker reports its error itself; here all is done.
        with contextlib.suppress(RuntimeError):
            dist.barrier(device_ids=None if self.carrier.index is None else [self.carrier.index])
            have_all_come = True
        # Gloo's threads first: the script may end here, or keep a model that owns the groups.
        wait_until_idle()
        self._end(breaks=not have_all_come)
        if have_all_come:
            # Nothing is stuck: no thread of ours need stay behind when Python ends.
            _over.clear()
        let_go()

    def abandon(self) -> None:
        """End the groups at once, regardless of peers. Their remains are released when the next world stands."""
        self._end(breaks=True)

    def _end(self, *, breaks: bool) -> None:
        if dist.is_initialized():
            if breaks:
                # torch would wait for collectives that peers have left.
                abort_groups()
            _over.extend(dist.distributed_c10d._world.pg_map)  # noqa: SLF001 (those of new_group are nowhere else)
            dist.destroy_process_group()
        _restore(self.excepthook)


_releasing: threading.Thread | None = None


def let_go(*, is_awaited: bool = True) -> None:
    """Release the last world's groups, after everything else of that world is gone.

    A thread of Gloo may be stuck for ever in a half-sent message (see elastic/training.py). Then only a daemon thread waits for it.
    """
    global _releasing  # noqa: PLW0603
    if _over:
        _releasing = threading.Thread(target=_over.clear, name="hvlaunch let go", daemon=True)
        _releasing.start()
    if is_awaited and _releasing is not None:
        _releasing.join(_PATIENCE)


def _restore(excepthook: Callable[..., object]) -> None:
    """Restore the earlier exception hook, unless the script has set its own. torch wraps the hook again for each group."""
    if getattr(sys.excepthook, "__module__", None) == dist.distributed_c10d.__name__:
        sys.excepthook = excepthook


@contextlib.contextmanager
def _local_rank(device: torch.device) -> Iterator[None]:
    """Let LOCAL_RANK be the number of this GPU.

    NCCL's groups from torch 2.15 on use the GPU of LOCAL_RANK, else of the rank, and not the current device. An elastic worker keeps
    its GPU while its local rank changes, and some launchers do not set LOCAL_RANK.
    """
    before = os.environ.get("LOCAL_RANK")
    if device.index is not None:
        os.environ["LOCAL_RANK"] = str(device.index)
    try:
        yield
    finally:
        os.environ.pop("LOCAL_RANK", None)
        if before is not None:
            os.environ["LOCAL_RANK"] = before


def choose_device(place: Place, backend: str) -> torch.device:
    """Return the GPU of this slot or local rank, or the only visible GPU; the processor without CUDA.

    Raises TooFewGPUs if the backend is NCCL and this worker has no GPU.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = place.local_rank if place.slot is None else place.slot
    # --gpus-per-worker: all that is visible is this worker's.
    if "HVLAUNCH_OWN_GPUS" in os.environ:
        index = 0
    if index < gpus:
        return torch.device("cuda", index)
    # The launcher shows each worker a GPU of its own.
    if gpus == 1:
        return torch.device("cuda", 0)
    if "nccl" in backend:
        raise TooFewGPUs(index, gpus, host=place.host)
    return torch.device("cpu")


def members(place: Place, homes: list[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of this place's local and cross groups. `homes` has each rank's (number of its host, local rank).

    Raises PlacesClash.
    """
    seen: dict[tuple[int, int], int] = {}
    for rank, whose in enumerate(homes):
        if (other := seen.setdefault(whose, rank)) != rank:
            raise PlacesClash((other, rank), whose[1])
    host, local_rank = homes[place.rank]
    local = tuple(rank for rank, (its_host, _) in enumerate(homes) if its_host == host)
    cross = tuple(rank for rank, (_, number) in enumerate(homes) if number == local_rank)
    return local, cross


def _homes(place: Place, carrier: torch.device) -> list[tuple[int, int]]:
    """Exchange hosts and local ranks among all workers. Collective, and the first: it shows that the group works."""
    digest = hashlib.sha256(place.host.encode(errors="surrogateescape")).digest()
    # Host names differ in length, and collectives need equal shapes: eight bytes of a digest stand for a
    # name.
    home = torch.tensor([int.from_bytes(digest[:8], "big", signed=True), place.local_rank], device=carrier)
    everyones = [torch.empty_like(home) for _ in range(place.size)]
    dist.all_gather(everyones, home)
    return [(int(host), int(local_rank)) for host, local_rank in torch.stack(everyones).tolist()]


def _group(ranks: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup:
    everyone = dist.group.WORLD
    if everyone is not None and len(ranks) == everyone.size():
        return everyone
    group: dist.ProcessGroup
    # Otherwise torch would make every rank take part in the making of every group.
    group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    return group


def _carrier(backend: str, device: torch.device) -> torch.device:
    return device if "nccl" in backend else torch.device("cpu")


_world: World | None = None


def init(backend: str | None = None, timeout: timedelta | None = None) -> None:
    """Do the work of hvlaunch.torch.init() for a place that the environment gives."""
    if _world is not None:
        return
    place = Place.from_environment()
    enter(World.form(place, partial(meet, client=_job_client(place)), backend=backend, timeout=timeout))


def shutdown() -> None:
    """Wait until all workers call it, then leave the group. Collective. Does nothing without a group."""
    if _world is not None:
        _world.leave()
        leave()


def enter(new: World) -> None:
    """Make `new` the process's world: the elastic entry, with a world formed elsewhere."""
    global _world  # noqa: PLW0603 (torch's group is the process', too)
    _world = new


def leave() -> None:
    """Leave the process's world at once, without waiting for peers; the elastic exit from a broken round."""
    global _world  # noqa: PLW0603
    if _world is not None:
        _world.abandon()
    _world = None


def world() -> World:
    """Return the process's world. Raises NotInitialized, like every function below."""
    if _world is None:
        raise NotInitialized
    return _world


def is_world(other: World | None) -> bool:
    """Return True if the process is in this world."""
    return other is not None and other is _world


def is_initialized() -> bool:
    """Return True between init() and shutdown()."""
    return _world is not None


def rank() -> int:
    """Return the worker's number among all workers, from 0. Raises NotInitialized before init()."""
    return world().place.rank


def size() -> int:
    """Return the number of workers. Raises NotInitialized before init()."""
    return world().place.size


def local_rank() -> int:
    """Return the worker's number among the workers of its host, from 0. Raises NotInitialized before init()."""
    return world().place.local_rank


def local_size() -> int:
    """Return the number of workers on this host. Raises NotInitialized before init()."""
    return len(world().local_ranks)


def cross_rank() -> int:
    """Return the worker's number among the workers with its local rank, one per host. Raises NotInitialized before init()."""
    return world().cross_rank


def cross_size() -> int:
    """Return the number of hosts with a worker of this local rank. Raises NotInitialized before init()."""
    return len(world().cross_ranks)


def local_group() -> dist.ProcessGroup:
    """Return the group of this host's workers, for torch's `group=`. Raises NotInitialized before init()."""
    return world().local_group


def cross_group() -> dist.ProcessGroup:
    """Return the group of the workers with this local rank, one per host, for torch's `group=`. Raises NotInitialized before init()."""
    return world().cross_group


def device() -> torch.device:
    """Return the device for this worker's model: its own GPU, or the processor. Raises NotInitialized before init()."""
    return world().device


def _job_client(place: Place) -> Client | None:
    """Return a client of the job's rendezvous; None if hvlaunch did not give this place or no rendezvous is reachable."""
    if place.launcher != "hvlaunch" or place.size == 1:
        return None
    return Client.from_environment() if "HVLAUNCH_RENDEZVOUS" in os.environ else None


class ProcessSet:
    """A set of ranks of the world, in order. It works after add_process_set(), once in each world."""

    def __init__(self, ranks: Sequence[int] | None) -> None:
        """`ranks` None means all ranks."""
        self._ranks = None if ranks is None else tuple(sorted(set(ranks)))
        self._made: tuple[World, dist.ProcessGroup | None] | None = None

    @property
    def is_all(self) -> bool:
        """True for the set of all workers, whatever their number."""
        return self._ranks is None

    @property
    def ranks(self) -> list[int]:
        """The global ranks, in order. Raises NotInitialized for the set of all workers without a world."""
        return list(range(world().place.size)) if self._ranks is None else list(self._ranks)

    def size(self) -> int:
        """Return the number of ranks in the set."""
        return len(self.ranks)

    def rank(self) -> int:
        """Return the worker's number in the set. Raises ValueError for a worker outside the set."""
        return self.ranks.index(world().place.rank)

    def included(self) -> bool:
        """Return True if this worker is in the set."""
        return world().place.rank in self.ranks

    @property
    def group(self) -> dist.ProcessGroup:
        """Torch's group of the set. Raises ValueError if the set was not added in this world, or this worker is outside."""
        if self._ranks is None:
            # For its NotInitialized: torch may have a group that the script has made itself.
            world()
            if dist.group.WORLD is None:
                raise ValueError("torch.distributed has no default group")
            return dist.group.WORLD
        if self._made is None or self._made[0] is not world():
            raise ValueError(f"{self} was not added: every worker calls add_process_set() with it")
        if self._made[1] is None:
            raise ValueError(f"rank {world().place.rank} is not in {self}")
        return self._made[1]

    def add(self) -> None:
        """Make the set's group. Collective among all workers. Raises ValueError for ranks that do not exist."""
        if self._ranks is None:
            return
        if not self._ranks or not 0 <= self._ranks[0] <= self._ranks[-1] < world().place.size:
            raise ValueError(f"{self}: the world has the ranks 0 to {world().place.size - 1}")
        # torch gives workers outside the set a marker instead of a group.
        made = dist.new_group(list(self._ranks), timeout=world().timeout)
        self._made = world(), made if isinstance(made, dist.ProcessGroup) else None

    def remove(self) -> bool:
        """End the set's group; return False if there was none. Collective among all workers."""
        if self._made is None or self._made[0] is not world():
            return False
        _, group = self._made
        self._made = None
        if group is not None:
            dist.destroy_process_group(group)
        return True

    def __repr__(self) -> str:
        return "ProcessSet(all ranks)" if self._ranks is None else f"ProcessSet({list(self._ranks)})"


global_process_set = ProcessSet(None)
"""The set of all workers."""


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make the group of these ranks. Collective: every worker calls it with the same ranks, also workers outside the set."""
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    added.add()
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """End the group of a set; return False if it was not added. Collective among all workers."""
    return process_set.remove()


_BACKLOG = 2048


def port_range(environ: Mapping[str, str]) -> range | None:
    """Return the ports in HVLAUNCH_WORKER_PORTS (`FIRST-LAST`); None if every port is allowed. Raises BadPlace."""
    text = environ.get("HVLAUNCH_WORKER_PORTS", "")
    if not text:
        return None
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if match is None or not 0 < int(match[1]) <= int(match[2]) < 1 << 16:
        raise BadPlace("HVLAUNCH_WORKER_PORTS", f"{text!r} is not a range of ports, FIRST-LAST")
    return range(int(match[1]), int(match[2]) + 1)


def reserve(ports: range) -> socket.socket:
    """Return a socket that listens on the first free port of the range. Raises PortsTaken."""
    # Workers may reach rank 0 by either family, and only one port can be published.
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
        except OSError:  # noqa: PERF203 (a taken port is an answer)
            continue
    raise PortsTaken(ports[0], ports[-1])


_CONNECT_TIME = 30.0
"""Seconds for a connection to a store that already listens."""

_HERE = "hvlaunch/here"
_ALL_HERE = "hvlaunch/all here"

_HINTS = {
    "srun": 'export MASTER_PORT=29500 MASTER_ADDR="$(scontrol show hostnames | head -n 1)" before srun',
    "Open MPI": "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 …",
    "MPICH": "mpirun -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 …",
}

_meetings: Counter[tuple[str, int]] = Counter()
"""Number of meetings of a rank of this process per scope or port: each meeting has keys of its own."""

_standing: dict[tuple[str, int, int], TCPStore] = {}
"""Stores at given ports, by address, port and rank."""


def round_scope(number: int) -> str:
    """Return the scope for values of a round's workers."""
    return f"round.{number}"


class Post(Protocol):
    """Publishes an address, like a Client of the job's rendezvous."""

    def put(self, scope: str, key: str, value: bytes) -> None: ...
    def wait(self, scope: str, key: str, timeout: float) -> bytes: ...


def meet(place: Place, timeout: timedelta, client: Post | None) -> Store:
    """Return a store that the round's workers share, after every worker has come. Collective.

    With a client, the address is published at the rendezvous (docs/reference/rendezvous.md), at any free port. Without a client, rank 0 listens
    on the place's master_port. `timeout` is also the store's own timeout.

    Raises NoMasterAddress, PortsTaken, RankZeroMissing, RankZeroGone, StoreUnreachable, RanksMissing, and errors of the client.
    """
    if place.size == 1:
        return _lonely_store(timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    if client is not None:
        store = _published(place, client, timeout)
    else:
        store = _at_master_port(place, timeout)
        # Keys at torchrun's store may come from earlier workers, so arrivals there are not counted.
        if _is_torchruns():
            return store
    _check_in(store, place, deadline, timeout)
    return store


def _lonely_store(timeout: timedelta) -> Store:
    store = HashStore()
    store.set_timeout(timeout)
    return store


def _published(place: Place, client: Post, timeout: timedelta) -> Store:
    scope = round_scope(place.round)
    # A script may call init() and shutdown() repeatedly in one round: an old key would lead to a closed
    # store.
    times = _meetings[scope, place.rank]
    _meetings[scope, place.rank] += 1
    key = f"store.{times}" if times else "store"
    if place.master_addr is None:
        raise _no_master(place)
    if place.rank == 0:
        store = _listen(place.size, timeout)
        # Published when the store listens: peers connect at once, and take a refusal for a failure.
        client.put(scope, key, f"{_bracketed(place.master_addr)}:{store.port}".encode())
        return store
    try:
        address = client.wait(scope, key, timeout.total_seconds())
    except WaitTimeout as error:
        raise RankZeroMissing(timeout.total_seconds()) from error
    # Rank 0 knows its port, but every host knows best how it reaches rank 0's host.
    return _connect(place.master_addr, int(address.rpartition(b":")[2]), place.size, timeout)


def _listen(size: int, timeout: timedelta) -> TCPStore:
    """Listen on a free port: any, or one that workers may use."""
    ports = port_range(os.environ)
    if ports is None:
        # The store listens at all addresses; this one is only for our own connection. _check_in()
        # does the waiting, since it can name missing ranks.
        return TCPStore("localhost", 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
    listener = reserve(ports)
    port = listener.getsockname()[1]
    # torch takes the listening socket over, so the port is never free in between.
    open_ = partial(
        TCPStore,
        "localhost",
        port,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    try:
        return open_()
    # The newer of torch 2.6's two servers can't take a socket over.
    except NotImplementedError:
        return open_(use_libuv=False)


def _connect(address: str, port: int, size: int, timeout: timedelta) -> TCPStore:
    """Connect to a store that already listens. torch would retry a dead address for the whole timeout, so a plain connection tries first."""
    try:
        socket.create_connection((address, port), min(_CONNECT_TIME, timeout.total_seconds())).close()
    except OSError as error:
        raise StoreUnreachable(address, port, error.strerror or str(error)) from error
    return _client_of(address, port, size, timeout)


def _client_of(address: str, port: int, size: int, timeout: timedelta) -> TCPStore:
    try:
        return TCPStore(address, port, size, is_master=False, timeout=timeout, wait_for_workers=False)
    except dist.DistError as error:
        raise StoreUnreachable(address, port, _first_line(error)) from error


def _at_master_port(place: Place, timeout: timedelta) -> Store:
    """Return the store at the given port. The first store stays: a later store could be confused with the first."""
    if place.master_addr is None or place.master_port is None:
        raise _no_master(place)
    address = place.master_addr, place.master_port
    key = *address, place.rank
    if key not in _standing:
        _standing[key] = _open(place, *address, timeout)
    times = _meetings[f"{address}", place.rank]
    _meetings[f"{address}", place.rank] += 1
    store = PrefixStore(f"meeting.{times}", _standing[key])
    # The standing store has the timeout of its first meeting.
    store.set_timeout(timeout)
    return store


def _open(place: Place, address: str, port: int, timeout: timedelta) -> TCPStore:
    if place.rank > 0 or _is_torchruns():
        return _client_of(address, port, place.size, timeout)
    try:
        return TCPStore(address, port, place.size, is_master=True, timeout=timeout, wait_for_workers=False)
    # torch 2.6 raises no more than this for a taken port.
    except RuntimeError as error:
        raise StoreUnreachable(address, port, f"rank 0 can't listen on it: {_first_line(error)}") from error


def _is_torchruns() -> bool:
    """Return True if torchrun itself has a store at MASTER_ADDR and MASTER_PORT."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _check_in(store: Store, place: Place, deadline: float, timeout: timedelta) -> None:
    """Wait until every rank has come, and name missing ranks. Costs each rank three requests, at any number of ranks."""
    try:
        # The key first, the count second: whoever completes the count must find every key.
        store.set(f"{_HERE}/{place.rank}", place.host)
        if store.add(_HERE, 1) == place.size:
            store.set(_ALL_HERE, "")
        # torch takes a timeout of 0 for none at all.
        missing = _missing(store, place.size, max(deadline - time.monotonic(), 0.001))
    except dist.DistNetworkError as error:
        raise RankZeroGone from error
    if missing:
        raise RanksMissing(missing, place.size, timeout.total_seconds())


def _missing(store: Store, size: int, seconds: float) -> list[int]:
    """Return the ranks that do not come within `seconds`."""
    try:
        store.wait([_ALL_HERE], timedelta(seconds=seconds))
    except dist.DistStoreError:
        return [rank for rank in range(size) if not store.check([f"{_HERE}/{rank}"])]
    return []


def _no_master(place: Place) -> NoMasterAddress:
    variables = {"MASTER_ADDR": place.master_addr, "MASTER_PORT": place.master_port}
    missing = [name for name, value in variables.items() if value is None]
    hint = _HINTS.get(place.launcher, f"set {' and '.join(missing)} to the same in all processes")
    return NoMasterAddress(missing, launcher=place.launcher, hint=hint)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
