"""Many ranks or hosts in few characters: 0-3,6 and gpu[01-07]."""

from collections.abc import Iterable

__all__ = ["fold_hosts", "fold_ranks"]


def fold_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-3,6`."""
    from ClusterShell.RangeSet import RangeSet  # noqa: PLC0415 - only a job that fails needs it

    known = sorted(set(ranks))
    folded = RangeSet.fromlist(str(rank) for rank in known)
    return f"{'rank' if len(known) == 1 else 'ranks'} {folded}"


def fold_hosts(hosts: Iterable[str]) -> str:
    """`host b`, `hosts gpu[01-07],login`."""
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException  # noqa: PLC0415 - as above

    known = list(dict.fromkeys(hosts))
    if len(known) == 1:
        return f"host {known[0]}"
    try:
        folded = str(NodeSet.fromlist(known, resolver=RESOLVER_NOGROUP))
    except NodeSetException:  # a name that is none of ClusterShell's, which a hostfile may still hold
        folded = ",".join(known)
    return f"hosts {folded}"
