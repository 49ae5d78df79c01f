"""The failure report: printed last of all, for a person who has to find out why at 3 a.m."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from signal import SIGKILL, SIGPIPE
from typing import NamedTuple

from hvlaunch.console.advice import advice, start_advice
from hvlaunch.console.causes import describe
from hvlaunch.console.consequences import lost_connection
from hvlaunch.console.duration import duration
from hvlaunch.console.endings import delta, end, endings, signal_name
from hvlaunch.console.evidence import Evidence, find_evidence
from hvlaunch.console.files import rank_directory
from hvlaunch.console.visible import visible
from hvlaunch.hosts.fold import fold_hosts, fold_ranks
from hvlaunch.job import JobResult, WorkerExit

__all__ = ["Doing", "failure_report"]


class Doing(NamedTuple):
    """What workers were doing before they were stopped."""

    places: Sequence[str]
    """Which ranks were where, a line for each place."""
    job_id: str | None
    """Under which all stacks are kept, if they are."""


def failure_report(
    result: JobResult,
    tails: Mapping[int, bytes],
    size: int,
    *,
    output_dir: Path | None = None,
    doing: Doing | None = None,
) -> str:
    """Plain text that ends with a newline; empty for a job that went well.

    `tails` has the last bytes of stderr by rank (Printer.tail), `size` is the number of workers, `output_dir` is
    where all output is kept, if it is; `doing` is what the workers did that were stopped, if it is known.
    """
    if result.failure is not None and result.failure.not_started is not None:
        lines = _not_started(result.exits)
    elif result.failure is not None:
        lines = _failed(result, result.failure, tails, size, output_dir, doing)
    elif result.error is not None:
        lines = [*describe(result.error), *_workers(result, size), *_doing(doing)]
        if result.interrupted is not None:
            lines.append(f"  Interrupted by {signal_name(result.interrupted)}.")
    elif result.interrupted is not None:
        lines = [_interrupted(result, result.interrupted, size)]
    elif result.exit_code != 0:
        lines = [f"hvlaunch: the job ended with exit code {result.exit_code}", *_workers(result, size)]
    else:
        return ""
    return "\n".join(lines) + "\n"


def _not_started(exits: Iterable[WorkerExit]) -> list[str]:
    """A line for each reason why the command can't be started; the hosts that say the same stand together."""
    hosts: dict[tuple[str, str | None], list[str]] = {}
    for worker in exits:
        if worker.not_started is not None:
            hosts.setdefault((worker.not_started, start_advice(worker)), []).append(worker.host)
    return [
        line
        for (cause, hint), names in hosts.items()
        for line in (f"hvlaunch: {fold_hosts(names)}: {cause}", *([f"  Try: {hint}"] if hint else []))
    ]


def _failed(
    result: JobResult,
    failure: WorkerExit,
    tails: Mapping[int, bytes],
    size: int,
    output_dir: Path | None,
    doing: Doing | None,
) -> list[str]:
    victim = result.first_victim
    evidence = {
        worker.rank: find_evidence(worker, tails.get(worker.rank, b"")) for worker in (failure, *result.exits)
    }
    lines = [_headline(failure, size, is_first=victim is None), *_quote("Its", evidence[failure.rank])]
    if victim is not None:
        lines.append(_of_victim(victim, failure, evidence[victim.rank]))
    named = {failure.rank, *([] if victim is None else [victim.rank])}
    others = [worker for worker in result.exits if worker.rank not in named]
    lines += _indented(
        "The others", endings(others, size, failure, named=named, never_started=result.never_started)
    )
    if any(lost_connection(evidence[worker.rank]) for worker in others) and not lost_connection(
        evidence[failure.rank]
    ):
        lines.append(f"  The others lost connections because of rank {failure.rank}.")
    lines += _doing(doing)
    if result.interrupted is not None:
        lines.append(f"  Then interrupted by {signal_name(result.interrupted)}.")
    if result.error is not None:
        lines += _indented("Also", [line.removeprefix("hvlaunch: ") for line in describe(result.error)])
    if output_dir is not None:
        lines.append(
            f"  All output of rank {failure.rank}: {rank_directory(output_dir, failure.rank, size)}/"
        )
    hint = advice(failure, evidence[failure.rank])
    return [*lines, f"  Try: {hint}"] if hint else lines


def _headline(failure: WorkerExit, size: int, *, is_first: bool) -> str:
    subject = f"hvlaunch: rank {failure.rank} of {size} on host {failure.host}"
    if failure.stopped:
        return f"{subject} failed, and was stopped by hvlaunch before it ended, after {duration(failure.when)}: {end(failure)}"
    first = " first" if size > 1 and is_first else ""
    peak = ""
    if failure.max_rss and (failure.oom_killed or failure.exit_code == 128 + SIGKILL):
        peak = f"; its memory peaked at {failure.max_rss / (1 << 30):.1f} GiB"
    return f"{subject} failed{first}, after {duration(failure.when)}: {end(failure)}{peak}"


def _of_victim(victim: WorkerExit, failure: WorkerExit, evidence: Evidence) -> str:
    """The worker that failed first, which was not the cause."""
    when = delta(victim.when - failure.when)
    why = ", since it lost a connection" if lost_connection(evidence) else ""
    return f"  Rank {victim.rank} on host {victim.host} was the first to end, {when}{why}: {end(victim)}"


def _workers(result: JobResult, size: int) -> list[str]:
    """How the workers ended, where none of them was the cause."""
    if not result.exits:
        has_host = result.error is not None and (result.error.host is not None or result.error.errors)
        return ["  The job ends: no worker was started."] if has_host and not result.elapsed else []
    ends = endings(result.exits, size, None, never_started=result.never_started)
    return _indented(f"The workers, after {duration(result.elapsed)}", ends)


def _doing(doing: Doing | None) -> list[str]:
    if doing is None:
        return []
    all_of_it = [] if doing.job_id is None else [f"  All their stacks: hvlaunch stacks {doing.job_id}"]
    return [*_indented("Before they were stopped", map(visible, doing.places)), *all_of_it]


def _interrupted(result: JobResult, number: int, size: int) -> str:
    why = " (nobody reads its output any more)" if number == SIGPIPE else ""
    by = f"hvlaunch: interrupted by {signal_name(number)}{why}"
    if not result.exits and not result.elapsed:
        return f"{by} before the workers were started"
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
