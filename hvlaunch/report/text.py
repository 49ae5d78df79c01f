"""The failure report as text, printed last for whoever must find the cause at 3 a.m."""

import re
from collections.abc import Iterable
from signal import SIGKILL, SIGPIPE

from hvlaunch.console.files import rank_directory
from hvlaunch.console.lines import visible
from hvlaunch.console.status import duration
from hvlaunch.errors import EXIT_NOT_WRITTEN
from hvlaunch.hosts.parse import fold_hosts, fold_ranks
from hvlaunch.job import JobResult, WorkerExit
from hvlaunch.report.consequences import lost_connection
from hvlaunch.report.diagnosis import start_advice
from hvlaunch.report.evidence import Evidence
from hvlaunch.report.failure_report import Cause, FailureReport, Memory, Missing, Survivors
from hvlaunch.report.wording import delta, describe, end, endings, failed_itself, signal_name
from hvlaunch.telemetry.stack import places

__all__ = ["as_text"]

_GIB = 1 << 30
_PATH = re.compile(r"(?<=: command not found) \(PATH=[^)]*\)$")


def as_text(report: FailureReport, *, is_verbose: bool = False) -> str:
    """Return the report as plain text that ends with a newline, or "" for a job that succeeded.

    `is_verbose`: with the PATH in which a command was not found.
    """
    result = report.result
    match report.outcome:
        case "running" | "well":
            return ""
        case "not started":
            lines = _not_started(result.exits)
            # Ten directories would hide the cause.
            lines = lines if is_verbose else [_PATH.sub("", line) for line in lines]
        case "interrupted":
            lines = [_interrupted(result, result.interrupted or 0, report.size)]
        case "error":
            lines = _error(report)
        case "failed" if report.cause is not None:
            lines = _failed(report, report.cause)
        case _:
            ends = _workers(result, report.size)
            unwritten = " (some output could not be written)" if result.exit_code == EXIT_NOT_WRITTEN else ""
            lines = [f"hvlaunch: the job ended with exit code {result.exit_code}{unwritten}", *ends]
    return "\n".join(lines) + "\n"


def _error(report: FailureReport) -> list[str]:
    result = report.result
    described = [] if result.error is None else describe(result.error)
    lines = [*described, *_workers(result, report.size), *_survivors(report.survivors)]
    if result.interrupted is not None:
        lines.append(f"  Interrupted by {signal_name(result.interrupted)}.")
    return lines


def _not_started(exits: Iterable[WorkerExit]) -> list[str]:
    """Return a line for each reason why the command could not start; hosts with the same reason share a line."""
    hosts: dict[tuple[str, str | None], list[str]] = {}
    for worker in exits:
        if worker.not_started is not None:
            hosts.setdefault((worker.not_started, start_advice(worker)), []).append(worker.host)
    return [
        line
        for (cause, hint), names in hosts.items()
        for line in (f"hvlaunch: {fold_hosts(names)}: {cause}", *([f"  Try: {hint}"] if hint else []))
    ]


def _failed(report: FailureReport, cause: Cause) -> list[str]:
    result, failure, size = report.result, cause.worker, report.size
    victim = result.first_victim
    # The cause comes first, and the advice last, next to the prompt.
    lines = [_headline(failure, size, is_first=victim is None), *_quote("Its", cause.evidence)]
    if victim is not None:
        lines.append(_of_victim(victim, failure, report.evidence.get(victim.rank)))
    lines += [_of_memory(usage) for usage in cause.memory]
    if cause.missing is not None:
        lines += _of_missing(cause.missing, failure.host)
    # These ranks have lines of their own above.
    named = {failure.rank, *([] if victim is None else [victim.rank])}
    others = [worker for worker in result.exits if worker.rank not in named]
    lines += _indented(
        "The others", endings(others, size, failure, named=named, never_started=result.never_started)
    )
    lines += _consequences(report, cause, others)
    lines += _survivors(report.survivors)
    if result.interrupted is not None:
        lines.append(f"  Then interrupted by {signal_name(result.interrupted)}.")
    if result.error is not None:
        lines += _indented("Also", [line.removeprefix("hvlaunch: ") for line in describe(result.error)])
    if report.output is not None:
        lines.append(
            f"  All output of rank {failure.rank}: {rank_directory(report.output, failure.rank, size)}/"
        )
    return [*lines, f"  Try: {cause.hint}"] if cause.hint else lines


def _consequences(report: FailureReport, cause: Cause, others: Iterable[WorkerExit]) -> list[str]:
    """Name the workers that failed only because the cause had ended."""
    # The cause itself lost a connection, so it can't explain the others' losses.
    if lost_connection(cause.evidence):
        return []
    ended = [worker for worker in others if worker.rank in report.evidence]
    lost = [worker.rank for worker in ended if lost_connection(report.evidence[worker.rank])]
    if not lost:
        return []
    failed_alone = any(failed_itself(worker) and worker.rank not in lost for worker in ended)
    names = fold_ranks(lost).capitalize() if failed_alone else "The others"
    return [f"  {names} lost connections because of rank {cause.worker.rank}."]


def _of_memory(memory: Memory) -> str:
    used, total = memory.used / _GIB, memory.total / _GIB
    return f"  {visible(memory.of)} had {used:.1f} of {total:.1f} GiB in use, {delta(memory.when)}."


def _of_missing(missing: Missing, host: str) -> list[str]:
    """Compare the hosts with and without it; return [] if no other host has answered."""
    name = visible(f"{missing.kind} {missing.name}")
    without = [host, *(lacking_host for lacking_host in missing.lacking if lacking_host != host)]
    verb = "lacks" if len(without) == 1 else "lack"
    if missing.having:
        have = "has" if len(missing.having) == 1 else "have"
        return [f"  {fold_hosts(without)} {verb} the {name}; {fold_hosts(missing.having)} {have} it."]
    return [f"  {fold_hosts(without)} {verb} the {name}."] if missing.lacking else []


def _headline(failure: WorkerExit, size: int, *, is_first: bool) -> str:
    subject = f"hvlaunch: rank {failure.rank} of {size} on host {failure.host}"
    if failure.stopped:
        return f"{subject} failed, and was stopped by hvlaunch before it ended, after {duration(failure.when)}: {end(failure)}"
    first = " first" if size > 1 and is_first else ""
    # A peak of memory explains only a kill by the kernel or a scheduler.
    peak = ""
    if failure.max_rss and (failure.oom_killed or failure.exit_code == 128 + SIGKILL):
        peak = f"; its memory peaked at {failure.max_rss / _GIB:.1f} GiB"
    return f"{subject} failed{first}, after {duration(failure.when)}: {end(failure)}{peak}"


def _of_victim(victim: WorkerExit, failure: WorkerExit, evidence: Evidence | None) -> str:
    """Describe the worker that failed first but was not the cause."""
    when = delta(victim.when - failure.when)
    why = ", since it lost a connection" if evidence is not None and lost_connection(evidence) else ""
    return f"  Rank {victim.rank} on host {victim.host} was the first to end, {when}{why}: {end(victim)}"


def _workers(result: JobResult, size: int) -> list[str]:
    """Return how the workers ended if no worker was the cause."""
    if not result.exits:
        has_host = result.error is not None and (result.error.host is not None or result.error.errors)
        return ["  The job ends: no worker was started."] if has_host and not result.elapsed else []
    ends = endings(result.exits, size, None, never_started=result.never_started)
    return _indented(f"The workers, after {duration(result.elapsed)}", ends)


def _survivors(survivors: Survivors) -> list[str]:
    lines = [visible(line) for line in (*places(survivors.places), *survivors.notes)]
    kept = [f"  All their stacks: hvlaunch stacks {survivors.job_id}"] if lines and survivors.job_id else []
    return [*_indented("Before they were stopped", lines), *kept]


def _interrupted(result: JobResult, number: int, size: int) -> str:
    why = " (the reader of its output is gone)" if number == SIGPIPE else ""
    by = f"hvlaunch: interrupted by {signal_name(number)}{why}"
    if not result.exits and not result.elapsed:
        return f"{by} before the workers were started"
    # Ranks without an end: never started, or their hosts were lost.
    missing = set(range(size)) - {worker.rank for worker in result.exits}
    waiting = missing & set(result.never_started)
    unknown = missing - waiting
    killed = [worker.rank for worker in result.exits if worker.signal == SIGKILL and worker.stopped]
    all_ended = "all others have ended" if waiting else "all workers have ended"
    ended = f"how {fold_ranks(unknown)} ended is not known" if unknown else all_ended
    forced = f", {fold_ranks(killed)} only by SIGKILL" if killed else ""
    never = f"; never started: {fold_ranks(waiting)}" if waiting else ""
    return f"{by} after {duration(result.elapsed)}; {ended}{forced}{never}"


def _quote(owner: str, evidence: Evidence) -> list[str]:
    return _indented(f"{owner} {evidence.kind}", evidence.lines)


def _indented(title: str, lines: Iterable[str]) -> list[str]:
    body = [f"    {line}".rstrip() for line in lines]
    return [f"  {title}:", *body] if body else []
