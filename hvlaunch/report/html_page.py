"""The failure report as one HTML file: no network access, no script, and all foreign text escaped. Pure."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from typing import Any

from hvlaunch.console.lines import visible
from hvlaunch.console.status import code_words, duration

__all__ = ["as_html"]

Form = Mapping[str, Any]

_GIB = 1 << 30
_OUTCOMES = {
    "running": "it runs",
    "well": "ended well",
    "failed": "failed",
    "not started": "could not be started",
    "error": "failed",
    "interrupted": "was interrupted",
}
_STYLE = """
:root { color-scheme: light dark; --back: #f6f7f9; --panel: #fff; --text: #1b2430; --dim: #5b6675; --line: #d9dee5;
  --bad: #b3261e; --good: #1a7f45; --warn: #8a5000; --code: #f1f3f6; }
@media (prefers-color-scheme: dark) { :root { --back: #11151b; --panel: #191f27; --text: #e3e8ee; --dim: #97a3b2;
  --line: #2d3642; --bad: #ff8a80; --good: #5cc98a; --warn: #e5ac4d; --code: #12171e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 64rem; margin: auto; padding: 1rem; display: grid; gap: 1rem; grid-template-columns: minmax(0, 1fr); }
section { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem 1rem; }
h1 { font-size: 1.25rem; margin: 0 0 .5rem; overflow-wrap: anywhere; color: var(--bad); }
h1.well { color: var(--good); }
h2 { font-size: 1rem; margin: 0 0 .5rem; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .1rem 1rem; margin: 0; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
pre { font: .85rem/1.45 ui-monospace, monospace; background: var(--code); border-radius: .35rem; padding: .6rem; margin: .5rem 0;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 40rem; overflow: auto; }
p { margin: .4rem 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--dim); font-weight: 600; }
.cause td { color: var(--bad); font-weight: 600; } .failed td { color: var(--bad); } .consequence td { color: var(--warn); }
footer { text-align: center; color: var(--dim); font-size: .85rem; padding: 0 1rem 1.5rem; }
summary { cursor: pointer; color: var(--dim); }
"""
# The page may be opened from a mail, so it must not load or run anything, even if an escape were missing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def as_html(report: Form) -> str:
    """Render the dictionary of as_json() as a page."""
    job = report["job"]
    name = job["name"] or job["id"] or "job"
    title = f"{name}: {_OUTCOMES[report['outcome']]}"
    parts = [
        _head(report, title),
        _cause(report["cause"]) if report["cause"] else "",
        _stacks(report["stacks"]),
        _rounds(report["rounds"]),
        _workers(report["workers"]),
        _whole(report["text"]),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + f"\n</main>\n<footer>Made by hvlaunch {_text(report['hvlaunch'])}. What looked like a secret is hidden.</footer>\n"
        "</body>\n</html>\n"
    )


def _text(value: object) -> str:
    """Escape foreign text: no markup, no control characters, no characters that reverse the direction of text."""
    return escape(visible(str(value)))


def _section(title: str, *body: str, css: str = "") -> str:
    return f"<section{css}><h2>{_text(title)}</h2>{''.join(body)}</section>"


def _head(report: Form, title: str) -> str:
    job = report["job"]
    first = report["text"].partition("\n")[0].removeprefix("hvlaunch: ") or title
    facts = [
        ("job", " ".join(word for word in (job["name"], job["id"]) if word)),
        ("command", shlex.join(job["command"])),
        ("code", ", commit ".join(filter(None, code_words(job["code"])))),
        ("on", job["machine"]),
        ("began", _moment(job["began"])),
        ("ended", _moment(report["ended"])),
        ("ran for", duration(report["elapsed"])),
        ("workers", report["size"]),
        ("exit code", report["exit_code"]),
    ]
    css = ' class="well"' if report["outcome"] in ("well", "running") else ""
    return f"<section><h1{css}>{_text(first)}</h1>{_facts(facts)}</section>"


def _facts(facts: Iterable[tuple[str, object]]) -> str:
    items = "".join(
        f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts if value not in (None, "")
    )
    return f"<dl>{items}</dl>"


def _cause(cause: Form) -> str:
    facts = [
        ("rank", cause["rank"]),
        ("host", cause["host"]),
        ("end", cause["end"]),
        ("kind", cause["kind"]),
        ("error", cause["exception"]),
        ("after", duration(cause["when"])),
        *(("memory", _memory(usage)) for usage in cause["memory"]),
        ("not found", _missing(cause["missing"], cause["host"])),
        ("all output", cause["output"]),
        ("try", cause["hint"]),
    ]
    return _section("The first cause", _facts(facts), _quote(cause["evidence"]))


def _quote(evidence: Form) -> str:
    if not evidence["lines"]:
        return ""
    return f"<p>Its {_text(evidence['kind'])}:</p>{_block(evidence['lines'])}"


def _block(lines: Sequence[str]) -> str:
    return f'<pre tabindex="0">{_text(chr(10).join(lines))}</pre>'


def _memory(memory: Form) -> str:
    return f"{memory['of']} had {memory['used'] / _GIB:.1f} of {memory['total'] / _GIB:.1f} GiB in use"


def _missing(missing: Form | None, host: str) -> str | None:
    if missing is None:
        return None
    having, lacking = (", ".join(missing[name]) for name in ("there", "lacking"))
    have = f"; it is on {having}" if having else ""
    return f"{missing['what']} {missing['name']}, by host {host}{have}" + (
        f"; also missing on {lacking}" if lacking else ""
    )


def _stacks(stacks: Form) -> str:
    if not stacks["places"] and not stacks["notes"]:
        return ""
    rows = [(place["ranks"], place["place"]) for place in stacks["places"]]
    tree = (
        f"<details><summary>All stacks</summary>{_block(stacks['tree'])}</details>" if stacks["tree"] else ""
    )
    notes = "".join(f"<p>{_text(note)}</p>" for note in stacks["notes"])
    return _section(
        "Before they were stopped", _table(("ranks", "where"), [("", row) for row in rows]), notes, tree
    )


def _rounds(rounds: Sequence[Form]) -> str:
    parts: list[str] = []
    for failed in rounds:
        parts.append(
            f"<p><strong>Round {_text(failed['number'])}</strong>: {_text(failed['size'])} workers, {duration(failed['elapsed'])}"
            f"{': ' + _text(failed['cause']) if failed['cause'] else ''}</p>"
        )
        for worker in failed["failures"]:
            parts.append(
                f"<p>Rank {_text(worker['rank'])} on {_text(worker['host'])}: {_text(worker['end'])}</p>"
            )
            parts.append(_quote(worker["evidence"]))
    return _section("Rounds that failed before", *parts) if parts else ""


def _workers(workers: Sequence[Form]) -> str:
    rows = [
        (
            worker["role"].replace(" ", "-"),
            (
                worker["rank"],
                worker.get("host", ""),
                worker["role"],
                worker.get("end", ""),
                _seconds(worker.get("when")),
            ),
        )
        for worker in workers
    ]
    return _section("Workers", _table(("rank", "host", "role", "end", "after"), rows)) if rows else ""


def _seconds(when: float | None) -> str:
    return "" if when is None else f"{when:.2f} s"


def _table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[object]]]) -> str:
    head = "".join(f"<th>{_text(title)}</th>" for title in heads)
    body = "".join(
        f'<tr class="{re.sub("[^a-z-]", "", css)}">'
        + "".join(f"<td>{_text(cell)}</td>" for cell in row)
        + "</tr>"
        for css, row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _whole(text: str) -> str:
    if not text:
        return ""
    return f"<section><details><summary>As the terminal showed it</summary>{_block(text.rstrip().split(chr(10)))}</details></section>"


def _moment(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
