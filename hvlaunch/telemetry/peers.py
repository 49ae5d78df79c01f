"""How the hosts of a job reach each other, by what each knows of it: the form in which it says that, and what it means. Pure."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvlaunch.agent.wire import shapes
from hvlaunch.agent.wire.shapes import mapping, or_null, pair, record, several, text, whole
from hvlaunch.hosts.parse import host_set

__all__ = [
    "HostPeers",
    "NcclProcess",
    "NcclReport",
    "behind",
    "host_peers",
    "notes",
    "operations",
    "read_report",
]


_COUNT = whole(0, (1 << 64) - 1)
_COUNTS = mapping(text(64), _COUNT, 64)
_LONGEST_NAME = 64
_COMMUNICATOR = re.compile(r"#\d+-\d+ \(")
_MANY_LINE = re.compile(
    r"  \d+ ranks have (?:launched up to operation (\d{1,20})|not launched any operations)$"
)
_ONE_LINE = re.compile(
    r"  Rank \d+ has (?:launched up to operation (\d{1,20})|not launched any operations) -- (.*)$"
)
_RANK_LINE = re.compile(r"  Rank \d+ -- (.*)$")
_PROCESS = re.compile(r"(?:^GPU .* managed by process|^  Process) (\d{1,20}) on node (\S+)")


class NcclProcess(NamedTuple):
    """As NCCL knows it, by the address or name of its host."""

    pid: int
    host: str


@dataclass(slots=True)
class NcclReport:
    """`behind` has processes that have not begun as many operations of a communicator as most others there, with both counts."""

    operations: int | None = None
    """How many all ranks have begun, where it says that."""
    behind: dict[NcclProcess, tuple[int, int]] = field(default_factory=dict)
    missing: list[NcclProcess] = field(default_factory=list)
    """Those that do not answer NCCL."""

    def compare(self, begun: Mapping[NcclProcess, int], usual: int) -> None:
        """Of one communicator."""
        for process, count in begun.items():
            if count < usual:
                self.behind.setdefault(process, (count, usual))


def read_report(said: str) -> NcclReport:
    """What was said; nothing of it where it is neither form."""
    report = NcclReport()
    if not said.startswith("{"):
        _read_text(said, report)
        return report
    try:
        found = json.loads(said)
        for communicator in found["communicators"]:
            _read_communicator(communicator, report)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return NcclReport()
    return report


def _read_communicator(found: Mapping[str, Any], report: NcclReport) -> None:
    """Raises ValueError, TypeError, KeyError, AttributeError."""
    begun: dict[NcclProcess, int] = {}
    for rank in found["ranks"]:
        if not _COUNTS(rank["collective_counts"]):
            raise ValueError("no counts")
        begun[_process(rank)] = sum(rank["collective_counts"].values())
    report.operations = (report.operations or 0) + sum(begun.values())
    if begun:
        counts = Counter(begun.values())
        report.compare(begun, max(counts, key=lambda count: (counts[count], count)))
    report.missing += [_process(rank) for rank in found["missing_ranks"]]


def _process(rank: Mapping[str, Any]) -> NcclProcess:
    return NcclProcess(int(rank["pid"]), str(rank["host"])[:_LONGEST_NAME])


def _read_text(said: str, report: NcclReport) -> None:
    counts: list[int] = []
    begun: dict[NcclProcess, int] = {}
    for line in [*said.splitlines(), "#0-0 ("]:
        if _COMMUNICATOR.match(line):
            report.compare(begun, max(counts, default=0))
            counts, begun = [], {}
        elif many := _MANY_LINE.match(line):
            counts.append(int(many[1] or 0))
        elif one := _ONE_LINE.match(line):
            counts.append(int(one[1] or 0))
            begun |= dict.fromkeys(_processes(one[2]), counts[-1])
        elif (rank := _RANK_LINE.match(line)) and counts:
            begun |= dict.fromkeys(_processes(rank[1]), counts[-1])
        else:
            report.missing += _processes(line if rank is None else rank[1])


def _processes(words: str) -> Sequence[NcclProcess]:
    """The one that these words are about, if they are about one."""
    found = _PROCESS.match(words)
    return [] if found is None else [NcclProcess(int(found[1]), found[2][:_LONGEST_NAME])]


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
    nccl: NcclReport | None
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
