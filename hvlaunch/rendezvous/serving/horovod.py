"""The scopes of Horovod's workers, open without a token."""

import json
from collections.abc import Iterable, Mapping

from hvlaunch.rendezvous.store import Store

__all__ = ["HorovodScopes"]

_VARIANT = "_process_set_hash_"
_NOTIFICATIONS = "worker_addresses"
"""Horovod's elastic driver would notify the workers of other hosts there; they register before training."""


class HorovodScopes:
    """`global`, `local_<host>`, `cross_<local_rank>` with their sizes, and the scopes of process sets beside each.

    Open only to clients at `addresses`, which may also write to `worker_addresses`. As in Horovod's own server, a DELETE
    of a rank means this rank has finished; the scope is cleared after its last rank.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._addresses: frozenset[str] = frozenset()
        self._finished: dict[str, set[str]] = {}
        self.round: int | None = None
        """The round of the open scopes."""

    def open(self, sizes: Mapping[str, int], addresses: Iterable[str], number: int) -> None:
        """Open these scopes to these addresses, and close all others, for the round of this number."""
        self.round = number
        self._sizes = dict(sizes)
        self._addresses = frozenset(addresses)
        self._finished.clear()

    def describe(self) -> bytes:
        """Return the state for restore()."""
        return json.dumps([self._sizes, sorted(self._addresses), self.round]).encode("ascii")

    def restore(self, described: bytes) -> None:
        """Open the scopes of an earlier server. The ranks already finished are unknown; the next open() counts anew."""
        self.open(*json.loads(described))

    def __contains__(self, scope: str) -> bool:
        return scope in self._sizes or scope.partition(_VARIANT)[0] in self._sizes

    def opens(self, method: str, scope: str, peer: str) -> bool:
        """True if a client at this address may use the scope so without a token."""
        # By address alone: Horovod's workers have no token.
        return peer in self._addresses and (scope in self or (method, scope) == ("PUT", _NOTIFICATIONS))

    def delete(self, store: Store, scope: str, key: str) -> None:
        """Delete the key; a rank's counts as finished."""
        if not key.isdecimal():
            store.delete(scope, key)
        elif scope in self._sizes:
            finished = self._finished.setdefault(scope, set())
            # A rank counts once, even if its DELETE is repeated.
            finished.add(key)
            if len(finished) >= self._sizes[scope]:
                del self._finished[scope]
                store.delete_scope(scope)
        else:
            # The size of a process set is unknown. All of its ranks have set their addresses before the first deletes its own.
            store.delete(scope, key)
            if not any(other.isdecimal() for other in store.keys_of(scope)):
                store.delete_scope(scope)

    def clear(self, store: Store) -> None:
        """Delete the keys of all open scopes."""
        for scope in store.scopes():
            if scope in self or scope == _NOTIFICATIONS:
                store.delete_scope(scope)
