"""How the workers of a round find their common store, and the port of rank 0."""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Protocol

from torch import distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from hvlaunch.rendezvous.client_errors import WaitTimeout
from hvlaunch.torch.group_errors import (
    BadPlace,
    NoMasterAddress,
    PortsTaken,
    RanksMissing,
    RankZeroGone,
    RankZeroMissing,
    StoreUnreachable,
)
from hvlaunch.torch.place import Place

__all__ = ["Post", "meet", "port_range", "reserve", "round_scope"]

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
    """Return the store at the given port. The first store there stays: a later one could be confused with it."""
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
