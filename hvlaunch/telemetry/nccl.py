"""What NCCL says of its communicators when it is asked (RAS, from 2.24 on), as JSON or as text. Pure.

The forms are those of src/ras/client_support.cc: JSON has the operations that each rank has begun, text those alone that
differ from the others', and processes that do not answer.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvlaunch.agent.wire.shapes import mapping, text, whole

__all__ = ["NcclProcess", "Report", "read_report"]

_COUNT = whole(0, (1 << 64) - 1)
_COUNTS = mapping(text(64), _COUNT, 64)
_LONGEST_NAME = 64
_COMMUNICATOR = re.compile(r"#\d+-\d+ \(")
_MANY = re.compile(r"  \d+ ranks have (?:launched up to operation (\d{1,20})|not launched any operations)$")
_ONE = re.compile(
    r"  Rank \d+ has (?:launched up to operation (\d{1,20})|not launched any operations) -- (.*)$"
)
_RANK = re.compile(r"  Rank \d+ -- (.*)$")
_PROCESS = re.compile(r"(?:^GPU .* managed by process|^  Process) (\d{1,20}) on node (\S+)")


class NcclProcess(NamedTuple):
    """As NCCL knows it, by the address or name of its host."""

    pid: int
    host: str


@dataclass(slots=True)
class Report:
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


def read_report(said: str) -> Report:
    """What was said; nothing of it where it is neither form."""
    report = Report()
    if not said.startswith("{"):
        _read_text(said, report)
        return report
    try:
        found = json.loads(said)
        for communicator in found["communicators"]:
            _read_communicator(communicator, report)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Report()
    return report


def _read_communicator(found: Mapping[str, Any], report: Report) -> None:
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


def _read_text(said: str, report: Report) -> None:
    counts: list[int] = []
    begun: dict[NcclProcess, int] = {}
    for line in [*said.splitlines(), "#0-0 ("]:
        if _COMMUNICATOR.match(line):
            report.compare(begun, max(counts, default=0))
            counts, begun = [], {}
        elif many := _MANY.match(line):
            counts.append(int(many[1] or 0))
        elif one := _ONE.match(line):
            counts.append(int(one[1] or 0))
            begun |= dict.fromkeys(_processes(one[2]), counts[-1])
        elif (rank := _RANK.match(line)) and counts:
            begun |= dict.fromkeys(_processes(rank[1]), counts[-1])
        else:
            report.missing += _processes(line if rank is None else rank[1])


def _processes(words: str) -> Sequence[NcclProcess]:
    """The one that these words are about, if they are about one."""
    found = _PROCESS.match(words)
    return [] if found is None else [NcclProcess(int(found[1]), found[2][:_LONGEST_NAME])]
