"""How the hosts of a job reach each other: the reports of hosts and of NCCL, and their meaning. Pure."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hvlaunch.agent.wire.frames import address, mapping, or_null, pair, record, several, text, whole
from hvlaunch.hosts.parse import fold_hosts
from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "HostPeers",
    "NcclProcess",
    "NcclReport",
    "agreed",
    "behind",
    "host_peers",
    "notes",
    "operations",
    "read_report",
]


_COUNT = whole(0, (1 << 64) - 1)
_COUNTS = mapping(text(64), _COUNT, 64)
_LONGEST_NAME = 64
# The text of NCCL before 2.28 has a block for each communicator.
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
    """A process as NCCL knows it, by the address or name of its host."""

    pid: int
    host: str


@dataclass(slots=True)
class NcclReport:
    """NCCL's report. `behind` maps processes to their count of operations and the usual count of a communicator."""

    operations: int | None = None
    """Operations begun by the ranks together; None if the report lacks the count."""
    behind: dict[NcclProcess, tuple[int, int]] = field(default_factory=dict)
    missing: list[NcclProcess] = field(default_factory=list)
    """Processes without an answer to NCCL."""

    def compare(self, begun: Mapping[NcclProcess, int], usual: int) -> None:
        """Record the processes of a communicator with fewer operations than usual."""
        for process, count in begun.items():
            if count < usual:
                self.behind.setdefault(process, (count, usual))


def read_report(report_text: str) -> NcclReport:
    """Parse NCCL's report, in JSON or as text; an unknown form gives an empty report."""
    report = NcclReport()
    if not report_text.startswith("{"):
        _read_text(report_text, report)
        return report
    try:
        parsed = json.loads(report_text)
        for communicator in parsed["communicators"]:
            _read_communicator(communicator, report)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return NcclReport()
    return report


def _read_communicator(communicator: Mapping[str, Any], report: NcclReport) -> None:
    """Raises ValueError, TypeError, KeyError, AttributeError."""
    begun: dict[NcclProcess, int] = {}
    for rank in communicator["ranks"]:
        if not _COUNTS(rank["collective_counts"]):
            # The caller takes any of these errors for an unknown form.
            raise ValueError("no counts")
        begun[_process(rank)] = sum(rank["collective_counts"].values())
    report.operations = (report.operations or 0) + sum(begun.values())
    # The majority is usual; on a tie the larger count, so that the ranks behind are named.
    if begun:
        counts = Counter(begun.values())
        report.compare(begun, max(counts, key=lambda count: (counts[count], count)))
    report.missing += [_process(rank) for rank in communicator["missing_ranks"]]


def _process(rank: Mapping[str, Any]) -> NcclProcess:
    return NcclProcess(int(rank["pid"]), str(rank["host"])[:_LONGEST_NAME])


def _read_text(report_text: str, report: NcclReport) -> None:
    counts: list[int] = []
    begun: dict[NcclProcess, int] = {}
    # The heading of one more communicator ends the last one.
    for line in [*report_text.splitlines(), "#0-0 ("]:
        if _COMMUNICATOR.match(line):
            report.compare(begun, max(counts, default=0))
            counts, begun = [], {}
        elif several_ranks := _MANY_LINE.match(line):
            counts.append(int(several_ranks[1] or 0))
        elif single := _ONE_LINE.match(line):
            counts.append(int(single[1] or 0))
            begun |= dict.fromkeys(_processes(single[2]), counts[-1])
        elif (rank := _RANK_LINE.match(line)) and counts:
            begun |= dict.fromkeys(_processes(rank[1]), counts[-1])
        else:
            report.missing += _processes(line if rank is None else rank[1])


def _processes(words: str) -> Sequence[NcclProcess]:
    """Parse the process in a line, if the line has the form."""
    match = _PROCESS.match(words)
    return [] if match is None else [NcclProcess(int(match[1]), match[2][:_LONGEST_NAME])]


_RANK = whole(0, 1 << 31)
_MOST_PIDS = 4096
_MOST_ADDRESSES = 256
_LONGEST_ANSWER = 1 << 13
"""Characters from a worker about its collectives."""
_MOST_GROUPS = 64
_MOST_COLLECTIVES = 3
"""Number of different collectives in a group above which none is usual."""
_PEERS = record(
    {
        "pids": several(pair(_RANK, whole(1, 1 << 22)), _MOST_PIDS),
        "addresses": several(address, _MOST_ADDRESSES),
        "unanswered": several(pair(_RANK, address), _MOST_ADDRESSES),
        "collectives": several(pair(_RANK, text(_LONGEST_ANSWER, raw=True)), _MOST_PIDS),
        "nccl": or_null(text(1 << 24, raw=True)),
    }
)
_COLLECTIVE = record({"group": text(256), "number": whole(0, 1 << 53), "kind": text(64)})
_COLLECTIVES = several(_COLLECTIVE, _MOST_GROUPS)


class Collective(NamedTuple):
    """The newest collective of a rank in a group."""

    number: int
    kind: str

    def __str__(self) -> str:
        return f"collective {self.number} ({self.kind})"


@dataclass(frozen=True, slots=True)
class HostPeers:
    """A host's report."""

    host: str
    ranks: Mapping[int, int]
    """Ranks by the pids of workers and their descendants."""
    addresses: frozenset[str]
    """Local addresses of its workers' connections."""
    unanswered: frozenset[str]
    """Silent peers: the kernel repeats what workers send to them."""
    nccl: NcclReport | None
    """None if no NCCL process answers on the host."""
    collectives: Mapping[int, Mapping[str, Collective]] = field(default_factory=dict)
    """Newest collectives by the names of groups, of ranks that report them."""

    def without_collectives(self) -> "HostPeers":
        """Return the rest of the report."""
        return replace(self, collectives={})


def host_peers(host: str, answer: Any) -> HostPeers | None:
    """Parse a host's report; None for a wrong form."""
    if not _PEERS(answer):
        return None
    return HostPeers(
        host,
        {pid: rank for rank, pid in answer["pids"]},
        frozenset(answer["addresses"]),
        frozenset(peer for _, peer in answer["unanswered"]),
        None if answer["nccl"] is None else read_report(answer["nccl"]),
        {rank: newest for rank, words in answer["collectives"] if (newest := _read_collectives(words))},
    )


def _read_collectives(words: str) -> dict[str, Collective]:
    """Parse a worker's answer. A wrong form costs only this worker's part of the report."""
    try:
        entries = json.loads(words)
    except (ValueError, RecursionError):
        return {}
    if not _COLLECTIVES(entries):
        return {}
    return {entry["group"]: Collective(entry["number"], entry["kind"]) for entry in entries}


def operations(peers: Iterable[HostPeers]) -> dict[str, int]:
    """Count NCCL's operations by the host of the report."""
    return {
        host_report.host: host_report.nccl.operations
        for host_report in peers
        if host_report.nccl is not None and host_report.nccl.operations is not None
    }


def notes(peers: Sequence[HostPeers]) -> dict[int, str]:
    """Explain why others may wait for a rank: a host without an answer, else a rank missing to NCCL, else a rank behind."""
    return _cut_off(peers) or _missing(peers) or behind(peers) or _collectives_apart(peers)


def _cut_off(peers: Sequence[HostPeers]) -> dict[int, str]:
    """Find hosts without contact. A dead connection accuses both ends; a host with several dead connections is the cause."""
    # 127.0.0.1 and the address of a bridge stand for several hosts: they identify none.
    hosts_by_address = Counter(address for report in peers for address in report.addresses)
    of_address = {
        address: report.host
        for report in peers
        for address in report.addresses
        if hosts_by_address[address] == 1
    }  # not 127.0.0.1, or a bridge's
    # A link has no direction: each end may report it.
    links = {
        frozenset((report.host, of_address[peer]))
        for report in peers
        for peer in report.unanswered
        if of_address.get(peer, report.host) != report.host
    }
    dead = Counter(host for link in links for host in link)
    # With several dead links the host in most of them is the likely cause.
    most = max(dead.values(), default=0)
    odd = {host for host, count in dead.items() if count == most}
    causes: dict[int, str] = {}
    for report in peers:
        if report.host in odd:
            others = {host for link in links if report.host in link for host in link} - {report.host}
            ends = sorted({report.host, *others}) if most == 1 else sorted(others)
            host = "" if most == 1 else f"host {report.host} and "
            causes |= dict.fromkeys(report.ranks.values(), f"no answer between {host}{fold_hosts(ends)}")
    return causes


def _missing(peers: Sequence[HostPeers]) -> dict[int, str]:
    missing = {process for report in peers if report.nccl is not None for process in report.nccl.missing}
    ranks = {_rank_of(process, peers) for process in missing}
    return {rank: "NCCL gets no answer from it" for rank in ranks if rank is not None}


def behind(peers: Sequence[HostPeers]) -> dict[int, str]:
    """Describe ranks that have begun fewer of NCCL's operations than others, by the newest report."""
    causes = {}
    for report in peers:
        for process, (count, usual) in ({} if report.nccl is None else report.nccl.behind).items():
            rank = _rank_of(process, peers)
            if rank is not None:
                causes[rank] = f"has begun {count} of NCCL's operations, the others {usual}"
    return causes


def _rank_of(process: NcclProcess, peers: Sequence[HostPeers]) -> int | None:
    """Return the rank of an NCCL process. The same pid may exist on several hosts."""
    # Containers have pid namespaces of their own, so a pid alone may match several hosts.
    candidates = [report for report in peers if process.pid in report.ranks]
    matching = [
        report for report in candidates if process.host in (*report.addresses, report.host)
    ] or candidates
    return matching[0].ranks[process.pid] if len(matching) == 1 else None


def _by_group(peers: Sequence[HostPeers]) -> dict[str, dict[int, Collective]]:
    """Return the newest collectives of ranks, by the names of groups."""
    groups: dict[str, dict[int, Collective]] = {}
    for report in peers:
        for rank, newest in report.collectives.items():
            for group, collective in newest.items():
                groups.setdefault(group, {})[rank] = collective
    return groups


def _collectives_apart(peers: Sequence[HostPeers]) -> dict[int, str]:
    """Describe ranks whose newest collective in a group differs from most ranks' in its number, or in its kind.

    As with steps, a tie accuses the ranks that are behind. If two kinds with one number are equally frequent, both are described.
    """
    causes: dict[int, str] = {}
    for newest in _by_group(peers).values():
        counts = Counter(newest.values())
        # Ranks that differ in many ways have no usual collective.
        if not 1 < len(counts) <= _MOST_COLLECTIVES:
            continue
        numbers = Counter(collective.number for collective in newest.values())
        usual, rival = sorted(
            counts, key=lambda collective: (numbers[collective.number], collective.number, counts[collective])
        )[:-3:-1]
        is_tie = usual.number == rival.number and counts[usual] == counts[rival]
        others = "the others" if len(counts) == 2 else "others"  # noqa: PLR2004 (two collectives)
        for rank, collective in newest.items():
            if collective != usual:
                causes.setdefault(rank, f"has begun {collective}, {others} {usual}")
            elif is_tie:
                causes.setdefault(rank, f"has begun {collective}, {others} {rival}")
    return causes


def agreed(peers: Sequence[HostPeers], ranks: Collection[int]) -> str:
    """Return the newest collective of all these ranks; empty if they differ, or if one has not reported its collectives."""
    groups = _by_group(peers).values()
    reporting = {rank for report in peers for rank in report.collectives}
    if not reporting.issuperset(ranks) or any(len(set(newest.values())) > 1 for newest in groups):
        return ""
    return next(
        (str(newest[rank]) for newest in groups for rank in newest if len(groups) == 1),
        "the same collectives",
    )
