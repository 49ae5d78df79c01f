"""Comparison of hosts: from the values that an errand has read on each host, and the good values of --expect, to findings. Pure.

The table of checks (`hvlaunch/check/table.py`) says how to read, show, judge and compare each value.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median_high, median_low
from typing import Any, Literal

from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "Check",
    "Compare",
    "Expectation",
    "Finding",
    "Flaw",
    "Level",
    "Outlier",
    "Values",
    "expectations_of",
    "findings_of",
    "high",
    "low",
    "merged",
    "reference",
    "same",
    "same_if_any",
    "unexpected",
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


_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGTP]?)(iB|B)?")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_LIMITS = ("min", "max")


class Expectation(NamedTuple):
    """A check with its good value."""

    check: Check
    text: str | None = None
    """The value itself; None for limits."""
    least: float | None = None
    most: float | None = None


def expectations_of(tree: Mapping[str, Any], checks: Iterable[Check]) -> list[Expectation]:
    """Return the expectations of a file, from its values as text. Raises ValueError."""
    by_name = {check.name: check for check in checks}
    expectations = []
    for name, value in tree.items():
        check = by_name.get(name)
        if check is None:
            raise ValueError(f"unknown name {name!r}; the names are {', '.join(by_name)}")
        if isinstance(value, str):
            expectations.append(Expectation(check, value))
            continue
        if not isinstance(value, Mapping) or not value or not value.keys() <= {*_LIMITS}:
            raise ValueError(f"{name}: it must be a value, or {{min = ..., max = ...}}")
        least, most = (_amount(str(value[limit])) if limit in value else None for limit in _LIMITS)
        if (least is None) != ("min" not in value) or (most is None) != ("max" not in value):
            raise ValueError(f"{name}: min and max must be numbers, such as 8, 0.5 or 64G")
        expectations.append(Expectation(check, None, least, most))
    return expectations


def _amount(text: str) -> float | None:
    """Return a number, or a size in bytes: 64G and 64GiB are powers of 1024, 64GB of 1000; None for another text."""
    match = _AMOUNT.fullmatch(text)
    if match is None:
        return None
    base = 1000 if match[3] == "B" else 1024
    return float(match[1]) * float(base ** _POWERS[match[2].upper()])


def unexpected(expectations: Iterable[Expectation], values: Mapping[str, Values]) -> Iterator[Finding]:
    """Yield an error for each unexpected or missing value."""
    for check, text, least, most in expectations:
        for host, of_host in values.items():
            value = check.value(of_host)
            shown = "none" if value is None else check.show(value)
            number = _number_of(value)
            if text is not None:
                is_good = text in (shown, str(value)) or (number is not None and number == _amount(text))
                good = text
            else:
                is_good = number is not None and (least is None or number >= least)
                is_good = is_good and (most is None or number is None or number <= most)
                limits = (("least", least), ("most", most))
                good = " and ".join(
                    f"at {word} {_shown_limit(check, limit)}" for word, limit in limits if limit is not None
                )
            if not is_good:
                yield Finding(host, "error", check.name, f"{shown} here, {good} expected")


def _shown_limit(check: Check, limit: float) -> str:
    try:
        return check.show(limit)
    except TypeError:
        return f"{limit:g}"  # the value itself has more than a number


def _number_of(value: Any) -> float | None:
    """Return the number of a value; of an offset with its uncertainty, how far it is from 0."""
    if isinstance(value, tuple) and isinstance(value[0], float):
        return abs(value[0])
    return value if isinstance(value, int | float) else None
