"""`init_process_group(init_method="hvlaunch://…")`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torch.distributed import Store, register_rendezvous_handler

from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.client_errors import NoRendezvous
from hvlaunch.torch.group_errors import BadParameter
from hvlaunch.torch.http_store import HTTPStore
from hvlaunch.torch.meeting import meet
from hvlaunch.torch.place import Place

__all__ = ["handle", "register"]

_OWN = {"rank", "world_size", "scope"}
_SHAPE = "hvlaunch:// in a worker of hvlaunch, hvlaunch://HOST:PORT?rank=R&world_size=N elsewhere"

_groups: Counter[tuple[str, str, int]] = Counter()
"""How many groups a rank in this process has made in each scope of each rendezvous: keys stay, so every group has its own."""


def register() -> None:
    """Let torch know the scheme."""
    with contextlib.suppress(RuntimeError):  # it knows it already
        register_rendezvous_handler("hvlaunch", handle)


def handle(
    url: str, timeout: timedelta = timedelta(seconds=300), **_: Any
) -> Iterator[tuple[Store, int, int]]:
    """What torch calls: yields store, rank and size, once.

    `hvlaunch://` is this job's rendezvous and this worker's place; the store is then a TCPStore of rank 0's, found
    through the rendezvous. `hvlaunch://HOST:PORT?rank=R&world_size=N` is any rendezvous; the store is then an
    HTTPStore, in the scope `torch`, or as `&scope=NAME` says.

    Raises NoRendezvous, BadParameter and BadPlace, and what meeting the others raises.
    """
    parts = urlsplit(url)
    query = _query(parts.query)
    if parts.netloc:
        if parts.port is None:
            raise BadParameter("port", "missing", hint=_SHAPE)
        rank, size = _checked(_number(query, "rank"), _number(query, "world_size"))
        yield _store(f"http://{parts.netloc}", query.get("scope", "torch"), rank, timeout), rank, size
        return
    place = Place.from_environment()
    if place.launcher not in ("", "hvlaunch"):
        raise NoRendezvous(f"this process was started by {place.launcher}", hint=_SHAPE)
    rank, size = _checked(_number(query, "rank", place.rank), _number(query, "world_size", place.size))
    place = replace(place, rank=rank, size=size)
    client = Client.from_environment()
    yield meet(place, timeout, client), place.rank, place.size


def _store(url: str, scope: str, rank: int, timeout: timedelta) -> HTTPStore:
    times = _groups[url, scope, rank]
    _groups[url, scope, rank] += 1
    return HTTPStore(url, scope=f"{scope}.{times}" if times else scope, timeout=timeout)


def _query(text: str) -> dict[str, str]:
    query = {name: values[-1] for name, values in parse_qs(text).items()}
    if "token" in query:
        raise NoRendezvous(
            "a token is a secret, and must not be in an address",
            hint="set HVLAUNCH_TOKEN_FILE or HVLAUNCH_TOKEN",
        )
    if unknown := sorted(query.keys() - _OWN):
        raise NoRendezvous(f"hvlaunch:// does not know {', '.join(unknown)}", hint=_SHAPE)
    return query


def _number(query: dict[str, str], name: str, default: int | None = None) -> int:
    text = query.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise BadParameter(name, "missing", hint=_SHAPE)
    if not (text.isascii() and text.isdigit()):
        raise BadParameter(name, f"{text!r} is not a whole number (0 or more)")
    return int(text)


def _checked(rank: int, size: int) -> tuple[int, int]:
    if size < 1:
        raise BadParameter("world_size", f"{size} is less than 1")
    if rank >= size:
        raise BadParameter("rank", f"{rank} is too high, since world_size is {size}")
    return rank, size
