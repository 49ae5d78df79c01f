"""The failure report as JSON; docs/interfaces/report.md lists the fields. Secrets are masked: users pass reports on."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from hvlaunch import __version__
from hvlaunch.console.files import rank_directory
from hvlaunch.console.masking import masked_value, masked_words
from hvlaunch.errors import Problem
from hvlaunch.hosts.parse import number_set
from hvlaunch.job import WorkerExit
from hvlaunch.report.diagnosis import role
from hvlaunch.report.evidence import Evidence
from hvlaunch.report.failure_report import Cause, FailureReport, Missing, RoundFailure
from hvlaunch.report.text import as_text, end, signal_name

__all__ = ["VERSION", "as_json"]

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
