"""What is wrong with a network, from measures between pairs of hosts. Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

__all__ = ["Fault", "Measure", "Pair", "attribute", "find_faults", "partners"]

Pair = tuple[str, str]
"""A host that dials, and a host that listens."""
Kind = Literal["reach", "ports", "mtu", "loss", "latency", "rate"]
Scope = Literal["all", "host", "to", "from", "link", "way"]
"""All pairs; a host, or what others send to it, or what it sends; a link between two, or one way of it."""

_MOST_DIALS = 6
_FAR_FACTOR, _FAR_LEAST, _FAR = 5.0, 0.005, 0.025
"""Round trips that count as slow: so many times those of the fastest quarter and so many seconds, or so many seconds."""
_SLOW_PART, _SLOW = 0.25, 12.5e6
"""Rates that count as slow: below this part of the fastest quarter, or this many bytes/s."""
_LOSSY = 0.003
_ENOUGH = 0.8
"""Part of a host's pairs that have to be bad, for the host to be the cause."""
_KINDS: tuple[Kind, ...] = ("reach", "ports", "mtu", "loss", "latency", "rate")
"""In this order: a pair with an earlier fault is not judged by the later ones."""
_ENDS: tuple[tuple[Scope, tuple[int, ...]], ...] = (("host", (0, 1)), ("to", (1,)), ("from", (0,)))
"""Scopes of a host, and the place of the host in their pairs."""


class Measure(NamedTuple):
    """One host's measures of another."""

    tried: frozenset[int]
    """Ports."""
    reached: frozenset[int] = frozenset()
    address: str | None = None
    rtt: float | None = None
    """Seconds."""
    loss: float | None = None
    """Share of segments."""
    rate: float | None = None
    """Bytes/s."""
    mtu: int | None = None
    """Size of the largest packets that pass if larger ones vanish; 0 if none is known to pass."""


class Fault(NamedTuple):
    """Bad pairs with one cause."""

    kind: Kind
    scope: Scope
    hosts: tuple[str, ...]
    """The host; or both ends of the link, the dialing one first; or all hosts."""
    measures: Mapping[Pair, Measure]
    """The bad pairs."""


def partners(count: int) -> tuple[int, ...]:
    """Return the distances at which each of `count` hosts dials others, in a ring of all.

    Up to 7 hosts dial each other. Of more hosts each dials 6: its neighbours, and hosts about a root and a half of the
    ring away, all in both directions. So the traffic grows with the number of hosts and not with that of pairs, each host
    meets three or more others, which tells its own faults from theirs, and neighbours in the list (often of one
    switch) as well as hosts far away (of another switch) are among them.
    """
    if count - 1 <= _MOST_DIALS:
        return tuple(range(1, count))
    steps = (1, max(2, round(count**0.5)), count // 2)
    return tuple(dict.fromkeys(way % count for step in steps for way in (step, -step)))


def find_faults(measures: Mapping[Pair, Measure], hosts: Sequence[str], lossy: float = _LOSSY) -> list[Fault]:
    """Return what explains the bad pairs, the gravest kind first. `lossy` is the part of lost segments that counts as bad."""
    faults = []
    left = dict(measures)
    for kind in _KINDS:
        bad = set(_bad(kind, left, lossy))
        for scope, names, pairs in attribute(bad, left, hosts):
            faults.append(Fault(kind, scope, names, {pair: left[pair] for pair in pairs}))
        if kind != "ports":
            left = {pair: measure for pair, measure in left.items() if pair not in bad}
    return faults


def _bad(kind: Kind, measures: Mapping[Pair, Measure], lossy: float) -> Iterator[Pair]:
    far = _quarter([measure.rtt for measure in measures.values() if measure.rtt is not None])
    fast = _quarter([-measure.rate for measure in measures.values() if measure.rate is not None])
    for pair, measure in measures.items():
        match kind:
            case "reach":
                is_bad = not measure.reached
            case "ports":
                is_bad = measure.reached < measure.tried
            case "mtu":
                is_bad = measure.mtu is not None
            case "loss":
                # A link that is too slow for the paced stream loses segments for that reason alone.
                is_bad = (
                    measure.loss is not None
                    and measure.loss > lossy
                    and (measure.rate is None or measure.rate > _SLOW)
                )
            case "latency":
                is_bad = measure.rtt is not None and (
                    measure.rtt > _FAR
                    or (far is not None and measure.rtt > max(_FAR_FACTOR * far, _FAR_LEAST))
                )
            case _:
                is_bad = measure.rate is not None and (
                    measure.rate < _SLOW or (fast is not None and measure.rate < -fast * _SLOW_PART)
                )
        if is_bad:
            yield pair


def _quarter(values: Sequence[float]) -> float | None:
    """Return a value that a quarter reaches: half of the pairs may be bad if one of four hosts is."""
    return sorted(values)[len(values) // 4] if values else None


def attribute(
    bad: Collection[Pair], measured: Collection[Pair], hosts: Sequence[str]
) -> Iterator[tuple[Scope, tuple[str, ...], list[Pair]]]:
    """Yield causes of bad pairs: the scope and hosts as of Fault, and the pairs.

    The host with most bad pairs comes first, if nearly all of its pairs in that direction are bad and it has
    two partners or more; its pairs then count for no other host. What is left is the fault of links.
    """
    left, remaining = set(bad), set(measured)
    if len(hosts) > 2 and left and left == remaining:  # noqa: PLR2004 (two hosts are one link)
        yield "all", tuple(hosts), sorted(left)
        return
    while True:
        best: tuple[int, Scope, str, set[Pair]] | None = None
        for host in hosts:
            for scope, ends in _ENDS:
                pairs = {pair for pair in remaining if any(pair[end] == host for end in ends)}
                faulty = pairs & left
                others = {name for pair in faulty for name in pair} - {host}
                if len(others) < 2 or len(faulty) < _ENOUGH * len(pairs):  # noqa: PLR2004 (as above)
                    continue
                if best is None or len(faulty) > best[0]:
                    best = len(faulty), scope, host, pairs
        if best is None:
            break
        _, scope, host, pairs = best
        yield scope, (host,), sorted(pairs & left)
        left -= pairs
        remaining -= pairs
    for dialer, listener in sorted(left):
        if (listener, dialer) not in left:
            yield "way", (dialer, listener), [(dialer, listener)]
        elif dialer < listener:
            yield "link", (dialer, listener), [(dialer, listener), (listener, dialer)]
