"""The failure report as data: the outcome, the cause if known, and each worker's end.

make_report() builds it from facts that the driver has collected. It is pure, except that advice() looks for
files.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
from typing import Any, Literal

from hvlaunch.job import JobResult, WorkerExit
from hvlaunch.report.bill import Bill
from hvlaunch.report.diagnosis import Kind, advice, exception, kind, start_advice
from hvlaunch.report.evidence import Evidence, find_evidence
from hvlaunch.telemetry.stack import ProcessStack, groups, notes, tree_lines

__all__ = [
    "Cause",
    "FailureReport",
    "Memory",
    "Missing",
    "Outcome",
    "RoundFailure",
    "Survivors",
    "make_report",
    "survivors",
]

Outcome = Literal["running", "well", "failed", "not started", "error", "interrupted"]
"""How the job ended. `failed` has a worker as its cause; `error` has another cause, such as a lost host or a hang."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in use on a host or a GPU, in bytes."""

    of: str
    """`host a` or `GPU 0 of host a`."""
    used: int
    total: int
    when: float
    """Seconds after the worker's end; negative before it."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A module or file that a worker did not find, and the answers of other hosts."""

    kind: Literal["module", "file"]
    name: str
    having: tuple[str, ...]
    """Hosts with it."""
    lacking: tuple[str, ...]
    """Hosts without it."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The worker that failed first, with its evidence."""

    worker: WorkerExit
    kind: Kind
    evidence: Evidence
    exception: str | None
    """The first line of the exception's message, if there is a traceback."""
    hint: str | None
    memory: tuple[Memory, ...] = ()
    missing: Missing | None = None


@dataclass(frozen=True, slots=True)
class Survivors:
    """The stacks of workers before hvlaunch stopped them."""

    places: tuple[tuple[tuple[int, ...], str], ...] = ()
    """Ranks and their common place; the smallest group first."""
    notes: tuple[str, ...] = ()
    """Places without full stacks, and the reasons."""
    tree: tuple[str, ...] = ()
    """All stacks, merged into one tree."""
    job_id: str | None = None
    """The job that keeps the full stacks, if any."""


@dataclass(frozen=True, slots=True)
class RoundFailure:
    """A round of an elastic job that ended early, and the workers that failed in it."""

    number: int
    size: int
    hosts: tuple[str, ...]
    elapsed: float
    """Seconds from the round's start to its end."""
    cause: str | None
    failures: tuple[tuple[WorkerExit, Evidence], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """Everything that the text, JSON and HTML forms show."""

    outcome: Outcome
    result: JobResult
    size: int
    """Number of workers in the last round."""
    cause: Cause | None = None
    evidence: Mapping[int, Evidence] = field(default_factory=dict)
    """Evidence by rank, for each rank that failed or was stopped."""
    start_hints: Mapping[int, str] = field(default_factory=dict)
    """What to try, by rank, for workers whose command could not be started."""
    survivors: Survivors = field(default_factory=Survivors)
    rounds: tuple[RoundFailure, ...] = ()
    output: Path | None = None
    """Directory of all output, if --output-filename keeps it."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """The job's command and circumstances, as in `about.json` of its directory."""
    ended: float | None = None
    """Seconds since 1970."""
    bill: Bill | None = None
    """None for a job that keeps no account of its time."""
    slow: Mapping[str, str] = field(default_factory=dict)
    """Cause of the slowness by host."""


def make_report(
    result: JobResult,
    tails: Mapping[int, bytes],
    size: int,
    *,
    output: Path | None = None,
    before_kill: Survivors | None = None,
    memory: Iterable[Memory] = (),
    missing: Missing | None = None,
    rounds: Iterable[RoundFailure] = (),
    about: Mapping[str, Any] | None = None,
    ended: float | None = None,
    bill: Bill | None = None,
    slow: Mapping[str, str] | None = None,
) -> FailureReport:
    """Build the report from the job's result.

    tails: the last bytes of stderr by rank (Printer.tail). size: the number of workers. output: the directory
    of all output, if kept. memory and missing: answers of hosts about the cause.
    """
    failure = result.failure
    suspects = [end for end in result.exits if not end.ok]
    evidence = {end.rank: find_evidence(end, tails.get(end.rank, b"")) for end in suspects}
    cause = None
    if failure is not None:
        # Usually the failed worker is among the suspects already.
        of_failure = evidence.setdefault(failure.rank, find_evidence(failure, tails.get(failure.rank, b"")))
        cause = _cause(failure, of_failure, tuple(memory), missing)
    return FailureReport(
        outcome=_outcome(result),
        result=result,
        size=size,
        cause=cause,
        evidence=evidence,
        start_hints={
            end.rank: hint
            for end in suspects
            if end.not_started is not None and (hint := start_advice(end)) is not None
        },
        survivors=before_kill or Survivors(),
        rounds=tuple(rounds),
        output=output,
        about=about or {},
        ended=ended,
        bill=bill,
        slow=slow or {},
    )


def survivors(stacks: Sequence[ProcessStack], exits: Iterable[WorkerExit], job_id: str | None) -> Survivors:
    """Summarize the stacks; `job_id` names the job that keeps them all, if any."""
    gone = {end.rank for end in exits if not end.stopped}
    # A worker that ended by itself before its stack could be taken is not a survivor, so nothing of it is missing.
    stacks = [stack for stack in stacks if stack.threads or stack.rank not in gone]
    places = tuple((tuple(sorted(ranks)), place) for ranks, place in groups(stacks))
    tree = tuple(tree_lines(stacks)) if stacks else ()
    return Survivors(places, tuple(notes(stacks)), tree, job_id)


def _cause(
    worker: WorkerExit, evidence: Evidence, memory: tuple[Memory, ...], missing: Missing | None
) -> Cause:
    # Facts of hosts are shown only if they fit the kind: others would mislead.
    why = kind(worker, evidence)
    # Memory of the GPUs explains only a GPU's shortage, and memory of the host only the host's.
    relevant = [usage for usage in memory if usage.of.startswith("GPU") is (why == "gpu memory")]
    return Cause(
        worker,
        why,
        evidence,
        exception(evidence),
        advice(worker, evidence),
        tuple(relevant) if why in ("host memory", "gpu memory") or worker.signal == SIGKILL else (),
        missing if why in ("missing module", "missing file") else None,
    )


def _outcome(result: JobResult) -> Outcome:
    if result.failure is not None:
        return "failed" if result.failure.not_started is None else "not started"
    if result.error is not None:
        return "error"
    if result.interrupted is not None:
        return "interrupted"
    return "well" if result.exit_code == 0 else "failed"
