"""The scopes that Horovod's workers meet in, which know no token."""

import json
from collections.abc import Iterable, Mapping

from hvlaunch.rendezvous.store import Store

__all__ = ["HorovodScopes"]

_VARIANT = "_process_set_hash_"
_NOTIFICATIONS = "worker_addresses"
"""Where Horovod's elastic driver would notify the workers of other hosts. They tell it before they train."""


class HorovodScopes:
    """`global`, `local_<host>`, `cross_<local_rank>`, by their sizes, and the scopes of process sets beside each.

    Open only to clients at one of `addresses`; to these, `worker_addresses` is open for writing. As in Horovod's own server, a DELETE of a rank in one of them
    says that this rank has finished, and the scope is cleared when all have.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._addresses: frozenset[str] = frozenset()
        self._finished: dict[str, set[str]] = {}
        self.round: int | None = None
        """For which they are open."""

    def open(self, sizes: Mapping[str, int], addresses: Iterable[str], number: int) -> None:
        """From now on, these scopes and addresses, and no others, in the round of this number. Until the first time there are none."""
        self.round = number
        self._sizes = dict(sizes)
        self._addresses = frozenset(addresses)
        self._finished.clear()

    def describe(self) -> bytes:
        """What restore() takes."""
        return json.dumps([self._sizes, sorted(self._addresses), self.round]).encode("ascii")

    def restore(self, described: bytes) -> None:
        """Be open as another was. Which ranks have finished is not known any more; who counts on them is the next open()."""
        self.open(*json.loads(described))

    def __contains__(self, scope: str) -> bool:
        return scope in self._sizes or scope.partition(_VARIANT)[0] in self._sizes

    def opens(self, method: str, scope: str, peer: str) -> bool:
        """Whether a client at this address may use the scope like this without a token."""
        return peer in self._addresses and (scope in self or (method, scope) == ("PUT", _NOTIFICATIONS))

    def delete(self, store: Store, scope: str, key: str) -> None:
        """Forget the key, or, where it is a rank, count this rank as finished."""
        if not key.isdecimal():
            store.delete(scope, key)
        elif scope in self._sizes:
            finished = self._finished.setdefault(scope, set())
            finished.add(key)
            if len(finished) >= self._sizes[scope]:
                del self._finished[scope]
                store.delete_scope(scope)
        else:
            # How many are in a process set is not known. All have put their addresses before the first deletes them.
            store.delete(scope, key)
            if not any(other.isdecimal() for other in store.keys_of(scope)):
                store.delete_scope(scope)

    def clear(self, store: Store) -> None:
        """Forget all that these scopes hold."""
        for scope in store.scopes():
            if scope in self or scope == _NOTIFICATIONS:
                store.delete_scope(scope)
