"""How the hosts of a job reach each other, by what each knows of it: the form in which it says that, and what it means. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvlaunch.agent.wire import shapes
from hvlaunch.agent.wire.shapes import or_null, pair, record, several, text, whole
from hvlaunch.hosts.parse import host_set
from hvlaunch.telemetry.nccl import NcclProcess, Report, read_report

__all__ = ["HostPeers", "behind", "host_peers", "notes", "operations"]

_RANK = whole(0, 1 << 31)
_MOST_PIDS = 4096
_MOST_ADDRESSES = 256
_PEERS = record(
    {
        "pids": several(pair(_RANK, whole(1, 1 << 22)), _MOST_PIDS),
        "addresses": several(shapes.address, _MOST_ADDRESSES),
        "unanswered": several(pair(_RANK, shapes.address), _MOST_ADDRESSES),
        "nccl": or_null(text(1 << 24, raw=True)),
    }
)


@dataclass(frozen=True, slots=True)
class HostPeers:
    """What one host knows."""

    host: str
    ranks: Mapping[int, int]
    """By the pids of its workers and of all below them."""
    addresses: frozenset[str]
    """That its workers' connections have."""
    unanswered: frozenset[str]
    """Addresses to which what they send is repeated, since nothing is acknowledged."""
    nccl: Report | None
    """None where no NCCL answers there."""


def host_peers(host: str, found: Any) -> HostPeers | None:
    """What a host has sent; None where it has not the form."""
    if not _PEERS(found):
        return None
    return HostPeers(
        host,
        {pid: rank for rank, pid in found["pids"]},
        frozenset(found["addresses"]),
        frozenset(peer for _, peer in found["unanswered"]),
        None if found["nccl"] is None else read_report(found["nccl"]),
    )


def operations(peers: Iterable[HostPeers]) -> dict[str, int]:
    """How many operations NCCL's ranks have begun in all, by the host that says it."""
    return {
        one.host: one.nccl.operations
        for one in peers
        if one.nccl is not None and one.nccl.operations is not None
    }


def notes(peers: Sequence[HostPeers]) -> dict[int, str]:
    """Of ranks that others may wait for, why: hosts that get no answer first, then who is missing to NCCL, then who is behind."""
    return _cut_off(peers) or _missing(peers) or behind(peers)


def _cut_off(peers: Sequence[HostPeers]) -> dict[int, str]:
    """Of a dead connection both ends may be its cause; a host that has several is."""
    known = Counter(address for one in peers for address in one.addresses)
    of_address = {
        address: one.host for one in peers for address in one.addresses if known[address] == 1
    }  # not 127.0.0.1, or a bridge's
    links = {
        frozenset((one.host, of_address[peer]))
        for one in peers
        for peer in one.unanswered
        if of_address.get(peer, one.host) != one.host
    }
    dead = Counter(host for link in links for host in link)
    most = max(dead.values(), default=0)
    odd = {host for host, count in dead.items() if count == most}
    found: dict[int, str] = {}
    for one in peers:
        if one.host in odd:
            others = {host for link in links if one.host in link for host in link} - {one.host}
            ends = sorted({one.host, *others}) if most == 1 else sorted(others)
            between = (
                "no answer between hosts" if most == 1 else f"no answer between host {one.host} and hosts"
            )
            found |= dict.fromkeys(one.ranks.values(), f"{between} {host_set(ends)}")
    return found


def _missing(peers: Sequence[HostPeers]) -> dict[int, str]:
    missing = {process for one in peers if one.nccl is not None for process in one.nccl.missing}
    ranks = {_rank_of(process, peers) for process in missing}
    return {rank: "NCCL gets no answer from it" for rank in ranks if rank is not None}


def behind(peers: Sequence[HostPeers]) -> dict[int, str]:
    """Of ranks that have begun fewer of NCCL's operations than others, how many: by the newest that any host says."""
    found = {}
    for one in peers:
        for process, (count, usual) in ({} if one.nccl is None else one.nccl.behind).items():
            rank = _rank_of(process, peers)
            if rank is not None:
                found[rank] = f"has begun {count} of NCCL's operations, the others {usual}"
    return found


def _rank_of(process: NcclProcess, peers: Sequence[HostPeers]) -> int | None:
    """Whose process that is. The same pid may be on several hosts."""
    having = [one for one in peers if process.pid in one.ranks]
    there = [one for one in having if process.host in (*one.addresses, one.host)] or having
    return there[0].ranks[process.pid] if len(there) == 1 else None
