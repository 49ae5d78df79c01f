"""Makes the failure report of what is known when a job has ended, or while it runs. Pure, but for looking whether a file is here."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any

from hvlaunch.job import JobResult, WorkerExit
from hvlaunch.report.advice import advice
from hvlaunch.report.data import Cause, FailureReport, Memory, Missing, Outcome, RoundFailure, Survivors
from hvlaunch.report.evidence import Evidence, find_evidence
from hvlaunch.report.kinds import exception, kind
from hvlaunch.telemetry.merge import groups, notes, tree_lines
from hvlaunch.telemetry.stack import ProcessStack

__all__ = ["make_report", "survivors"]


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
