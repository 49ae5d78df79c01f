"""Many ranks or hosts in few characters: 0-3,6 and gpu[01-07]."""

from collections.abc import Iterable

__all__ = ["fold_hosts", "fold_ranks", "host_set", "number_set"]


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
