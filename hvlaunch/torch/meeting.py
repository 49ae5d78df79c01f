"""How the workers of a round find each other, and the port of rank 0."""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
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
    """HVLAUNCH_WORKER_PORTS, `FIRST-LAST`; None where every port may be used. Raises BadPlace."""
    text = environ.get("HVLAUNCH_WORKER_PORTS", "")
    if not text:
        return None
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if found is None or not 0 < int(found[1]) <= int(found[2]) < 1 << 16:
        raise BadPlace("HVLAUNCH_WORKER_PORTS", f"{text!r} is not a range of ports, FIRST-LAST")
    return range(int(found[1]), int(found[2]) + 1)


def reserve(ports: range) -> socket.socket:
    """A socket that listens on the first of these ports that is free. Raises PortsTaken."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
        except OSError:  # noqa: PERF203 (a taken port is an answer)
            continue
    raise PortsTaken(ports[0], ports[-1])


_CONNECT_TIME = 30.0
"""Seconds for a connection to a store that is known to listen."""

_HERE = "hvlaunch/here"
_ALL_HERE = "hvlaunch/all here"

_HINTS = {
    "srun": 'export MASTER_PORT=29500 MASTER_ADDR="$(scontrol show hostnames | head -n 1)" before srun',
    "Open MPI": "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 …",
    "MPICH": "mpirun -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 …",
}

_meetings: Counter[tuple[str, int]] = Counter()
"""How often a rank in this process has met the others in each scope or port: every meeting has keys of its own."""

_standing: dict[tuple[str, int, int], TCPStore] = {}
"""The stores at ports that were given, by address, port and rank."""


def round_scope(number: int) -> str:
    """The scope that has what the workers of a round tell each other."""
    return f"round.{number}"


class Post(Protocol):
    """Where an address is published: the job's rendezvous, as its Client has it."""

    def put(self, scope: str, key: str, value: bytes) -> None: ...
    def wait(self, scope: str, key: str, timeout: float) -> bytes: ...


def meet(place: Place, timeout: timedelta, client: Post | None) -> Store:
    """A store that all workers of the place's round have in common, once all are there. Collective.

    With a client, the address is published at the rendezvous (docs/rendezvous.md), and the port is any free one;
    without, rank 0 listens on the place's master_port. The store's own timeout is `timeout`, too.

    Raises NoMasterAddress, PortsTaken, RankZeroMissing, RankZeroGone, StoreUnreachable, RanksMissing, and what the client raises.
    """
    if place.size == 1:
        return _lonely_store(timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    if client is not None:
        store = _published(place, client, timeout)
    else:
        store = _at_master_port(place, timeout)
        if _is_torchruns():  # what is said there may be of workers before us: nobody is counted
            return store
    _check_in(store, place, deadline, timeout)
    return store


def _lonely_store(timeout: timedelta) -> Store:
    store = HashStore()
    store.set_timeout(timeout)
    return store


def _published(place: Place, client: Post, timeout: timedelta) -> Store:
    scope = round_scope(place.round)
    times = _meetings[scope, place.rank]
    _meetings[scope, place.rank] += 1
    key = f"store.{times}" if times else "store"
    if place.master_addr is None:
        raise _no_master(place)
    if place.rank == 0:
        store = _listen(place.size, timeout)
        client.put(scope, key, f"{_bracketed(place.master_addr)}:{store.port}".encode())
        return store
    try:
        where = client.wait(scope, key, timeout.total_seconds())
    except WaitTimeout as error:
        raise RankZeroMissing(timeout.total_seconds()) from error
    # Rank 0 knows its port, but every host knows best how it reaches rank 0's host.
    return _connect(place.master_addr, int(where.rpartition(b":")[2]), place.size, timeout)


def _listen(size: int, timeout: timedelta) -> TCPStore:
    """On a free port; the store's own, or one of those that workers may use."""
    ports = port_range(os.environ)
    if ports is None:
        return TCPStore("localhost", 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
    listener = reserve(ports)
    port = listener.getsockname()[1]
    return TCPStore(
        "localhost",
        port,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _connect(address: str, port: int, size: int, timeout: timedelta) -> TCPStore:
    """To a store that listens already: what does not answer soon never will, and torch would try for all of timeout."""
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
    """The port is given, so the first store there stays: a new one could be taken for it, or it for the new one."""
    if place.master_addr is None or place.master_port is None:
        raise _no_master(place)
    where = place.master_addr, place.master_port
    own = *where, place.rank
    if own not in _standing:
        _standing[own] = _open(place, *where, timeout)
    times = _meetings[f"{where}", place.rank]
    _meetings[f"{where}", place.rank] += 1
    store = PrefixStore(f"meeting.{times}", _standing[own])
    store.set_timeout(timeout)
    return store


def _open(place: Place, address: str, port: int, timeout: timedelta) -> TCPStore:
    if place.rank > 0 or _is_torchruns():
        return _client_of(address, port, place.size, timeout)
    try:
        return TCPStore(address, port, place.size, is_master=True, timeout=timeout, wait_for_workers=False)
    except dist.DistError as error:
        raise StoreUnreachable(address, port, f"rank 0 can't listen on it: {_first_line(error)}") from error


def _is_torchruns() -> bool:
    """Whether torchrun itself has a store at MASTER_ADDR and MASTER_PORT."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _check_in(store: Store, place: Place, deadline: float, timeout: timedelta) -> None:
    """Wait until every rank is here; name those that are not. It takes each rank three requests, however many there are."""
    try:
        store.set(f"{_HERE}/{place.rank}", place.host)
        if store.add(_HERE, 1) == place.size:
            store.set(_ALL_HERE, "")
        missing = _missing(store, place.size, max(deadline - time.monotonic(), 0.001))
    except dist.DistNetworkError as error:
        raise RankZeroGone from error
    if missing:
        raise RanksMissing(missing, place.size, timeout.total_seconds())


def _missing(store: Store, size: int, seconds: float) -> list[int]:
    """The ranks that are not here within so many seconds."""
    try:
        store.wait([_ALL_HERE], timedelta(seconds=seconds))
    except dist.DistStoreError:
        return [rank for rank in range(size) if not store.check([f"{_HERE}/{rank}"])]
    return []


def _no_master(place: Place) -> NoMasterAddress:
    found = {"MASTER_ADDR": place.master_addr, "MASTER_PORT": place.master_port}
    missing = [name for name, value in found.items() if value is None]
    hint = _HINTS.get(place.launcher, f"set {' and '.join(missing)} to the same in all processes")
    return NoMasterAddress(missing, launcher=place.launcher, hint=hint)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
