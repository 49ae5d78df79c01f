"""The store that torchrun's agents use among themselves, for the ranks of a round and at its end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import cast

from torch.distributed import DistStoreError, Store

from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.client_errors import RendezvousUnreachable, WaitTimeout
from hvlaunch.torch.torchrun.barrier import NodePlace

__all__ = ["RoundOver", "RoundStore"]

_LOOK = 1.0  # seconds between looks at whether the round is over
_RANKS = "torchelastic/assigned_ranks/"
_ROLE = "torchelastic/role_info/"


class RoundOver(DistStoreError):
    """What is waited for will not come: the round has lost a node."""


class RoundStore(Store):
    """One round's values, on the rendezvous server: no node's death takes them along.

    over: whether the round has lost a node. Who waits is then told by RoundOver, but for the exchange of ranks just
    after a round was formed: an agent would take an error there for its own end. It gets an answer with which it
    starts its workers, and at its first look at them it is called to the next round.
    """

    def __init__(self, client: Client, scope: str, place: NodePlace, over: Callable[[], bool]) -> None:
        super().__init__()
        self._client = client
        self._scope = scope
        self._place = place
        self._over = over
        self._role = b""

    def set(self, key: str, value: bytes | str) -> None:
        data = _data(value)
        if key.startswith(_ROLE):
            self._role = data
        self._client.put(self._scope, key, data)

    def get(self, key: str) -> bytes:
        try:
            return self._awaited(key, self._deadline(None))
        except RoundOver:
            if not key.startswith(_RANKS):
                raise
            rank, size = self._place.rank, self._place.size
            return json.dumps([rank, size, rank, size]).encode()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        deadline = self._deadline(None)
        found = []
        for key in keys:
            try:
                found.append(self._awaited(key, deadline))
            except RoundOver:  # noqa: PERF203 (each key may be the missing one)
                if not key.startswith(_ROLE):
                    raise
                found.append(self._role)
        return found

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        self._client.put_many(
            self._scope, {key: _data(value) for key, value in zip(keys, values, strict=True)}
        )

    def add(self, key: str, amount: int) -> int:
        return self._client.add(self._scope, key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._client.check(self._scope, keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        deadline = self._deadline(timeout)
        for key in keys:
            self._awaited(key, deadline)

    def _deadline(self, timeout: timedelta | None) -> float:
        default = cast("timedelta", self.timeout)  # type: ignore[attr-defined]
        return time.monotonic() + (timeout or default).total_seconds()

    def _awaited(self, key: str, deadline: float) -> bytes:
        while True:
            try:
                left = 0.0 if self._over() else max(deadline - time.monotonic(), 0.0)
                return self._client.wait(self._scope, key, timeout=min(left, _LOOK))
            except (WaitTimeout, RendezvousUnreachable) as error:  # noqa: PERF203 (a look at each)
                if self._over():
                    raise RoundOver(f"the round is over, and nobody will set {key}") from None
                if time.monotonic() >= deadline:
                    raise DistStoreError(str(error)) from error
                if isinstance(error, RendezvousUnreachable):
                    time.sleep(min(_LOOK, max(deadline - time.monotonic(), 0.0)))


def _data(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
