"""Comparison of hosts: from the values that an errand has read on each host to findings, tables and pages. Pure.

The table of checks (`hvlaunch/check/table.py`) says how to read, show, judge and compare each value.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median_high, median_low
from typing import Any, Literal, NamedTuple

__all__ = [
    "Check",
    "Compare",
    "Finding",
    "Flaw",
    "Level",
    "Outlier",
    "Values",
    "findings_of",
    "high",
    "low",
    "merged",
    "reference",
    "same",
    "same_if_any",
]

Level = Literal["error", "warning", "note"]
"""error: stops a job; warning: may slow a job or change its results; note: differs from other hosts."""
Values = Mapping[str, Any]
"""Values of a host, as its errand and the driver have read them: parts by name, and values in each."""


class Finding(NamedTuple):
    """A fault of one host."""

    host: str
    level: Level
    subject: str
    """Name of the check: `torch`, `clock`."""
    text: str
    remedy: str = ""
    """The next step; empty for none."""


class Flaw(NamedTuple):
    """A fault of a value by itself, whatever other hosts have."""

    level: Level
    text: str
    remedy: str = ""


class Outlier(NamedTuple):
    """A host with another value than most hosts."""

    host: str
    text: str


Show = Callable[[Any], str]
Compare = Callable[[Mapping[str, Any], Show], Iterable[Outlier]]
"""Returns the differing hosts, from the values by host and the function for showing a value."""


def _no_fault(_value: Any, _values: Values) -> Iterable[Flaw]:
    return ()


class Check(NamedTuple):
    """A line of the table: a value of every host."""

    name: str
    """Its name in the table, in JSON and in the file of --expect."""
    read: Callable[[Values], Any]
    """Returns the value; None for a host without it. May raise KeyError, TypeError, IndexError and StopIteration."""
    about: str = ""
    """Its meaning and unit, for the documentation."""
    show: Show = str
    compare: Compare | None = None
    level: Level = "warning"
    """Level of a value that differs."""
    remedy: str = ""
    """The next step for a value that differs."""
    judge: Callable[[Any, Values], Iterable[Flaw]] = _no_fault
    """Returns the faults of a value by itself."""

    def value(self, values: Values) -> Any:
        """Return the value of a host; None if it is unknown."""
        try:
            return self.read(values)
        except (KeyError, TypeError, IndexError, StopIteration):
            return None


def reference(values: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return the value of most hosts (of the first host, if two values are as frequent) and the hosts with it."""
    keys = {host: repr(value) for host, value in values.items()}
    key, _ = Counter(keys.values()).most_common(1)[0]
    hosts = [host for host in values if keys[host] == key]
    return values[hosts[0]], hosts


def same(values: Mapping[str, Any], show: Show) -> Iterator[Outlier]:
    """Compare values for equality; a host without the value differs too."""
    usual, hosts = reference(values)
    others = "the others" if len(hosts) > 1 else hosts[0]
    for host, value in values.items():
        if value != usual:
            text = f"{_shown(value, show)} here, {_shown(usual, show)} on {others}"
            yield Outlier(host, text)


def same_if_any(values: Mapping[str, Any], show: Show) -> Iterator[Outlier]:
    """Compare known values for equality."""
    values = {host: value for host, value in values.items() if value is not None}
    return same(values, show) if values else iter(())


def _shown(value: Any, show: Show) -> str:
    return "none" if value is None else show(value)


def low(ratio: float) -> Compare:
    """Return a comparison of numbers: below `ratio` of the median is too small."""

    def compare(values: Mapping[str, Any], show: Show) -> Iterator[Outlier]:
        numbers = {host: value for host, value in values.items() if value is not None}
        # Two hosts: the better one counts.
        middle = median_high(numbers.values()) if numbers else 0
        for host, value in numbers.items():
            if value < ratio * middle:
                yield Outlier(host, f"{show(value)} here, {show(middle)} in the middle of all hosts")

    return compare


def high(factor: float, least: float) -> Compare:
    """Return a comparison of numbers: above `factor` times the median, and above `least`, is too large."""

    def compare(values: Mapping[str, Any], show: Show) -> Iterator[Outlier]:
        numbers = {host: value for host, value in values.items() if value is not None}
        middle = median_low(numbers.values()) if numbers else 0
        for host, value in numbers.items():
            if value > max(least, factor * middle):
                yield Outlier(host, f"{show(value)} here, {show(middle)} in the middle of all hosts")

    return compare


def findings_of(checks: Sequence[Check], values: Mapping[str, Values]) -> list[Finding]:
    """Return the findings of all hosts, in the order of the checks; `values` are the hosts' by name."""
    findings = list(_unread(values))
    for check in checks:
        by_host = {host: check.value(of_host) for host, of_host in values.items()}
        judged: set[str] = set()
        for host, value in by_host.items():
            for fault in () if value is None else check.judge(value, values[host]):
                judged.add(host)
                findings.append(Finding(host, fault.level, check.name, fault.text, fault.remedy))
        if check.compare is None or len(by_host) == 1 or all(value is None for value in by_host.values()):
            continue
        # A value that is wrong by itself is no news a second time.
        findings += [
            Finding(difference.host, check.level, check.name, difference.text, check.remedy)
            for difference in check.compare(by_host, check.show)
            if difference.host not in judged
        ]
    return findings


_NEEDED = ("files", "software")
"""Parts without which no job runs: a file system or a Python hangs."""


def _unread(values: Mapping[str, Values]) -> Iterator[Finding]:
    """Yield a finding for each unread part of a host, with the cause."""
    for host, of_host in values.items():
        for part, cause in of_host.get("problems", {}).items():
            level: Level = "error" if part in _NEEDED else "warning"
            yield Finding(host, level, part, cause, "look there by hand: df, nvidia-smi, the job's Python")


def merged(findings: Iterable[Finding]) -> list[tuple[list[str], Finding]]:
    """Return each fault once, with its hosts, errors first."""
    hosts: dict[Finding, list[str]] = {}
    for finding in findings:
        hosts.setdefault(finding._replace(host=""), []).append(finding.host)
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(
        ((names, finding) for finding, names in hosts.items()), key=lambda pair: order[pair[1].level]
    )
