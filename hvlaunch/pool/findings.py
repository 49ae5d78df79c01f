"""What the hosts of a warm pool found out of the network in one job, for the next: who gets through to whom, and to us.

It is true of the connections that there were, and not for long: a firewall may change at any time.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from hvlaunch.agent.shapes import PORT, address, exactly, mapping, or_null, record, several, text

__all__ = ["FINDINGS", "Findings"]

_MOST_HOSTS, _MOST_ADDRESSES, _LONGEST_NAME = 1 << 16, 64, 1 << 10
_ADDRESSES = several(address, _MOST_ADDRESSES)
_NAME = text(_LONGEST_NAME)
_OF_HOST = record(
    {
        "hosts": mapping(_NAME, exactly(_ADDRESSES, 2), _MOST_HOSTS),
        "rendezvous": or_null(record({"tried": _ADDRESSES, "port": or_null(PORT), "at": address})),
    }
)
FINDINGS = mapping(_NAME, _OF_HOST, _MOST_HOSTS)
"""By host: of other hosts the addresses that it tried, and those at which it got through; and so of the driver's rendezvous,
with its port where the user has chosen that."""
_KEPT = 600.0
"""Seconds for which they hold."""


class _Finding(NamedTuple):
    until: float
    connections: tuple[object, ...]
    """Those of the hosts that it is about, when it was found."""
    found: Any


class Findings:
    """For any one thread at a time. `connection` tells which connection a host has; None: none, or there is no such host."""

    def __init__(
        self, connection: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._kept: dict[tuple[str, ...], _Finding] = {}
        """By host, or by two."""

    def add(self, found: Mapping[str, Any]) -> None:
        """What a job has found, which fits FINDINGS."""
        until = self._clock() + _KEPT
        for names, what in _taken_apart(found):
            connections = tuple(map(self._connection, names))
            if None not in connections:
                self._kept[names] = _Finding(until, connections, what)

    def forget(self) -> None:
        """A job failed that went by them."""
        self._kept.clear()

    def of_all(self) -> dict[str, Any]:
        """What still holds, as FINDINGS."""
        now = self._clock()
        self._kept = {
            names: finding
            for names, finding in self._kept.items()
            if now < finding.until and finding.connections == tuple(map(self._connection, names))
        }
        found: dict[str, Any] = {}
        for (host, *other), finding in self._kept.items():
            of_host = found.setdefault(host, {"hosts": {}, "rendezvous": None})
            if other:
                of_host["hosts"][other[0]] = finding.found
            else:
                of_host["rendezvous"] = finding.found
        return found


def _taken_apart(found: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for host, of_host in found.items():
        for other, reached in of_host["hosts"].items():
            yield (host, other), reached
        if of_host["rendezvous"] is not None:
            yield (host,), of_host["rendezvous"]
