"""A store at the rendezvous that workers share, and torch's init_method hvlaunch://."""

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

from hvlaunch.rendezvous import (
    NoRendezvous,
    RendezvousClosed,
    RendezvousError,
    RendezvousUnreachable,
    TooManyConnections,
    WaitTimeout,
)
from hvlaunch.rendezvous.client import Client, read_lease
from hvlaunch.torch.current import meet, round_scope
from hvlaunch.torch.group_errors import BadParameter
from hvlaunch.torch.place import Place

__all__ = ["HTTPStore", "default_scope", "handle", "register", "rendezvous_client"]

# The default of torch's own stores.
_DEFAULT_TIMEOUT = timedelta(seconds=300)

# Old versions of torch have no queues.
_QueueEmpty: type[Exception] = getattr(dist, "QueueEmptyError", DistStoreError)

_kept: set[HTTPStore] = set()
"""Open stores. C++ can call Python methods only while Python holds a reference."""


class HTTPStore(Store):
    """A `torch.distributed.Store` whose values live at the rendezvous and survive the end of a worker.

    url, token: address and token of the rendezvous; the default is the job's, from HVLAUNCH_RENDEZVOUS and HVLAUNCH_TOKEN (for
    another rendezvous HVLAUNCH_TOKEN_FILE, else HVLAUNCH_TOKEN). certificate: a file or fingerprint, for a rendezvous on another
    machine; the default is HVLAUNCH_RENDEZVOUS_CERT. scope: the part of the rendezvous for this store; the default belongs to this
    round. Keys stay until deleted: a second process group in the same scope finds the first group's keys. timeout: for `get`,
    `wait` and similar methods (timedelta).

    Use it for small groups and control messages: Gloo sends N² requests to a store, and TCPStore answers faster. wait() and check()
    do not see queues.

    Methods raise torch's DistStoreError, or DistNetworkError if the rendezvous can't be reached; `__cause__` is the client's
    error. The constructor raises NoRendezvous. The store stays open until close().
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
        """Close the store, after the last process group has stopped using it. Keys stay at the rendezvous."""
        _kept.discard(self)
        self._client.close()

    def clone(self) -> HTTPStore:
        """Return a store with the same keys and a timeout of its own."""
        # Without __init__: a clone shares the connection and needs no settings from the environment.
        copy = HTTPStore.__new__(HTTPStore)
        copy._begin(self._client, self._scope, timedelta(seconds=self._seconds))  # noqa: SLF001 (it is one of ours)
        return copy

    # One key:

    def set(self, key: str, value: str | bytes) -> None:
        """Set the key to the value."""
        with _as_torchs():
            self._client.put(self._scope, key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for the key and return its value."""
        with _as_torchs():
            return self._client.wait(self._scope, key, self._seconds)

    def add(self, key: str, value: int) -> int:
        """Add to the key's number, or to 0 if unset, and return the sum."""
        with _as_torchs():
            return self._client.add(self._scope, key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the key's value, or set an unset key."""
        with _as_torchs():
            self._client.append(self._scope, key, _bytes(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set the key if it has the expected value, or if it is unset and b"" is expected; return the value afterwards.

        For an unset key and another expected value, return the expected value.
        """
        expected, desired = _bytes(expected_value), _bytes(desired_value)
        with _as_torchs():
            value, version = self._client.read(self._scope, key)
            # Another worker may change the key between reading and writing: the version tells, and the loop
            # reads again.
            while (value or b"") == expected:
                done, (value, version) = self._client.compare_and_set(self._scope, key, desired, version)
                if done:
                    return desired
            return expected if value is None else value

    def delete_key(self, key: str) -> bool:
        """Delete the key; return False if it was unset."""
        with _as_torchs():
            return self._client.delete(self._scope, key)

    # Many keys:

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until the keys are set."""
        if keys:
            with _as_torchs():
                self._client.wait_all(
                    self._scope, keys, self._seconds if timeout is None else timeout.total_seconds()
                )

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if the keys are set now."""
        with _as_torchs():
            return self._client.check(self._scope, keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for the keys and return their values."""
        deadline = time.monotonic() + self._seconds
        # A key may be deleted between a wait and the next reading, so this repeats both.
        while keys:
            with _as_torchs():
                values = self._client.get_many(self._scope, keys)
                present = [value for value in values if value is not None]
                if len(present) == len(values):
                    return present
                self._client.wait_all(self._scope, keys, max(deadline - time.monotonic(), 0.0))
        return []

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set the keys to the values, in one change. Raises DistStoreError if the numbers of keys and values differ."""
        if len(keys) != len(values):
            raise DistStoreError(f"multi_set: {len(keys)} keys and {len(values)} values")
        with _as_torchs():
            self._client.put_many(self._scope, dict(zip(keys, map(_bytes, values), strict=True)))

    def num_keys(self) -> int:
        """Return the number of keys in the scope."""
        with _as_torchs():
            return self._client.count(self._scope)

    def list_keys(self) -> list[str]:
        """Return the scope's keys."""
        with _as_torchs():
            return self._client.keys(self._scope)

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set exist."""
        return True

    # Queues, each one value: its items behind one another, with their lengths.

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Append an item to the queue."""
        data = _bytes(value)
        with _as_torchs():
            self._client.append(self._queues, key, struct.pack("!I", len(data)) + data)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Wait for the queue's oldest item and remove it. Without `block`, raise torch's QueueEmptyError for an empty queue."""
        deadline = time.monotonic() + self._seconds
        seen = 0
        while True:
            with _as_torchs():
                value, version = self._client.read(self._queues, key)
                while value:
                    end = struct.calcsize("!I") + struct.unpack_from("!I", value)[0]
                    item, remaining = value[struct.calcsize("!I") : end], value[end:]
                    done, (value, version) = self._client.compare_and_set(
                        self._queues, key, remaining, version
                    )
                    if done:
                        return item
                if not block:
                    raise _QueueEmpty(f"queue {key} is empty")
                left = deadline - time.monotonic()
                if left <= 0:
                    cause = f"nothing was pushed to queue {key} within {self._seconds:g} s"
                    raise DistStoreError(_wait_timeout(cause, self._seconds, key))
                # The watch returns at any change: another worker may take the item first, so the loop reads
                # again.
                seen = self._client.watch(self._queues, key, since=seen, timeout=left).version

    def queue_len(self, key: str) -> int:
        """Return the number of items in the queue."""
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
    """delete_key() by the name that C++ calls."""
    getNumKeys = num_keys  # noqa: N815
    """num_keys() by the name that C++ calls."""


def rendezvous_client(url: str | None, token: str | None, certificate: str | None = None) -> Client:
    """Return a client of this rendezvous; the environment gives values that are None. Raises NoRendezvous."""
    job_url = os.environ.get("HVLAUNCH_RENDEZVOUS")
    if url is None:
        url = job_url
    if not url:
        hint = "start this program with hvlaunch, or give the rendezvous' url"
        raise NoRendezvous("HVLAUNCH_RENDEZVOUS is not set", hint=hint)
    certificate = certificate or os.environ.get("HVLAUNCH_RENDEZVOUS_CERT")
    # HVLAUNCH_LEASE speaks of this job's rendezvous alone.
    lease = read_lease(os.environ) if url == job_url else 0.0
    return Client(
        url, token or _token(os.environ, of_this_job=url == job_url), certificate=certificate, lease=lease
    )


def default_scope(environ: Mapping[str, str]) -> str:
    """Return a scope for this round within a job, `torch` elsewhere."""
    number = environ.get("HVLAUNCH_ROUND", "")
    return f"{round_scope(int(number))}.torch" if number.isdigit() else "torch"


def _token(environ: Mapping[str, str], *, of_this_job: bool) -> str:
    file = environ.get("HVLAUNCH_TOKEN_FILE")
    token = environ.get("HVLAUNCH_TOKEN", "")
    # A token file for another rendezvous must not replace the job's own token, and vice versa.
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
    """Turn the client's errors into torch's."""
    try:
        yield
    except (RendezvousUnreachable, RendezvousClosed, TooManyConnections) as error:
        raise DistNetworkError(str(error)) from error
    except WaitTimeout as error:
        raise DistStoreError(_wait_timeout(str(error), error.seconds, error.key)) from error
    except RendezvousError as error:
        raise DistStoreError(str(error)) from error


def _wait_timeout(cause: str, seconds: float, key: str) -> str:
    """Return a message in the words of torch's own stores: callers search for these words, which differ between stores."""
    return f"Wait timeout: {cause} (wait timeout after {1000 * seconds:.0f}ms, keys: /{key})"


_OWN = {"rank", "world_size", "scope"}
_SHAPE = "hvlaunch:// in a worker of hvlaunch, hvlaunch://HOST:PORT?rank=R&world_size=N elsewhere"

_groups: Counter[tuple[str, str, int]] = Counter()
"""Number of groups that a rank of this process has made per scope and rendezvous. Keys stay, so each group has keys of its own."""


def register() -> None:
    """Register the scheme with torch."""
    # torch knows the scheme already.
    with contextlib.suppress(RuntimeError):
        register_rendezvous_handler("hvlaunch", handle)


def handle(
    url: str, timeout: timedelta = timedelta(seconds=300), **_: Any
) -> Iterator[tuple[Store, int, int]]:
    """Yield store, rank and size, once, for torch.

    `hvlaunch://` means this job's rendezvous and this worker's place; the store is rank 0's TCPStore, found through the rendezvous.
    `hvlaunch://HOST:PORT?rank=R&world_size=N` means another rendezvous; the store is an HTTPStore in the scope `torch`, or in
    `&scope=NAME`.

    Raises NoRendezvous, BadParameter, BadPlace, and errors of meeting the peers.
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
