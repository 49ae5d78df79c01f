"""Faults that show when hosts work together: of the network, from measures between pairs of hosts, and of devices, from sums and products. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Literal

from hvlaunch.check import Check, Finding, Values
from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "CHECKS",
    "DeviceTimes",
    "Measure",
    "NetworkFault",
    "Pair",
    "SumOfGroup",
    "attribute",
    "find_faults",
    "findings_of_groups",
    "findings_of_pairs",
    "findings_of_products",
    "next_groups",
    "partners",
    "values_of_pairs",
]


Pair = tuple[str, str]
"""A host that dials, and a host that listens."""
Kind = Literal["reach", "ports", "mtu", "loss", "latency", "rate"]
Scope = Literal["all", "host", "to", "from", "link", "way"]
"""Every pair; a host in both directions, `to` it or `from` it; a link between two hosts, or one way of the link."""

_MOST_DIALS = 6
_FAR_FACTOR, _FAR_LEAST, _FAR = 5.0, 0.005, 0.025
"""Slow round trips: a factor above the fastest quarter with a least number of seconds, or the last number of seconds."""
_SLOW_PART, _SLOW = 0.25, 6e6
"""Slow rates: below this part of the fastest quarter, or below this many bytes/s."""
_LOSSY = 0.005
_ENOUGH = 0.8
"""Least part of bad pairs for a host to be their cause."""
_ENOUGH_LOSSY = 0.6
"""The same for losses: a short stream over a lossy link may lose nothing."""
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
    """Size of the largest passing packets if larger ones vanish; 0 if unknown."""


class NetworkFault(NamedTuple):
    """Bad pairs with one cause."""

    kind: Kind
    scope: Scope
    hosts: tuple[str, ...]
    """The host; or both ends of the link, the dialing one first; or all hosts."""
    measures: Mapping[Pair, Measure]
    """The bad pairs."""


def partners(count: int) -> tuple[int, ...]:
    """Return the distances in the ring of `count` hosts at which a host dials others.

    Up to 7 hosts dial each other. In a larger ring each host dials 6: its neighbours, hosts at the root of the count, and
    hosts at half of the ring, in both directions. So traffic grows with the number of hosts, not with the number of pairs.
    Three partners or more tell a host's faults from its partner's. Neighbours in the list often share a switch; hosts far
    away in the list seldom do.
    """
    if count - 1 <= _MOST_DIALS:
        return tuple(range(1, count))
    steps = (1, max(2, round(count**0.5)), count // 2)
    return tuple(dict.fromkeys(way % count for step in steps for way in (step, -step)))


def find_faults(
    measures: Mapping[Pair, Measure], hosts: Sequence[str], lossy: float = _LOSSY
) -> list[NetworkFault]:
    """Return explanations of the bad pairs, the gravest kind first. A larger part of lost segments than `lossy` is bad."""
    faults = []
    left = dict(measures)
    for kind in _KINDS:
        bad = set(_bad(kind, left, lossy))
        for scope, names, pairs in attribute(bad, left, hosts, _ENOUGH_LOSSY if kind == "loss" else _ENOUGH):
            # Busy hosts make the rates of single pairs differ by a factor of ten.
            ends = {"host": (0, 1), "to": (1,), "from": (0,)}.get(scope, ())
            is_whole = all(pair in bad for pair in left if any(pair[end] == names[0] for end in ends))
            if (
                kind == "rate"
                and not (ends and is_whole)
                and any((left[pair].rate or 0) > _SLOW for pair in pairs)
            ):
                continue
            faults.append(NetworkFault(kind, scope, names, {pair: left[pair] for pair in pairs}))
            if scope in ("host", "to", "from"):
                # A bad link is slow too, in each of its pairs.
                bad.update(pair for pair in left if names[0] in pair)
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
                is_bad = measure.loss is not None and measure.loss > lossy
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
    """Return the value of the best quarter: one bad host of four makes half of the pairs bad."""
    return sorted(values)[len(values) // 4] if values else None


def attribute(
    bad: Collection[Pair], measured: Collection[Pair], hosts: Sequence[str], enough: float = _ENOUGH
) -> Iterator[tuple[Scope, tuple[str, ...], list[Pair]]]:
    """Yield causes of bad pairs: scope and hosts, as in NetworkFault, and the pairs.

    A host is a cause if the part `enough` of its pairs in a direction is bad, with two partners or more. The host with most bad
    pairs comes first, and its pairs count for no other host. Remaining pairs are faults of links.
    """
    left, remaining = set(bad), set(measured)
    if len(hosts) > 2 and left and left == remaining:  # noqa: PLR2004 (two hosts are one link)
        yield "all", tuple(hosts), sorted(left)
        return
    while True:
        best: tuple[int, Scope, str, set[Pair]] | None = None
        # Only these can be a cause; to look at the pairs of all hosts takes long for many hosts.
        touched = {name for pair in left for name in pair}
        for host in (host for host in hosts if host in touched):
            for scope, ends in _ENDS:
                pairs = {pair for pair in remaining if any(pair[end] == host for end in ends)}
                faulty = pairs & left
                others = {name for pair in faulty for name in pair} - {host}
                if len(others) < 2 or len(faulty) < enough * len(pairs):  # noqa: PLR2004 (as above)
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


_WHERE: Mapping[str, str] = {
    "all": "between all hosts",
    "host": "to and from the other hosts",
    "to": "from the other hosts to it",
    "from": "from it to the other hosts",
    "link": "between hosts {} and {}",
    "way": "from host {} to host {}",
}
_REACH: Mapping[str, str] = {
    "all": "no host can connect to another host",
    "host": "no other host can connect to it, and it can connect to none",
    "to": "no other host can connect to it",
    "from": "it can't connect to other hosts",
    "link": "hosts {} and {} can't connect to each other",
    "way": "host {} can't connect to host {}",
}


def findings_of_pairs(
    measures: Mapping[Pair, Measure], hosts: Sequence[str], ephemeral: tuple[int, int]
) -> list[Finding]:
    """Return the faults between hosts in words; `ephemeral` are the first and last port of kernels for connections."""
    faults = find_faults(measures, hosts)
    bad = {pair for fault in faults for pair in fault.measures}
    good = [measure for pair, measure in measures.items() if pair not in bad]
    return [
        Finding(host, *_words(fault, good, ephemeral))
        # A host with a bad link can stay if the other end goes: the later one does.
        for fault in faults
        for host in (fault.hosts if fault.scope == "all" else fault.hosts[-1:])
    ]


def values_of_pairs(measures: Mapping[Pair, Measure], hosts: Iterable[str]) -> dict[str, Values]:
    """Return the medians of each host's pairs, for the table."""
    values: dict[str, Values] = {}
    for host in hosts:
        of_host = [measure for pair, measure in measures.items() if host in pair]
        rtts = [measure.rtt for measure in of_host if measure.rtt is not None]
        rates = [measure.rate for measure in of_host if measure.rate is not None]
        values[host] = {"rtt": median(rtts) if rtts else None, "rate": median(rates) if rates else None}
    return values


def _words(
    fault: NetworkFault, good: Sequence[Measure], ephemeral: tuple[int, int]
) -> tuple[Literal["error", "warning"], str, str, str]:
    """Return level, subject, text and remedy."""
    at = _WHERE[fault.scope].format(*fault.hosts)
    bad = list(fault.measures.values())
    match fault.kind:
        case "reach":
            text = _REACH[fault.scope].format(*fault.hosts)
            return "error", "connections", text, "let firewalls pass TCP between the hosts, and check routes"
        case "ports":
            blocked = sorted({port for measure in bad for port in measure.tried - measure.reached})
            text = f"blocked ports {at}: {', '.join(map(str, blocked))}"
            if reached := sorted({port for measure in bad for port in measure.reached} - {*blocked}):
                text += f"; open: {', '.join(map(str, reached))}"
            remedy = "let firewalls pass TCP ports {}-{} between the hosts: jobs choose ports there".format(
                *ephemeral
            )
            return "error", "ports", text, remedy
        case "mtu":
            size = min(measure.mtu or 0 for measure in bad)
            text = f"packets of more than {size} bytes vanish {at}" if size else f"large packets vanish {at}"
            remedy = (
                f"ip link set dev INTERFACE mtu {size}" if size else "check the MTU of interfaces and tunnels"
            )
            return "error", "packet size", text, f"{remedy}, or let firewalls pass ICMP"
        case "loss":
            lost = median(measure.loss or 0.0 for measure in bad)
            remedy = "look for a bad cable or port: ip -s link, ethtool -S INTERFACE"
            return "warning", "loss", f"{lost:.1%} of packets are lost {at}", remedy
        case "latency":
            text = f"round trips of {_ms(median(measure.rtt or 0.0 for measure in bad))} {at}"
            if others := [measure.rtt for measure in good if measure.rtt is not None]:
                text += f", {_ms(median(others))} elsewhere"
            return "warning", "latency", text, "check its route (a VPN, another site?), or leave it out"
        case "rate":
            text = f"{_rate(median(measure.rate or 0.0 for measure in bad))} {at}"
            if others := [measure.rate for measure in good if measure.rate is not None]:
                text += f", {_rate(median(others))} elsewhere"
            return (
                "warning",
                "bandwidth",
                text,
                "check the speed of the link (ethtool INTERFACE), or leave it out",
            )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _rate(bytes_per_second: float) -> str:
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"  # noqa: PLR2004


Group = tuple[str, ...]
_SLOW_GPU, _SLOW_CPU = 1.4, 3.0
"""Times of a product that count as slow, as factors of the median: processors have other work now and then."""
_SLOW_SUM = 3.0


class DeviceTimes(NamedTuple):
    """Products on one host."""

    is_gpu: bool
    seconds: Sequence[float]
    """By device."""


class SumOfGroup(NamedTuple):
    """An all_reduce of a group of hosts."""

    hosts: Group
    seconds: float | None
    """Of the slowest process; None for a failure."""
    error: str = ""


def next_groups(hosts: Sequence[str], rounds: Sequence[Sequence[SumOfGroup]]) -> list[Group]:
    """Return the groups of the next round; empty after the last round.

    The first round has pairs of neighbours. The second round pairs slow hosts with fast ones, so a slow host does not hide
    behind a slow partner. An odd number leaves a host without a partner in both; a third round makes up for it.
    """
    if not rounds:
        return [tuple(hosts[number : number + 2]) for number in range(0, max(1, len(hosts) - 1), 2)]
    if len(hosts) < 3 or len(rounds) > 1 + len(hosts) % 2:  # noqa: PLR2004 (two hosts have one pair)
        return []
    times = {host: group for groups in rounds for group in groups for host in group.hosts}
    ordered = sorted(hosts, key=lambda host: _order(times.get(host)))
    if len(rounds) == 1:
        return list(zip(ordered[: len(hosts) // 2], reversed(ordered), strict=False))
    counts = Counter(host for groups in rounds for group in groups for host in group.hosts)
    lacking = [host for host in hosts if counts[host] < 2]  # noqa: PLR2004 (a partner may be bad itself)
    partners = [host for host in ordered if host not in lacking]
    return list(zip(lacking, partners, strict=False)) if len(hosts) > 3 else [tuple(lacking)]  # noqa: PLR2004


def _order(group: SumOfGroup | None) -> float:
    if group is None:
        return -1.0
    return float("inf") if group.seconds is None else group.seconds


def findings_of_groups(rounds: Sequence[Sequence[SumOfGroup]]) -> Iterator[Finding]:
    """Yield each host with bad groups in every round, and each bad group without such a host."""
    groups = [group for of_round in rounds for group in of_round]
    times = [group.seconds for group in groups if group.seconds is not None and len(group.hosts) > 1]
    # One bad host of three makes two of three pairs slow.
    usual = sorted(times)[len(times) // 4] if times else 0.0
    bad = [group for group in groups if group.seconds is None or group.seconds > _SLOW_SUM * usual > 0]
    counts = Counter(host for group in groups for host in group.hosts)
    bad_counts = Counter(host for group in bad for host in group.hosts)
    culprits = {host for host, number in bad_counts.items() if number == counts[host] > 1}
    seen: set[str] = set()
    for group in bad:
        # Without a culprit the link is bad, or a fault has passed: the later host can go.
        for host in [name for name in group.hosts if name in culprits] or group.hosts[-1:]:
            if host in seen:
                continue
            seen.add(host)
            beside = "".join(f" with {other}" for other in group.hosts if other != host)
            if group.seconds is None:
                yield Finding(host, "error", "all_reduce", f"it fails{beside}: {group.error}", _REMEDY)
            else:
                text = f"{_ms(group.seconds)}{beside}, {_ms(usual)} for the fastest pairs"
                yield Finding(host, "warning", "all_reduce", text, _REMEDY)


_REMEDY = "leave the host out, and see hvlaunch check without --deep for its network"


def findings_of_products(times: Mapping[str, DeviceTimes]) -> Iterator[Finding]:
    """Yield devices that are slower than those of the other hosts."""
    for is_gpu in (True, False):
        seconds = [time for host in times.values() if host.is_gpu is is_gpu for time in host.seconds]
        usual = median(seconds) if seconds else 0.0
        for name, host in times.items():
            for number, time in enumerate(host.seconds if host.is_gpu is is_gpu else ()):
                if len(seconds) > 1 and time > (_SLOW_GPU if is_gpu else _SLOW_CPU) * usual:
                    device = f"GPU {number}" if is_gpu else "processor"
                    text = f"its {device} takes {_ms(time)} for a product, {_ms(usual)} is usual"
                    tool = "nvidia-smi -q -d PERFORMANCE" if is_gpu else "top"
                    yield Finding(
                        name, "warning", "matmul", text, f"look for other programs and a low clock: {tool}"
                    )


def _slowest_product(values: Values) -> float | None:
    return max(values["deep"]["matmul"], default=None)


CHECKS = (
    Check("latency", lambda values: values["pairs"]["rtt"], "median of its round trips in seconds", _ms),
    Check("bandwidth", lambda values: values["pairs"]["rate"], "median of its streams in bytes/s", _rate),
    Check("matmul", _slowest_product, "a product of matrices on its slowest device in seconds", _ms),
    Check(
        "all_reduce", lambda values: values["deep"]["sum"], "an all_reduce with another host in seconds", _ms
    ),
)
"""Lines of the table. Faults between hosts are found by pairs, and not by a comparison of these."""
