"""The failure report as JSON and as one HTML page. Pure.

docs/interfaces/report.md lists the fields of the JSON. Secrets are masked, since users pass reports on. The page has no script and needs no
network, and all foreign text in it is escaped.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hvlaunch import __version__
from hvlaunch.console.files import rank_directory
from hvlaunch.console.lines import visible
from hvlaunch.console.masking import masked_value, masked_words
from hvlaunch.console.status import code_words, duration
from hvlaunch.errors import Problem
from hvlaunch.hosts.parse import number_set
from hvlaunch.job import WorkerExit
from hvlaunch.report.diagnosis import role
from hvlaunch.report.evidence import Evidence
from hvlaunch.report.failure_report import Cause, FailureReport, Missing, RoundFailure
from hvlaunch.report.text import as_text, end, signal_name

__all__ = ["VERSION", "as_html", "as_json"]


VERSION = 1
"""Version of the format. It grows when a field disappears or changes its meaning, not when a field is added."""
_ABOUT = ("id", "name", "is_elastic", "cwd", "machine", "began")


def as_json(report: FailureReport) -> dict[str, Any]:
    """Return the report in the form that json.dumps() accepts."""
    result = report.result
    failure = None if report.cause is None else report.cause.worker
    command = [*masked_words([str(word) for word in report.about.get("command", ())])]
    return {
        "version": VERSION,
        "hvlaunch": __version__,
        "job": {
            **{name: report.about.get(name) for name in _ABOUT},
            "command": command,
            # The working tree's hash and commit; null without --sync.
            "code": report.about.get("code"),
        },
        "outcome": report.outcome,
        # A running job has a report too (GET /report), without an exit code.
        "exit_code": None if report.outcome == "running" else result.exit_code,
        "elapsed": round(result.elapsed, 3),
        "ended": report.ended,
        "size": report.size,
        "interrupted": None if result.interrupted is None else signal_name(result.interrupted),
        "error": None if result.error is None else _problem(result.error),
        "cause": None if report.cause is None else _cause(report, report.cause),
        "first_to_end": None
        if result.first_victim is None
        else _worker(report, result.first_victim, failure),
        "workers": [*_workers(report, failure)],
        "stacks": {
            "places": [
                {"ranks": number_set(ranks), "place": place} for ranks, place in report.survivors.places
            ],
            "notes": list(report.survivors.notes),
            "tree": list(report.survivors.tree),
        },
        # What the job took so far; null if its time was not counted.
        "bill": None if report.bill is None else report.bill._asdict(),
        "slow_hosts": dict(report.slow),
        "rounds": [_round(failed) for failed in report.rounds],
        # Mask by line: one secret must not hide the text after it.
        "text": "\n".join(map(masked_value, as_text(report).split("\n"))),
    }


def _cause(report: FailureReport, cause: Cause) -> dict[str, Any]:
    directory = (
        None if report.output is None else rank_directory(report.output, cause.worker.rank, report.size)
    )
    return {
        **_end(cause.worker),
        "kind": cause.kind,
        "exception": None if cause.exception is None else masked_value(cause.exception),
        "evidence": _evidence(cause.evidence),
        "memory": [asdict(usage) for usage in cause.memory],
        "missing": None if cause.missing is None else _missing(cause.missing),
        "hint": cause.hint,
        "output": None if directory is None else str(directory),
    }


def _missing(missing: Missing) -> dict[str, Any]:
    return {
        "what": missing.kind,
        "name": missing.name,
        "there": list(missing.having),
        "lacking": list(missing.lacking),
    }


def _workers(report: FailureReport, failure: WorkerExit | None) -> Iterator[dict[str, Any]]:
    """Yield each worker of the last round, by rank."""
    ends = {worker.rank: worker for worker in report.result.exits}
    for rank in sorted({*ends, *range(report.size)}):
        if rank in ends:
            yield _worker(report, ends[rank], failure)
        else:
            is_waiting = rank in report.result.never_started
            yield {"rank": rank, "role": "never started" if is_waiting else "unknown"}


def _worker(report: FailureReport, worker: WorkerExit, failure: WorkerExit | None) -> dict[str, Any]:
    is_cause = failure is not None and worker.rank == failure.rank
    return {
        **_end(worker),
        "role": "cause" if is_cause else role(worker, failure, report.evidence.get(worker.rank)),
    }


def _end(worker: WorkerExit) -> dict[str, Any]:
    return {
        "rank": worker.rank,
        **({"worker": worker.role} if worker.role else {}),
        "host": worker.host,
        "end": end(worker),
        "code": worker.code,
        "signal": None if worker.signal is None else signal_name(worker.signal),
        "when": round(worker.when, 3),
        "max_rss": worker.max_rss,
        "oom_killed": worker.oom_killed,
    }


def _evidence(evidence: Evidence) -> dict[str, Any]:
    return {"kind": evidence.kind, "lines": [masked_value(line) for line in evidence.lines]}


def _problem(problem: Problem) -> dict[str, Any]:
    return {
        "kind": problem.kind,
        "cause": problem.cause,
        "host": problem.host,
        "hint": problem.hint,
        "errors": [_problem(error) for error in problem.errors],
    }


def _round(failed: RoundFailure) -> dict[str, Any]:
    failures = [{**_end(worker), "evidence": _evidence(evidence)} for worker, evidence in failed.failures]
    return {
        **asdict(failed),
        "hosts": list(failed.hosts),
        "elapsed": round(failed.elapsed, 3),
        "failures": failures,
    }


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
        _cause_section(report["cause"]) if report["cause"] else "",
        _stacks_section(report["stacks"]),
        _rounds_section(report["rounds"]),
        _workers_section(report["workers"]),
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
    from html import escape  # noqa: PLC0415 (1 ms, for pages alone; each job with a directory has the JSON)

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


def _cause_section(cause: Form) -> str:
    facts = [
        ("rank", cause["rank"]),
        ("host", cause["host"]),
        ("end", cause["end"]),
        ("kind", cause["kind"]),
        ("error", cause["exception"]),
        ("after", duration(cause["when"])),
        *(("memory", _memory_words(usage)) for usage in cause["memory"]),
        ("not found", _missing_words(cause["missing"], cause["host"])),
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


def _memory_words(memory: Form) -> str:
    return f"{memory['of']} had {memory['used'] / _GIB:.1f} of {memory['total'] / _GIB:.1f} GiB in use"


def _missing_words(missing: Form | None, host: str) -> str | None:
    if missing is None:
        return None
    having, lacking = (", ".join(missing[name]) for name in ("there", "lacking"))
    have = f"; it is on {having}" if having else ""
    return f"{missing['what']} {missing['name']}, by host {host}{have}" + (
        f"; also missing on {lacking}" if lacking else ""
    )


def _stacks_section(stacks: Form) -> str:
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


def _rounds_section(rounds: Sequence[Form]) -> str:
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


def _workers_section(workers: Sequence[Form]) -> str:
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
    from datetime import datetime, timezone  # noqa: PLC0415 (as above)

    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
