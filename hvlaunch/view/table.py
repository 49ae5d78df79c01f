"""The view as a plain table, for a terminal without textual, a pipe or a log. Pure."""

from collections.abc import Sequence
from datetime import datetime

from hvlaunch.console.lines import aligned
from hvlaunch.console.status import duration
from hvlaunch.hosts.parse import number_set
from hvlaunch.view.model import HostRow, RankRow, View
from hvlaunch.view.verdict import verdict

__all__ = [
    "COLUMNS",
    "FAILURE",
    "FEW",
    "bar",
    "cells",
    "cores",
    "header",
    "host_cells",
    "plain",
    "rank_cells",
    "share",
    "size",
    "steps",
    "strip",
    "worst_ranks",
]

COLUMNS = ("HOST", "RANK", "STATE", "STEP", "CPU", "MEMORY", "GPU", "GPU MEM", "LAST LINE")
FEW = 64
"""Most ranks with a row each; beyond that, hosts are folded."""
_MOMENTS = 8
_SILENT = 60.0


def header(view: View) -> str:
    """Return a line about the job: name, phase, workers, time."""
    name = f" ({view.name})" if view.name else ""
    current = "" if view.round is None else f", round {view.round} {view.round_state}"
    workers = f"{len(view.ranks)} of {view.size} workers" if view.size else "no round yet"
    hosts = f"{len(view.hosts)} host{'' if len(view.hosts) == 1 else 's'}"
    ran = duration(max(0.0, view.time - view.began))
    return f"job {view.id}{name}: {view.phase}{current}, {workers} on {hosts}, {ran}"


def host_cells(row: HostRow) -> tuple[str, ...]:
    """Return the row of a folded host, in the order of COLUMNS."""
    ranks = number_set(rank_row.rank for rank_row in row.ranks) if row.ranks else "-"
    steps_done = [rank_row.step for rank_row in row.ranks if rank_row.step is not None]
    span = (
        "-"
        if not steps_done
        else str(min(steps_done))
        if min(steps_done) == max(steps_done)
        else f"{min(steps_done)}-{max(steps_done)}"
    )
    slow = next((f"slowest: rank {rank_row.rank}" for rank_row in row.ranks if rank_row.is_slowest), "")
    slow_host = f"slow: {row.slow}" if row.slow else ""
    kept = f"commits: {size(row.commits)}" if row.commits else ""
    note = "; ".join(filter(None, (slow_host, *row.problems, slow, kept)))
    memory = (
        "-"
        if row.memory_used is None
        else f"{size(row.memory_used)} {share(row.memory_used, row.memory_total)}"
    )
    gpu_memory = size(row.gpu_memory_used)
    cpu = "-" if row.cpu is None or not row.cores else share(row.cpu, row.cores)
    return row.host, ranks, _states(row), span, cpu, memory, share(row.gpu), gpu_memory, note


def _states(row: HostRow) -> str:
    """Return the states of a host's workers, the worst first; with the host's state if it has no workers or is not ready."""
    counts: dict[str, int] = {}
    for rank_row in row.ranks:
        counts[rank_row.state] = counts.get(rank_row.state, 0) + 1
    words = [state if len(counts) == 1 else f"{count} {state}" for state, count in counts.items()]
    if not words or row.state != "ready":
        words.insert(0, row.state)
    return ", ".join(words)


def rank_cells(row: RankRow) -> tuple[str, ...]:
    """Return the row of a rank, in the order of COLUMNS. The row of its host, above, has the host's name."""
    state = row.state if row.activity is None or not row.activity.startswith("stopped") else row.activity
    silent = "" if row.silent is None or row.silent < _SILENT else f"(silent for {duration(row.silent)}) "
    mark = f"{row.name} slowest" if row.is_slowest else row.name
    step = steps(row.step, row.total, row.rate)
    return (
        "",
        mark,
        state,
        step,
        cores(row.cpu),
        size(row.memory),
        share(row.gpu),
        size(row.gpu_memory),
        silent + row.line,
    )


def cells(view: View, *, is_folded: bool) -> list[tuple[str, ...]]:
    """Return the rows of hosts, with the ranks of a host below it unless `is_folded`."""
    rows: list[tuple[str, ...]] = []
    for host in view.hosts:
        rows.append(host_cells(host))
        if not is_folded:
            rows += [rank_cells(rank) for rank in host.ranks]
    return rows


def worst_ranks(view: View) -> list[RankRow]:
    """Return the ten ranks to look at first: not working, slowest, longest silent."""
    ranks = sorted(
        view.ranks, key=lambda row: (row.severity, not row.is_slowest, -(row.silent or 0.0), row.rank)
    )
    return ranks[:10]


def plain(view: View, width: int, few: int = FEW) -> str:
    """Return verdict and table in lines of at most `width` letters. With more than `few` ranks, hosts are folded, and only the worst ranks shown."""
    # A table longer than a screen helps nobody: the worst ranks are what people look for.
    is_folded = len(view.ranks) > few
    judged = verdict(view)
    summary = f"{judged.text}  {judged.detail}".rstrip()[:width]
    lines = [summary, header(view), "", *_table(cells(view, is_folded=is_folded), width)]
    if is_folded:
        worst = [(row.host, *rank_cells(row)[1:]) for row in worst_ranks(view)]
        lines += ["", f"the worst {len(worst)} of {len(view.ranks)} ranks", *_table(worst, width)]
    if view.moments:
        lines.append("")
    for moment in view.moments[-_MOMENTS:]:
        when = datetime.fromtimestamp(moment.time).astimezone()
        # In the time zone of the reader.
        lines.append(f"{when:%H:%M:%S}  {moment.text}"[:width])
    return "".join(f"{line}\n" for line in lines)


def _table(rows: Sequence[tuple[str, ...]], width: int) -> list[str]:
    """Align the rows; columns without any value are left out."""
    # Jobs without GPUs, and workers that report no steps, have empty columns.
    kept = [
        number
        for number in range(len(COLUMNS))
        if number < 3 or any(row[number] not in ("-", "") for row in rows)  # noqa: PLR2004 (host, rank, state)
    ]
    shown = [
        tuple(COLUMNS[number] for number in kept),
        *(tuple(row[number] for number in kept) for row in rows),
    ]
    return [line[:width].rstrip() for line in aligned(shown)]


_UNITS = ("B", "K", "M", "G", "T", "P")
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def size(count: float | None) -> str:
    """Format bytes: `512B`, `1.2G`; `-` for None."""
    if count is None:
        return "-"
    unit = 0
    # At 1000, and not at 1024: four digits are too wide for the column.
    while count >= 1000 and unit < len(_UNITS) - 1:  # noqa: PLR2004 (four digits are too many)
        count /= 1024
        unit += 1
    return f"{count:.1f}{_UNITS[unit]}" if unit and count < 10 else f"{count:.0f}{_UNITS[unit]}"  # noqa: PLR2004 (as above)


def cores(used: float | None) -> str:
    """Format CPU in per cent of one core, as top(1) does."""
    return "-" if used is None else f"{used * 100:.0f}%"


def share(part: float | None, whole: float | None = 1.0) -> str:
    """Format a share: `42%`."""
    return "-" if part is None or not whole else f"{part / whole * 100:.0f}%"


def steps(step: int | None, total: int | None, rate: float | None) -> str:
    """Format steps: `120/1000 2.5/s`."""
    if step is None:
        return "-"
    of = "" if total is None else f"/{total}"
    return f"{step}{of}" + ("" if rate is None else f" {rate:.3g}/s")


def bar(part: float, width: int) -> str:
    """Draw a share from 0 to 1 as a bar of `width` letters."""
    eighths = round(max(0.0, min(1.0, part)) * width * 8)
    whole, remainder = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[remainder] if remainder else "")).ljust(width)


FAILURE = "x"


def strip(view: View, width: int) -> str:
    """Draw the time since the job began: the last digit of the round, `-` between rounds, `x` for a failure."""
    length = max(view.time - view.began, 1.0)

    def column(time: float) -> int:
        return max(0, min(width - 1, int((time - view.began) / length * width)))

    letters = ["-"] * width
    for span in view.rounds:
        first = column(span.begin)
        last = width - 1 if span.end is None else column(span.end)
        letters[first : last + 1] = str(span.number % 10) * (last + 1 - first)
    # Failures come last: they must not be hidden by a round.
    for moment in view.moments:
        if moment.kind == "failure":
            letters[column(moment.time)] = FAILURE
    return "".join(letters)
