"""Worker ends and errors in words. Equal ends or errors of many hosts share a line."""

import re
import signal
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from hvlaunch.console.status import duration
from hvlaunch.errors import Problem
from hvlaunch.hosts.parse import fold_hosts, fold_ranks
from hvlaunch.job import WorkerExit

__all__ = ["delta", "describe", "end", "endings", "failed_itself", "signal_name"]

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
        keys = _table([(problem.host or "", *(problem.host_key or ())) for problem in group])
    names = [problem.host for problem in group if problem.host is not None]
    prefix = f"{fold_hosts(names)}: " if names else ""
    first, *more = f"{prefix}{cause}".split("\n")
    return [first, *(f"  {line}" for line in [*more, *keys]), *([f"  Try: {hint}"] if hint else [])]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _without_key(problem: Problem) -> str:
    key = " ".join(problem.host_key or ())
    return problem.cause.replace(f": {key}", "", 1) if key else problem.cause


def _without_name(text: str, problem: Problem) -> str:
    text = re.sub(rf"(?<![\w.-]){re.escape(str(problem.host))}(?![\w-])", _ANY_HOST, text)
    return _ADDRESS.sub(_ANY_ADDRESS, text)
