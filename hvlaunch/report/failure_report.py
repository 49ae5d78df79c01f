"""The failure report as data: what happened, why as far as it is known, and what each worker did."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
from typing import Any, Literal

from hvlaunch.job import JobResult, WorkerExit
from hvlaunch.report.diagnosis import Kind, advice, exception, kind
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
"""How the job ended: a worker is the cause; the command could be started nowhere; something else is (a lost host, a hang)."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a host, or a GPU of it, had in use. Bytes."""

    of: str
    """`host a`, `GPU 0 of host a`."""
    used: int
    total: int
    when: float
    """Seconds since the worker's end; less than 0 is before it."""


@dataclass(frozen=True, slots=True)
class Missing:
    """What a worker did not find, and which other hosts were asked."""

    what: Literal["module", "file"]
    name: str
    there: tuple[str, ...]
    """Hosts that have it."""
    lacking: tuple[str, ...]
    """Hosts that lack it too."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The worker that is the first cause."""

    worker: WorkerExit
    kind: Kind
    evidence: Evidence
    exception: str | None
    """The last line of its traceback, or what stands there in a program that has none."""
    hint: str | None
    memory: tuple[Memory, ...] = ()
    missing: Missing | None = None


@dataclass(frozen=True, slots=True)
class Survivors:
    """What workers were doing before they were stopped."""

    places: tuple[tuple[tuple[int, ...], str], ...] = ()
    """Ranks, and where all of them were; the fewest first."""
    notes: tuple[str, ...] = ()
    """Where stacks are not the best that there could be, and why."""
    tree: tuple[str, ...] = ()
    """Their stacks, merged to one."""
    job_id: str | None = None
    """Under which all are kept, if they are."""


@dataclass(frozen=True, slots=True)
class RoundFailure:
    """A round of an elastic job that ended before its time, and who failed in it."""

    number: int
    size: int
    hosts: tuple[str, ...]
    elapsed: float
    """Seconds from its start to its end."""
    cause: str | None
    failures: tuple[tuple[WorkerExit, Evidence], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """`about` is what the job was begun with, as `about.json` of its directory has it."""

    outcome: Outcome
    result: JobResult
    size: int
    """Workers of the last round."""
    cause: Cause | None = None
    evidence: Mapping[int, Evidence] = field(default_factory=dict)
    """Of each rank that failed or was stopped."""
    survivors: Survivors = field(default_factory=Survivors)
    rounds: tuple[RoundFailure, ...] = ()
    output: Path | None = None
    """Where all output is kept, if it is."""
    about: Mapping[str, Any] = field(default_factory=dict)
    ended: float | None = None
    """Seconds since 1970."""


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
) -> FailureReport:
    """`tails` has the last bytes of stderr by rank (Printer.tail), `size` is the number of workers.

    `output` is where all output is kept, if it is; `memory` and `missing` are what hosts have said about the cause.
    """
    failure = result.failure
    suspects = [end for end in result.exits if not end.ok]
    evidence = {end.rank: find_evidence(end, tails.get(end.rank, b"")) for end in suspects}
    cause = None
    if failure is not None:
        own = evidence.setdefault(failure.rank, find_evidence(failure, tails.get(failure.rank, b"")))
        cause = _cause(failure, own, tuple(memory), missing)
    return FailureReport(
        outcome=_outcome(result),
        result=result,
        size=size,
        cause=cause,
        evidence=evidence,
        survivors=before_kill or Survivors(),
        rounds=tuple(rounds),
        output=output,
        about=about or {},
        ended=ended,
    )


def survivors(stacks: Sequence[ProcessStack], exits: Iterable[WorkerExit], job_id: str | None) -> Survivors:
    """What workers were doing; `job_id` is under which all is kept, if it is.

    Who ended by itself before it could be looked at did not survive: nothing is missing of it.
    """
    gone = {end.rank for end in exits if not end.stopped}
    stacks = [one for one in stacks if one.threads or one.rank not in gone]
    found = tuple((tuple(sorted(ranks)), place) for ranks, place in groups(stacks))
    tree = tuple(tree_lines(stacks)) if stacks else ()
    return Survivors(found, tuple(notes(stacks)), tree, job_id)


def _cause(
    worker: WorkerExit, evidence: Evidence, memory: tuple[Memory, ...], missing: Missing | None
) -> Cause:
    why = kind(worker, evidence)
    told = [one for one in memory if one.of.startswith("GPU") is (why == "gpu memory")]
    return Cause(
        worker,
        why,
        evidence,
        exception(evidence),
        advice(worker, evidence),
        tuple(told) if why in ("host memory", "gpu memory") or worker.signal == SIGKILL else (),
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
