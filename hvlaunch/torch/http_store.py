"""The store that workers share by way of the rendezvous, and torch's init_method hvlaunch://."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from torch import distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, Store, register_rendezvous_handler

from hvlaunch.rendezvous.client import Client, read_lease
from hvlaunch.rendezvous.client_errors import (
    NoRendezvous,
    RendezvousClosed,
    RendezvousError,
    RendezvousUnreachable,
    TooManyConnections,
    WaitTimeout,
)
from hvlaunch.torch.group_errors import BadParameter
from hvlaunch.torch.meeting import meet, round_scope
from hvlaunch.torch.place import Place

__all__ = ["HTTPStore", "default_scope", "handle", "register", "rendezvous_client"]

_DEFAULT_TIMEOUT = timedelta(seconds=300)  # as of torch's own stores

_QueueEmpty: type[Exception] = getattr(dist, "QueueEmptyError", DistStoreError)  # torch's queues came late

_kept: set[HTTPStore] = set()
"""C++ calls methods written in Python only while Python has a reference, too."""


class HTTPStore(Store):
    """A `torch.distributed.Store` whose values are at the rendezvous, so they stay when a worker ends.

        url, token: those of the rendezvous; by default the job's, from HVLAUNCH_RENDEZVOUS and HVLAUNCH_TOKEN (for another
    rendezvous, HVLAUNCH_TOKEN_FILE, else HVLAUNCH_TOKEN). certificate: of a rendezvous on another machine, a file or a
    fingerprint; by default HVLAUNCH_RENDEZVOUS_CERT. scope: the part of the rendezvous for this store; by default
    one for this round. Keys stay until they are deleted: a second process group in the same scope finds the keys of
    the first. timeout: of `get`, `wait` and similar methods (timedelta).

    Good for small groups and for control messages: Gloo sends N² requests to a store, and TCPStore answers faster.
    Queues are not keys: wait() and check() do not see them.

    Methods raise torch's DistStoreError, or DistNetworkError if the rendezvous can't be reached; `__cause__` is the
    client's error. The constructor raises NoRendezvous. The store stays open until close().
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        scope: str | None = None,
        timeout: timedelta = _DEFAULT_TIMEOUT,
        *,
        certificate: str | None = None,
    ) -> None:
        self._begin(rendezvous_client(url, token, certificate), scope or default_scope(os.environ), timeout)

    def _begin(self, client: Client, scope: str, timeout: timedelta) -> None:
        Store.__init__(self)
        self._client = client
        self._scope = scope
        self.set_timeout(timeout)
        _kept.add(self)

    def __repr__(self) -> str:
        return f"HTTPStore({self._client.url!r}, scope={self._scope!r})"

    def close(self) -> None:
        """Close the store: call it when no process group uses it any more. Its keys stay at the rendezvous."""
        _kept.discard(self)
        self._client.close()

    def clone(self) -> HTTPStore:
        """Another store with the same keys, and its own timeout."""
        copy = HTTPStore.__new__(HTTPStore)
        copy._begin(self._client, self._scope, timedelta(seconds=self._seconds))  # noqa: SLF001 (it is one of ours)
        return copy

    # One key:

    def set(self, key: str, value: str | bytes) -> None:
        """Set the key to this value, whatever it had."""
        with _as_torchs():
            self._client.put(self._scope, key, _bytes(value))

    def get(self, key: str) -> bytes:
        """The value, as soon as there is one."""
        with _as_torchs():
            return self._client.wait(self._scope, key, self._seconds)

    def add(self, key: str, value: int) -> int:
        """Add to the number that the key has, or to 0 where it is not set; the sum."""
        with _as_torchs():
            return self._client.add(self._scope, key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Put this behind the value that the key has, if it has one."""
        with _as_torchs():
            self._client.append(self._scope, key, _bytes(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set the key if it has the expected value, or if it is not set and b"" is expected; returns the value after that.

        If it is not set, and another value is expected, returns the expected value.
        """
        expected, desired = _bytes(expected_value), _bytes(desired_value)
        with _as_torchs():
            value, version = self._client.read(self._scope, key)
            while (value or b"") == expected:
                done, (value, version) = self._client.compare_and_set(self._scope, key, desired, version)
                if done:
                    return desired
            return expected if value is None else value

    def delete_key(self, key: str) -> bool:
        """Delete the key; False if it was not set."""
        with _as_torchs():
            return self._client.delete(self._scope, key)

    # Many keys:

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return as soon as all keys are set."""
        if keys:
            with _as_torchs():
                self._client.wait_all(
                    self._scope, keys, self._seconds if timeout is None else timeout.total_seconds()
                )

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set, now."""
        with _as_torchs():
            return self._client.check(self._scope, keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values, as soon as all keys are set."""
        deadline = time.monotonic() + self._seconds
        while keys:
            with _as_torchs():
                values = self._client.get_many(self._scope, keys)
                found = [value for value in values if value is not None]
                if len(found) == len(values):
                    return found
                self._client.wait_all(self._scope, keys, max(deadline - time.monotonic(), 0.0))
        return []

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set each key to its value, all at once. Raises DistStoreError where there are not as many values as keys."""
        if len(keys) != len(values):
            raise DistStoreError(f"multi_set: {len(keys)} keys and {len(values)} values")
        with _as_torchs():
            self._client.put_many(self._scope, dict(zip(keys, map(_bytes, values), strict=True)))

    def num_keys(self) -> int:
        """How many keys are set in the scope."""
        with _as_torchs():
            return self._client.count(self._scope)

    def list_keys(self) -> list[str]:
        """The keys that are set in the scope."""
        with _as_torchs():
            return self._client.keys(self._scope)

    def has_extended_api(self) -> bool:
        """Whether there are append, multi_get and multi_set."""
        return True

    # Queues, each one value: its items behind one another, with their lengths.

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put an item at the end of this queue."""
        data = _bytes(value)
        with _as_torchs():
            self._client.append(self._queues, key, struct.pack("!I", len(data)) + data)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the oldest item out of this queue, as soon as there is one. Raises torch's QueueEmptyError if there is none, and block is false."""
        deadline = time.monotonic() + self._seconds
        seen = 0
        while True:
            with _as_torchs():
                value, version = self._client.read(self._queues, key)
                while value:
                    end = struct.calcsize("!I") + struct.unpack_from("!I", value)[0]
                    item, rest = value[struct.calcsize("!I") : end], value[end:]
                    done, (value, version) = self._client.compare_and_set(self._queues, key, rest, version)
                    if done:
                        return item
                if not block:
                    raise _QueueEmpty(f"queue {key} is empty")
                left = deadline - time.monotonic()
                if left <= 0:
                    cause = f"nothing was pushed to queue {key} within {self._seconds:g} s"
                    raise DistStoreError(_wait_timeout(cause, self._seconds, key))
                seen = self._client.watch(self._queues, key, since=seen, timeout=left).version

    def queue_len(self, key: str) -> int:
        """How many items this queue has."""
        with _as_torchs():
            value = self._client.get(self._queues, key) or b""
        count = start = 0
        while start < len(value):
            start += struct.calcsize("!I") + struct.unpack_from("!I", value, start)[0]
            count += 1
        return count

    @property
    def _seconds(self) -> float:
        seconds: float = self.timeout.total_seconds()  # type: ignore[attr-defined] # torch's stub lacks it
        return seconds

    @property
    def _queues(self) -> str:
        return f"{self._scope}.queues"

    # C++ asks for these by its own names:

    deleteKey = delete_key  # noqa: N815
    """delete_key()."""
    getNumKeys = num_keys  # noqa: N815
    """num_keys()."""


def rendezvous_client(url: str | None, token: str | None, certificate: str | None = None) -> Client:
    """A client of this rendezvous; what is None comes from the environment. Raises NoRendezvous."""
    own = os.environ.get("HVLAUNCH_RENDEZVOUS")
    if url is None:
        url = own
    if not url:
        hint = "start this program with hvlaunch, or give the rendezvous' url"
        raise NoRendezvous("HVLAUNCH_RENDEZVOUS is not set", hint=hint)
    certificate = certificate or os.environ.get("HVLAUNCH_RENDEZVOUS_CERT")
    lease = read_lease(os.environ) if url == own else 0.0
    return Client(
        url, token or _token(os.environ, of_this_job=url == own), certificate=certificate, lease=lease
    )


def default_scope(environ: Mapping[str, str]) -> str:
    """A scope of this round's own in a job; elsewhere `torch`."""
    number = environ.get("HVLAUNCH_ROUND", "")
    return f"{round_scope(int(number))}.torch" if number.isdigit() else "torch"


def _token(environ: Mapping[str, str], *, of_this_job: bool) -> str:
    file = environ.get("HVLAUNCH_TOKEN_FILE")
    token = environ.get("HVLAUNCH_TOKEN", "")
    if file and not (of_this_job and token):
        try:
            token = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            cause = error.strerror if isinstance(error, OSError) else "it is not text"
            raise NoRendezvous(f"the token file {file} can't be read: {cause}") from error
    if not token:
        raise NoRendezvous(
            "the rendezvous' token is not set", hint="set HVLAUNCH_TOKEN_FILE or HVLAUNCH_TOKEN"
        )
    return token


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


@contextmanager
def _as_torchs() -> Iterator[None]:
    """What the client raises, as torch's callers expect it."""
    try:
        yield
    except (RendezvousUnreachable, RendezvousClosed, TooManyConnections) as error:
        raise DistNetworkError(str(error)) from error
    except WaitTimeout as error:
        raise DistStoreError(_wait_timeout(str(error), error.seconds, error.key)) from error
    except RendezvousError as error:
        raise DistStoreError(str(error)) from error


def _wait_timeout(cause: str, seconds: float, key: str) -> str:
    """In the words of torch's own stores, which its callers look for, and each of which has others."""
    return f"Wait timeout: {cause} (wait timeout after {1000 * seconds:.0f}ms, keys: /{key})"


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
