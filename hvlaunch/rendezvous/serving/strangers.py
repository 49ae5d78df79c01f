"""Who has connected and not shown yet that it belongs to the job: few at a time, and never at the job's cost.

Where one is too many, the one that has been here longest goes: who belongs to the job shows it at once. But an address
where the job has no workers, and that comes again and again, is refused before it costs more than that.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

__all__ = ["STRANGER_LIMITS", "StrangerLimits", "Strangers"]

ConnectionT = TypeVar("ConnectionT")


class StrangerLimits(NamedTuple):
    """How many strangers there may be at one time."""

    all: int = 256
    """From addresses that are not known, together."""
    from_one_address: int = 64
    """From one that is not known; of IPv6 a network of 64 bits counts as one, since who has one address has them all."""
    from_known_address: int = 1024
    """From one where the job has workers: they all come at once."""
    known_addresses: int = 20_000
    """How many are remembered."""
    turn: float = 1.0
    """Seconds that a stranger has before another one of its address, which is not known, takes its place."""


STRANGER_LIMITS = StrangerLimits()


class Strangers(Generic[ConnectionT]):
    """The connections of strangers, each group of them in the order in which they came."""

    def __init__(self, limits: StrangerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._site: OrderedDict[ConnectionT, str] = OrderedDict()
        self._unknown: OrderedDict[ConnectionT, None] = OrderedDict()
        self._at: dict[str, OrderedDict[ConnectionT, float]] = {}
        self._known: set[str] = set()

    def __len__(self) -> int:
        return len(self._site)

    def __contains__(self, connection: ConnectionT) -> bool:
        return connection in self._site

    def know(self, addresses: Iterable[str]) -> None:
        """The job has workers at these addresses: strangers from elsewhere can't take their places."""
        for address in addresses:
            if len(self._known) < self.limits.known_addresses:
                self._known.add(address)

    def is_welcome(self, address: str) -> bool:
        """Whether one from this address may enter: cheaper to ask than to let it in."""
        if address in self._known:
            return True
        there = self._at.get(_network(address))
        if there is None or len(there) < self.limits.from_one_address:
            return True
        return self._clock() - next(iter(there.values())) >= self.limits.turn

    def enter(self, connection: ConnectionT, address: str) -> ConnectionT | None:
        """One has come. Gives the one that must go for it, which counts no more."""
        is_known = address in self._known
        site = address if is_known else _network(address)
        there = self._at.get(site, ())
        gone = None
        if len(there) >= (self.limits.from_known_address if is_known else self.limits.from_one_address):
            gone = next(iter(there))
        elif not is_known and len(self._unknown) >= self.limits.all:
            gone = next(iter(self._unknown))
        if gone is not None:
            self.leave(gone)
        self._site[connection] = site
        self._at.setdefault(site, OrderedDict())[connection] = self._clock()
        if not is_known:
            self._unknown[connection] = None
        return gone

    def leave(self, connection: ConnectionT) -> None:
        """It has gone, or is no stranger any more. May be repeated."""
        site = self._site.pop(connection, None)
        if site is None:
            return
        self._unknown.pop(connection, None)
        there = self._at[site]
        del there[connection]
        if not there:
            del self._at[site]

    def first(self) -> ConnectionT | None:
        """The one that has been here longest."""
        return next(iter(self._site), None)

    def oldest(self) -> ConnectionT | None:
        """The one that should go first where there is no room at all: one of an address that is not known, if any."""
        return next(iter(self._unknown), None) or next(iter(self._site), None)


def _network(address: str) -> str:
    """What counts as one address."""
    if ":" not in address or address.startswith("relay:"):
        return address
    import socket  # noqa: PLC0415 (few come by IPv6)

    try:
        return socket.inet_pton(socket.AF_INET6, address)[:8].hex()
    except OSError:
        return address
