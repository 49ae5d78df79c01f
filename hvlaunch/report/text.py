"""The failure report as text, printed last for whoever must find the cause at 3 a.m., and the wording of ends and errors.

Equal ends or errors of many hosts share a line.
"""

import re
import signal
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from signal import SIGKILL, SIGPIPE
from typing import TYPE_CHECKING

from hvlaunch.console.lines import aligned, visible
from hvlaunch.console.status import code_words, duration
from hvlaunch.errors import EXIT_NOT_WRITTEN, Problem
from hvlaunch.hosts.parse import fold_hosts, fold_ranks
from hvlaunch.job import JobResult, WorkerExit
from hvlaunch.report.bill import bill_words, commit_words

if TYPE_CHECKING:
    from hvlaunch.report.evidence import Evidence
    from hvlaunch.report.failure_report import Cause, FailureReport, Memory, Missing, Survivors

__all__ = ["as_text", "delta", "describe", "end", "endings", "failed_itself", "signal_name"]

_GIB = 1 << 30
_PATH = r"(?<=: command not found) \(PATH=[^)]*\)$"


def as_text(report: "FailureReport", *, is_verbose: bool = False, is_raised: bool = False) -> str:
    """Return the report as plain text that ends with a newline, or "" for a job that succeeded.

    `is_verbose`: with the PATH in which a command was not found. `is_raised`: without an error that the caller gets as an
    exception.
    """
    result = report.result
    match report.outcome:
        case "running" | "well":
            return ""
        case "not started":
            lines = _not_started(report)
            # Ten directories would hide the cause.
            lines = lines if is_verbose else [re.sub(_PATH, "", line) for line in lines]
        case "interrupted":
            lines = [_interrupted(result, result.interrupted or 0, report.size)]
        case "error" if is_raised and result.interrupted is None:
            if not result.exits:
                return ""
            ends = [*_workers(result, report.size), *_survivors(report.survivors)]
            lines = ["hvlaunch: the job ends; the exception has the cause", *ends]
        case "error":
            lines = _error(report)
        case "failed" if report.cause is not None:
            lines = _failed(report, report.cause)
        case _:
            ends = _workers(result, report.size)
            unwritten = " (some output could not be written)" if result.exit_code == EXIT_NOT_WRITTEN else ""
            lines = [f"hvlaunch: the job ended with exit code {result.exit_code}{unwritten}", *ends]
    facts: list[str] = []
    if code := ", commit ".join(filter(None, code_words(report.about.get("code")))):
        facts.append(f"  Its code: {visible(code)}")
    facts += [f"  Slow: host {host}: {evidence}" for host, evidence in report.slow.items()]
    if report.bill is not None and (words := bill_words(report.bill)):
        facts.append(f"  It took {duration(report.bill.wall_seconds)}: {words}")
    if words := commit_words(report.bill):
        facts.append(f"  {words[0].upper()}{words[1:]}")
    # The advice stays last.
    at = len(lines) - lines[-1].startswith("  Try: ")
    return "\n".join([*lines[:at], *facts, *lines[at:]]) + "\n"


def _error(report: "FailureReport") -> list[str]:
    result = report.result
    described = [] if result.error is None else describe(result.error)
    lines = [*described, *_workers(result, report.size), *_survivors(report.survivors)]
    if result.interrupted is not None:
        lines.append(f"  Interrupted by {signal_name(result.interrupted)}.")
    return lines


def _not_started(report: "FailureReport") -> list[str]:
    """Return a line for each reason why the command could not start; hosts with the same reason share a line."""
    hosts: dict[tuple[str, str | None], list[str]] = {}
    for worker in report.result.exits:
        if worker.not_started is not None:
            key = worker.not_started, report.start_hints.get(worker.rank)
            hosts.setdefault(key, []).append(worker.host)
    return [
        line
        for (cause, hint), names in hosts.items()
        for line in (f"hvlaunch: {fold_hosts(names)}: {cause}", *([f"  Try: {hint}"] if hint else []))
    ]


def _failed(report: "FailureReport", cause: "Cause") -> list[str]:
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
        from hvlaunch.console.files import rank_directory  # noqa: PLC0415 (few jobs keep their output)

        lines.append(
            f"  All output of rank {failure.rank}: {rank_directory(report.output, failure.rank, size)}/"
        )
    return [*lines, f"  Try: {cause.hint}"] if cause.hint else lines


def _consequences(report: "FailureReport", cause: "Cause", others: Iterable[WorkerExit]) -> list[str]:
    """Name the workers that failed only because the cause had ended."""
    # The cause itself lost a connection, so it can't explain the others' losses.
    if cause.evidence.has_lost_connection:
        return []
    ended = [worker for worker in others if worker.rank in report.evidence]
    lost = [worker.rank for worker in ended if report.evidence[worker.rank].has_lost_connection]
    if not lost:
        return []
    failed_alone = any(failed_itself(worker) and worker.rank not in lost for worker in ended)
    names = fold_ranks(lost).capitalize() if failed_alone else "The others"
    return [f"  {names} lost connections because of rank {cause.worker.rank}."]


def _of_memory(memory: "Memory") -> str:
    used, total = memory.used / _GIB, memory.total / _GIB
    return f"  {visible(memory.of)} had {used:.1f} of {total:.1f} GiB in use, {delta(memory.when)}."


def _of_missing(missing: "Missing", host: str) -> list[str]:
    """Compare the hosts with and without it; return [] if no other host has answered."""
    name = visible(f"{missing.kind} {missing.name}")
    without = [host, *(lacking_host for lacking_host in missing.lacking if lacking_host != host)]
    verb = "lacks" if len(without) == 1 else "lack"
    if missing.having:
        have = "has" if len(missing.having) == 1 else "have"
        return [f"  {fold_hosts(without)} {verb} the {name}; {fold_hosts(missing.having)} {have} it."]
    return [f"  {fold_hosts(without)} {verb} the {name}."] if missing.lacking else []


def _headline(failure: WorkerExit, size: int, *, is_first: bool) -> str:
    rank = (
        f"{failure.role} (rank {failure.rank} of {size})"
        if failure.role
        else f"rank {failure.rank} of {size}"
    )
    subject = f"hvlaunch: {rank} on host {failure.host}"
    if failure.stopped:
        return f"{subject} failed, and was stopped by hvlaunch before it ended, after {duration(failure.when)}: {end(failure)}"
    first = " first" if size > 1 and is_first else ""
    # A peak of memory explains only a kill by the kernel or a scheduler.
    peak = ""
    if failure.max_rss and (failure.oom_killed or failure.exit_code == 128 + SIGKILL):
        peak = f"; its memory peaked at {failure.max_rss / _GIB:.1f} GiB"
    return f"{subject} failed{first}, after {duration(failure.when)}: {end(failure)}{peak}"


def _of_victim(victim: WorkerExit, failure: WorkerExit, evidence: "Evidence | None") -> str:
    """Describe the worker that failed first but was not the cause."""
    when = delta(victim.when - failure.when)
    why = ", since it lost a connection" if evidence is not None and evidence.has_lost_connection else ""
    name = f"{victim.role} (rank {victim.rank})" if victim.role else f"Rank {victim.rank}"
    return f"  {name} on host {victim.host} was the first to end, {when}{why}: {end(victim)}"


def _workers(result: JobResult, size: int) -> list[str]:
    """Return how the workers ended if no worker was the cause."""
    if not result.exits:
        has_host = result.error is not None and (result.error.host is not None or result.error.errors)
        return ["  The job ends: no worker was started."] if has_host and not result.elapsed else []
    ends = endings(result.exits, size, None, never_started=result.never_started)
    return _indented(f"The workers, after {duration(result.elapsed)}", ends)


def _survivors(survivors: "Survivors") -> list[str]:
    from hvlaunch.telemetry.stack import places  # noqa: PLC0415 (most messages of a job are no report)

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


def _quote(owner: str, evidence: "Evidence") -> list[str]:
    return _indented(f"{owner} {evidence.kind}", evidence.lines)


def _indented(title: str, lines: Iterable[str]) -> list[str]:
    body = [f"    {line}".rstrip() for line in lines]
    return [f"  {title}:", *body] if body else []


_MOST_LINES = 12
# Exit codes of a shell: POSIX, Shell Command Language, 2.8.2.
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_SAME_TIME = 0.05


def failed_itself(worker: WorkerExit) -> bool:
    """Return True if the worker failed and hvlaunch had not stopped it."""
    return not worker.ok and not worker.stopped


def end(worker: WorkerExit) -> str:
    """Describe one end: `exit code 7`, `SIGSEGV (segmentation fault)`, `could not be started: …`."""
    if worker.not_started is not None:
        return f"could not be started: {worker.not_started}"
    if worker.oom_killed:
        return f"killed by the kernel's out-of-memory killer ({_brief_end(worker)})"
    if worker.port_taken_by is not None:
        return f"{_port_taken(worker, worker.port_taken_by)} ({_brief_end(worker)})"
    if worker.signal is not None:
        is_standard = worker.signal in set(signal.Signals)
        meaning = signal.strsignal(worker.signal) if is_standard else None
        return signal_name(worker.signal) + (f" ({meaning.lower()})" if meaning else "")
    return f"exit code {worker.exit_code}{_shell_meaning(worker.exit_code)}"


def _port_taken(worker: WorkerExit, uid: int) -> str:
    """`its MASTER_PORT 41873 was taken by a program of another user, uid 1001 (bob): python3, pid 77`."""
    holder = worker.port_holder
    if holder is None:
        return f"its MASTER_PORT was taken by a program of another user, uid {uid}"
    user = "" if holder.user is None else f" ({holder.user})"
    program = "" if holder.program is None else f": {holder.program}"
    return f"its MASTER_PORT {holder.port} was taken by a program of another user, uid {uid}{user}{program}"


def endings(
    workers: Sequence[WorkerExit],
    size: int,
    since: WorkerExit | None,
    *,
    named: Collection[int] = (),
    never_started: Collection[int] = (),
) -> list[str]:
    """Describe how `workers` ended, one line for equal ends: failed, stopped, finished, then unknown.

    Times count from the end of `since`, or from the job's start without it. The ranks `named` are described
    elsewhere.
    """
    groups: dict[tuple[int, str], list[WorkerExit]] = {}
    for worker in sorted(workers, key=lambda worker: (worker.when, worker.rank)):
        # Equal ends share a line, because thousands of workers often end alike.
        groups.setdefault(_kind(worker), []).append(worker)
    lines = [_line(group, since) for _, group in sorted(groups.items(), key=lambda item: item[0][0])]
    if len(lines) > _MOST_LINES:
        # With many different ends, a longer list would hide the cause above it.
        lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} other endings"]
    described = {*named, *(worker.rank for worker in (*workers, since) if worker is not None)}
    unknown = [rank for rank in range(size) if rank not in described]
    waiting = [rank for rank in unknown if rank in never_started]
    lost = [rank for rank in unknown if rank not in never_started]
    if lost:
        lines.append(f"{len(lost)} ended in an unknown way: {fold_ranks(lost)}")
    if waiting:
        lines.append(f"{len(waiting)} never started: {fold_ranks(waiting)}")
    return lines


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _kind(worker: WorkerExit) -> tuple[int, str]:
    if failed_itself(worker):
        return 0, end(worker)
    return (1 if worker.stopped else 2), _brief_end(worker)


def _line(group: Sequence[WorkerExit], since: WorkerExit | None) -> str:
    first = group[0]
    ranks = fold_ranks(worker.rank for worker in group)
    if failed_itself(first):
        hosts = fold_hosts(worker.host for worker in group)
        when = "" if first.not_started is not None else f", {_when(group, since)}"
        return f"{ranks} on {hosts}: {end(first)}{when}"
    how = "stopped by hvlaunch" if first.stopped else "finished"
    return f"{len(group)} {how} ({_brief_end(first)}): {ranks}"


def _when(group: Iterable[WorkerExit], since: WorkerExit | None) -> str:
    times = [worker.when for worker in group]
    if since is None:
        first, last = duration(times[0]), duration(times[-1])
        return f"after {first}" if first == last else f"after {first} to {last}"
    first, last = delta(times[0] - since.when), delta(times[-1] - since.when)
    if first == last:
        return first
    if first.endswith(" s later"):
        first = first.removesuffix(" s later")
    return f"{first} to {last}"


def delta(seconds: float) -> str:
    """Describe a time difference: `0.4 s later`, `0.4 s earlier`, `at the same time`."""
    if abs(seconds) < _SAME_TIME:
        return "at the same time"
    return f"{abs(seconds):.1f} s {'later' if seconds > 0 else 'earlier'}"


def _brief_end(worker: WorkerExit) -> str:
    return signal_name(worker.signal) if worker.signal is not None else f"exit code {worker.exit_code}"


def _shell_meaning(code: int) -> str:
    if code == _NOT_FOUND:
        return " (in a shell: command not found)"
    if code == _NOT_EXECUTABLE:
        return " (in a shell: command found, but not executable)"
    if code - 128 in set(signal.Signals):
        return f" (128 + {code - 128}: {signal_name(code - 128)} ended a command that it ran)"
    return ""


_ANY_HOST, _ANY_ADDRESS = "HOST", "ADDRESS"
_ADDRESS = re.compile(
    r"(?<![\w.:])(?:[0-9]{1,3}(?:\.[0-9]{1,3}){3}|(?:[0-9a-f:]*::[0-9a-f:]*|(?:[0-9a-f]{1,4}:){7})[0-9a-f]+(?:%\w+)?)"
    r"(?![\w.]|:[0-9a-f])"
)


def describe(problem: Problem) -> list[str]:
    """Return the lines for a person: the first begins with `hvlaunch: `, and the others are indented.

    Advice has a line of its own.
    """
    if not problem.errors:
        return _first(_error_lines([problem], problem.cause, problem.hint))
    of_hosts = [error for error in problem.errors if error.host is not None]
    blocks = [_error_lines(group, *texts) for texts, group in _alike(of_hosts).items()]
    others = [
        _first(_error_lines([error], error.cause, error.hint))
        for error in problem.errors
        if error.host is None
    ]
    if len(blocks) == 1:
        lines = _first(blocks[0])
    else:
        lines = [
            f"hvlaunch: {len(of_hosts)} hosts failed:",
            *(f"  {line}" for block in blocks for line in block),
        ]
    return [*lines, *(line for block in others for line in block)]


def _first(lines: Sequence[str]) -> list[str]:
    """Mark the first line as a message of hvlaunch."""
    return [f"hvlaunch: {lines[0]}", *lines[1:]]


def _alike(problems: Sequence[Problem]) -> dict[tuple[str, str | None], list[Problem]]:
    """Group problems by cause and hint, in host order. Texts may differ in the host's name, address or key."""
    # Placeholders replace names only in texts that no other host shares: a hint that happens to contain another
    # host's name stays as it is.
    exact = Counter((problem.cause, problem.hint) for problem in problems)
    groups: dict[tuple[str, str | None], list[Problem]] = {}
    for problem in problems:
        key = (problem.cause, problem.hint)
        if exact[key] == 1:
            key = (
                _without_name(_without_key(problem), problem),
                problem.hint and _without_name(problem.hint, problem),
            )
        groups.setdefault(key, []).append(problem)
    return groups


def _error_lines(group: Sequence[Problem], cause: str, hint: str | None) -> list[str]:
    """Return the cause, the hosts' keys if the cause is about them, and the advice."""
    keys: list[str] = []
    if len(group) == 1:
        cause, hint = group[0].cause, group[0].hint
    elif all(problem.host_key for problem in group):
        cause = cause.replace("its host key is", "their host keys are", 1)
        keys = aligned([(problem.host or "", *(problem.host_key or ())) for problem in group])
    names = [problem.host for problem in group if problem.host is not None]
    prefix = f"{fold_hosts(names)}: " if names else ""
    first, *more = f"{prefix}{cause}".split("\n")
    return [first, *(f"  {line}" for line in [*more, *keys]), *([f"  Try: {hint}"] if hint else [])]


def _without_key(problem: Problem) -> str:
    key = " ".join(problem.host_key or ())
    return problem.cause.replace(f": {key}", "", 1) if key else problem.cause


def _without_name(text: str, problem: Problem) -> str:
    text = re.sub(rf"(?<![\w.-]){re.escape(str(problem.host))}(?![\w-])", _ANY_HOST, text)
    return _ADDRESS.sub(_ANY_ADDRESS, text)
