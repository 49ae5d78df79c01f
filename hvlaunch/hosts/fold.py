"""Many ranks or hosts in few characters: 0-3,6 and gpu[01-07]."""

import re
from collections.abc import Iterable

__all__ = ["fold_hosts", "fold_ranks", "host_set", "number_set", "ranges_of"]

_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?:/([0-9]{1,9}))?)?")


def number_set(numbers: Iterable[int]) -> str:
    """`3`, `0-3,6`."""
    from ClusterShell.RangeSet import RangeSet  # noqa: PLC0415 - only a job that fails or merges needs it

    return str(RangeSet.fromlist(str(number) for number in sorted(set(numbers))))


def host_set(hosts: Iterable[str]) -> str:
    """`b`, `gpu[01-07],login`."""
    known = list(dict.fromkeys(hosts))
    if len(known) == 1:
        return known[0]
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException  # noqa: PLC0415 - as above

    try:
        return str(NodeSet.fromlist(known, resolver=RESOLVER_NOGROUP))
    except NodeSetException:  # a name that is none of ClusterShell's, which a hostfile may still hold
        return ",".join(known)


def fold_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-3,6`."""
    known = set(ranks)
    return f"{'rank' if len(known) == 1 else 'ranks'} {number_set(known)}"


def fold_hosts(hosts: Iterable[str]) -> str:
    """`host b`, `hosts gpu[01-07],login`."""
    known = set(names := list(hosts))
    return f"{'host' if len(known) == 1 else 'hosts'} {host_set(names)}"


def ranges_of(text: str) -> tuple[range, ...]:
    """Numbers, ranges with both ends included, and steps: `0,8-15`, `0-62/2`. Raises ValueError."""
    return tuple(_range_of(part.strip()) for part in text.split(","))


def _range_of(part: str) -> range:
    found = _RANGE.fullmatch(part)
    if found is None:
        raise ValueError(f"{part!r} is neither a rank nor a range such as 8-15")
    first = int(found[1])
    last, step = int(found[2] or first), int(found[3] or 1)
    if last < first or step == 0:
        raise ValueError(f"{part!r} has no rank in it")
    return range(first, last + 1, step)
