"""The failure report: printed last of all, for a person who has to find out why at 3 a.m."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from signal import SIGKILL, SIGPIPE

from hvlaunch.console.advice import advice, lost_connection, start_advice
from hvlaunch.console.causes import describe
from hvlaunch.console.endings import duration, end, endings, failed_itself, signal_name
from hvlaunch.console.evidence import Evidence, find_evidence
from hvlaunch.console.files import rank_directory
from hvlaunch.hosts.fold import fold_hosts, fold_ranks
from hvlaunch.job import JobResult, WorkerExit

__all__ = ["failure_report"]


def failure_report(
    result: JobResult, tails: Mapping[int, bytes], size: int, *, output_dir: Path | None = None
) -> str:
    """Plain text that ends with a newline; empty for a job that went well.

    `tails` has the last bytes of stderr by rank (Printer.tail), `size` is the number of workers, `output_dir` is
    --output-filename.
    """
    if result.failure is not None and result.failure.not_started is not None:
        lines = _not_started(result.exits)
    elif result.failure is not None:
        lines = _failed(result, result.failure, tails, size, output_dir)
    elif result.error is not None:
        lines = [*describe(result.error), *_workers(result, size)]
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
        f"hvlaunch: {fold_hosts(names)}: {cause}" + (f"; try: {hint}" if hint else "")
        for (cause, hint), names in hosts.items()
    ]


def _failed(
    result: JobResult, failure: WorkerExit, tails: Mapping[int, bytes], size: int, output_dir: Path | None
) -> list[str]:
    others = [worker for worker in result.exits if worker.rank != failure.rank]
    evidence = {
        worker.rank: find_evidence(worker, tails.get(worker.rank, b"")) for worker in (failure, *others)
    }
    cause = failure
    lines = [_headline(failure, size), *_quote("Its", evidence[failure.rank])]
    if failure.port_taken_by is None and lost_connection(evidence[failure.rank]):
        cause = _first_with_another_cause(others, evidence) or failure
    if cause is not failure:
        lines.append(
            f"  It lost a connection; rank {cause.rank} on host {cause.host} failed for another reason: look there first."
        )
        lines += _quote(f"Rank {cause.rank}'s", evidence[cause.rank])
    lines += _indented("The others", endings(others, size, failure))
    if any(lost_connection(evidence[worker.rank]) for worker in others if worker is not cause) and (
        cause is not failure or not lost_connection(evidence[failure.rank])
    ):
        lines.append(f"  The others lost connections because of rank {cause.rank}.")
    if result.interrupted is not None:
        lines.append(f"  Then interrupted by {signal_name(result.interrupted)}.")
    if result.error is not None:
        lines += _indented("Also", [line.removeprefix("hvlaunch: ") for line in describe(result.error)])
    if output_dir is not None:
        lines.append(f"  All output of rank {cause.rank}: {rank_directory(output_dir, cause.rank, size)}/")
    hint = advice(cause, evidence[cause.rank])
    return [*lines, f"  Try: {hint}"] if hint else lines


def _headline(failure: WorkerExit, size: int) -> str:
    subject = f"hvlaunch: rank {failure.rank} of {size} on host {failure.host}"
    first = " first" if size > 1 else ""
    peak = ""
    if failure.max_rss and (failure.oom_killed or failure.exit_code == 128 + SIGKILL):
        peak = f"; its memory peaked at {failure.max_rss / (1 << 30):.1f} GiB"
    return f"{subject} failed{first}, after {duration(failure.when)}: {end(failure)}{peak}"


def _first_with_another_cause(
    others: Iterable[WorkerExit], evidence: Mapping[int, Evidence]
) -> WorkerExit | None:
    causes = [
        worker
        for worker in others
        if failed_itself(worker)
        and (worker.port_taken_by is not None or not lost_connection(evidence[worker.rank]))
    ]
    return min(causes, key=lambda worker: worker.when, default=None)


def _workers(result: JobResult, size: int) -> list[str]:
    """How the workers ended, where none of them was the cause."""
    if not result.exits:
        return []
    return _indented(f"The workers, after {duration(result.elapsed)}", endings(result.exits, size, None))


def _interrupted(result: JobResult, number: int, size: int) -> str:
    why = " (nobody reads its output any more)" if number == SIGPIPE else ""
    by = f"hvlaunch: interrupted by {signal_name(number)}{why}"
    if not result.exits and not result.elapsed:
        return f"{by} before the workers were started"
    unknown = set(range(size)) - {worker.rank for worker in result.exits}
    killed = [worker.rank for worker in result.exits if worker.signal == SIGKILL and worker.stopped]
    ended = f"how {fold_ranks(unknown)} ended is not known" if unknown else "all workers have ended"
    forced = f", {fold_ranks(killed)} only by SIGKILL" if killed else ""
    return f"{by} after {duration(result.elapsed)}; {ended}{forced}"


def _quote(owner: str, evidence: Evidence) -> list[str]:
    return _indented(f"{owner} {evidence.kind}", evidence.lines)


def _indented(title: str, lines: Iterable[str]) -> list[str]:
    body = [f"    {line}".rstrip() for line in lines]
    return [f"  {title}:", *body] if body else []
