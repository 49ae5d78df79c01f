"""Slow and broken hosts, from sums over two rounds of pairs and from products of matrices. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from hvlaunch.check import Check, Finding, Values

__all__ = ["CHECKS", "DeviceTimes", "SumOfGroup", "findings_of_groups", "findings_of_products", "next_groups"]

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


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _slowest_product(values: Values) -> float | None:
    return max(values["deep"]["matmul"], default=None)


CHECKS = (
    Check("matmul", _slowest_product, "a product of matrices on its slowest device in seconds", _ms),
    Check(
        "all_reduce", lambda values: values["deep"]["sum"], "an all_reduce with another host in seconds", _ms
    ),
)
"""Lines of the table."""
