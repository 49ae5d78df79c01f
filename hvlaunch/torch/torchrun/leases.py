"""Who is still there: judged by signs of life that change, on the watcher's own clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvlaunch.torch.torchrun.state import JobState

__all__ = ["Leases", "watched"]

_WARDENS = 3


def watched(state: JobState, node: str) -> tuple[str, ...]:
    """Whose signs of life this node looks at: the first few look at all, all look at the first few.

    So the effort grows with the number of nodes and not with its square, and whoever dies, all of the first
    few at once included, is missed by somebody who lives.
    """
    wardens = state.nodes[:_WARDENS]
    seen = state.nodes if node in wardens else wardens
    return tuple(other for other in seen if other != node)


@dataclass(slots=True)
class _Lease:
    sign: bytes | None
    silence: float = 0.0


class Leases:
    """What one node has seen of others. All times in seconds.

    lease: how long a node may be silent. interval: how often signs are sent, and looked at. A gap in the
    looking, as when the server could not be reached, counts for no more than two intervals: nobody is lost for it.
    """

    def __init__(self, lease: float, interval: float) -> None:
        self._lease = lease
        self._interval = interval
        self._seen: dict[str, _Lease] = {}
        self._looked: float | None = None
        self.alive: frozenset[str] = frozenset()
        """Of those looked at last, the ones that have given a sign since the first look."""

    def look(self, signs: Mapping[str, bytes | None], now: float) -> list[str]:
        """Take what each node's newest sign is, None for none. Returns who has been silent for a lease."""
        passed = 0.0 if self._looked is None else min(now - self._looked, 2 * self._interval)
        self._looked = now
        alive = set(self.alive)
        seen = {}
        for node, sign in signs.items():
            lease = self._seen.get(node)
            if lease is None:
                lease = _Lease(sign)
            elif lease.sign != sign:
                lease = _Lease(sign)
                alive.add(node)
            else:
                lease.silence += passed
            seen[node] = lease
        self._seen = seen
        self.alive = frozenset(alive & seen.keys())
        return [node for node, lease in seen.items() if lease.silence >= self._lease]
