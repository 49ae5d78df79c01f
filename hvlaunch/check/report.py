"""The comparison of hosts as a text, as JSON, as a page, and as a hostfile. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from hvlaunch.check import Check, Finding, Level, Values, merged
from hvlaunch.console.lines import visible_line
from hvlaunch.console.status import count
from hvlaunch.hosts.parse import host_set, hostfile_line
from hvlaunch.job import Host
from hvlaunch.named_tuples import NamedTuple

__all__ = ["Comparison", "as_hostfile", "as_html", "as_json", "as_text"]

_MARKS: dict[Level, str] = {"error": "!!", "warning": "!", "note": "~"}
_WIDEST = 48
"""Characters of a value in the table."""


class Comparison(NamedTuple):
    """The hosts, their values, and the findings."""

    hosts: Sequence[Host]
    checks: Sequence[Check]
    values: Mapping[str, Values]
    """Values of the hosts that answered, by name."""
    findings: Sequence[Finding]

    def level(self, host: str) -> Level | None:
        """Return the worst level of a host's findings; None for a good host."""
        levels = {finding.level for finding in self.findings if finding.host == host}
        return next((level for level in _MARKS if level in levels), None)

    def marks(self, subject: str) -> dict[str, Level]:
        """Return the worst level of each host with a finding of this check."""
        levels: dict[str, Level] = {}
        for level in reversed(_MARKS):
            levels |= {
                finding.host: level
                for finding in self.findings
                if finding.subject == subject and finding.level == level
            }
        return levels

    def cells(self, check: Check) -> dict[str, str]:
        """Return the known values as text, by host."""
        by_host = {host: check.value(values) for host, values in self.values.items()}
        return {
            host: visible_line(check.show(value))[:_WIDEST]
            for host, value in by_host.items()
            if value is not None
        }


def as_text(comparison: Comparison, *, with_notes: bool = False) -> str:
    """Return the table and the findings for a terminal. Findings of several hosts are told once."""
    faults = merged(comparison.findings)
    counts = Counter(finding.level for _, finding in faults)
    verdict = ", ".join(count(counts[level], level) for level in _MARKS if counts[level] and level != "note")
    lines = [f"{count(len(comparison.hosts), 'host')}: {verdict or 'no errors, no warnings'}", ""]
    rows = [row for check in comparison.checks if (row := _row(comparison, check)) is not None]
    width = max((len(row[1]) for row in rows), default=0)
    lines += [f"  {name:<13} {usual:<{width}}  {others}".rstrip() for name, usual, others in rows]
    for hosts, finding in faults:
        if finding.level != "note" or with_notes:
            lines += ["", f"{finding.level:<8} {host_set(hosts)}: {_words(finding)}"]
            if finding.remedy:
                lines.append(f"{'':8} try: {finding.remedy}")
    return "\n".join([*lines, ""])


def _words(finding: Finding) -> str:
    return f"{finding.subject}: {visible_line(finding.text)}"


def _row(comparison: Comparison, check: Check) -> tuple[str, str, str] | None:
    """Return the name, the value of most hosts, and the other hosts; None for a check without values."""
    cells, marks = comparison.cells(check), comparison.marks(check.name)
    if not cells and not marks:
        return None
    usual = {cell: None for host, cell in cells.items() if host not in marks}
    others: dict[str, list[str]] = {}
    for host in comparison.values:
        if host in marks:
            others.setdefault(f"{_MARKS[marks[host]]} {cells.get(host, 'none')}", []).append(host)
    shown = [*usual]
    if len(shown) > 1:
        numbers = {
            check.value(values): cells[host]
            for host, values in comparison.values.items()
            if host in cells and host not in marks
        }
        ordered = [numbers[number] for number in sorted(numbers)]
        shown = [f"{ordered[0]} to {ordered[-1]}"]
    return (
        check.name,
        "".join(shown),
        "; ".join(f"{cell} on {host_set(hosts)}" for cell, hosts in others.items()),
    )


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return everything as plain data; docs/interfaces/check.md has its form."""
    return {
        "errors": sum(finding.level == "error" for finding in comparison.findings),
        "warnings": sum(finding.level == "warning" for finding in comparison.findings),
        "findings": [finding._asdict() for finding in comparison.findings],
        "hosts": {
            host.name: {
                "level": comparison.level(host.name) or "good",
                "values": _values_of(comparison, host.name),
                "details": comparison.values.get(host.name),
            }
            for host in comparison.hosts
        },
    }


def _values_of(comparison: Comparison, host: str) -> dict[str, Any]:
    values = comparison.values.get(host)
    return {} if values is None else {check.name: check.value(values) for check in comparison.checks}


_STYLE = """
:root { color-scheme: light dark; --text: #1b2430; --back: #fff; --line: #d9dee5; --error: #b3261e; --warning: #8a5000; --note: #5b6675; }
@media (prefers-color-scheme: dark) { :root { --text: #e3e8ee; --back: #191f27; --line: #2d3642; --error: #ff8a80; --warning: #e5ac4d; --note: #97a3b2; } }
body { margin: 1rem; color: var(--text); background: var(--back); font: 14px/1.45 system-ui, sans-serif; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
tbody th { position: sticky; left: 0; background: var(--back); }
.error { color: var(--error); font-weight: 600; } .warning { color: var(--warning); font-weight: 600; } .note { color: var(--note); font-style: italic; }
"""
# As the report's page: opened from a mail, it must not load or run anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def as_html(comparison: Comparison) -> str:
    """Return a page without scripts: the findings, and a table with a column for each host."""
    faults = [
        f'<li><span class="{finding.level}">{finding.level}</span> <b>{escape(host_set(hosts))}</b>: '
        f"{escape(_words(finding))}{f' <i>Try: {escape(finding.remedy)}</i>' if finding.remedy else ''}</li>"
        for hosts, finding in merged(comparison.findings)
    ]
    rows = []
    for check in comparison.checks:
        cells, marks = comparison.cells(check), comparison.marks(check.name)
        if cells or marks:
            row = "".join(
                f'<td class="{marks.get(host.name, "")}">{escape(cells.get(host.name, ""))}</td>'
                for host in comparison.hosts
            )
            rows.append(f"<tr><th>{escape(check.name)}</th>{row}</tr>")
    heads = "".join(
        f'<th class="{comparison.level(host.name) or ""}">{escape(host.name)}</th>'
        for host in comparison.hosts
    )
    return (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{len(comparison.hosts)} hosts</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><style>{_STYLE}</style>'
        f"<h1>{len(comparison.hosts)} hosts</h1><ul>{''.join(faults)}</ul>"
        f'<div class="wide"><table><thead><tr><th></th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div></html>\n'
    )


def as_hostfile(comparison: Comparison) -> str:
    """Return the lines of the hosts without errors, with their slots and addresses; interfaces are in comments."""
    return "".join(f"{line}\n" for line in _lines(comparison))


def _lines(comparison: Comparison) -> Iterable[str]:
    for host in comparison.hosts:
        values = comparison.values.get(host.name)
        if values is None or comparison.level(host.name) == "error":
            continue
        network, gpus = values["network"] or {}, (values["gpus"] or {}).get("gpus", ())
        slots, address = values["session"]["slots"] or len(gpus) or 1, host.address or network.get("address")
        line, interface = hostfile_line(host, slots=slots, address=address), network.get("interface")
        yield f"{line} # {interface}" if interface else line
