"""The view as plain text: for a terminal without textual, a pipe, a log. Pure."""

from collections.abc import Sequence
from datetime import datetime

from hvlaunch.console.status import duration
from hvlaunch.hosts.parse import number_set
from hvlaunch.view.model import HostRow, RankRow, View

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
"""Ranks that are shown one by one; of more, hosts are folded."""
_MOMENTS = 8
_SILENT = 60.0


def header(view: View) -> str:
    """One line on the job: what, since when, where it is."""
    name = f" ({view.name})" if view.name else ""
    current = "" if view.round is None else f", round {view.round} {view.round_state}"
    workers = f"{len(view.ranks)} of {view.size} workers" if view.size else "no round yet"
    hosts = f"{len(view.hosts)} host{'' if len(view.hosts) == 1 else 's'}"
    ran = duration(max(0.0, view.time - view.began))
    return f"job {view.id}{name}: {view.phase}{current}, {workers} on {hosts}, {ran}"


def host_cells(row: HostRow) -> tuple[str, ...]:
    """A folded host, in the order of COLUMNS."""
    ranks = number_set(one.rank for one in row.ranks) if row.ranks else "-"
    known = [one.step for one in row.ranks if one.step is not None]
    span = "-" if not known else str(min(known)) if min(known) == max(known) else f"{min(known)}-{max(known)}"
    slow = next((f"slowest: rank {one.rank}" for one in row.ranks if one.is_slowest), "")
    note = "; ".join((*row.problems, *([slow] if slow else ())))
    memory = (
        "-"
        if row.memory_used is None
        else f"{size(row.memory_used)} {share(row.memory_used, row.memory_total)}"
    )
    gpu_memory = size(row.gpu_memory_used)
    cpu = "-" if row.cpu is None or not row.cores else share(row.cpu, row.cores)
    return row.host, ranks, _states(row), span, cpu, memory, share(row.gpu), gpu_memory, note


def _states(row: HostRow) -> str:
    """`working`, or how many are in which state, the worst first; the host's own where it has no workers, or is not well."""
    counts: dict[str, int] = {}
    for one in row.ranks:
        counts[one.state] = counts.get(one.state, 0) + 1
    words = [state if len(counts) == 1 else f"{count} {state}" for state, count in counts.items()]
    if not words or row.state != "ready":
        words.insert(0, row.state)
    return ", ".join(words)


def rank_cells(row: RankRow) -> tuple[str, ...]:
    """A rank, in the order of COLUMNS; its host's name is left to its host."""
    state = row.state if row.activity is None or not row.activity.startswith("stopped") else row.activity
    silent = "" if row.silent is None or row.silent < _SILENT else f"(silent for {duration(row.silent)}) "
    mark = f"{row.rank} slowest" if row.is_slowest else str(row.rank)
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
    """The rows of the table: hosts with the ranks below each, or hosts alone and the worst ranks below them."""
    rows: list[tuple[str, ...]] = []
    for host in view.hosts:
        rows.append(host_cells(host))
        if not is_folded:
            rows += [rank_cells(rank) for rank in host.ranks]
    return rows


def worst_ranks(view: View) -> list[RankRow]:
    """Those that people want to see of many: the ones that are not at work, the slowest, the longest silent."""
    ranks = sorted(
        view.ranks, key=lambda row: (row.severity, not row.is_slowest, -(row.silent or 0.0), row.rank)
    )
    return ranks[:10]


def plain(view: View, width: int, few: int = FEW) -> str:
    """All of it, in lines of at most `width` letters. Of more than `few` ranks the worst are shown, and the hosts folded."""
    is_folded = len(view.ranks) > few
    lines = [header(view), "", *_table(cells(view, is_folded=is_folded), width)]
    if is_folded:
        worst = [(row.host, *rank_cells(row)[1:]) for row in worst_ranks(view)]
        lines += ["", f"the worst {len(worst)} of {len(view.ranks)} ranks", *_table(worst, width)]
    if view.moments:
        lines.append("")
    for moment in view.moments[-_MOMENTS:]:
        when = datetime.fromtimestamp(moment.time).astimezone()
        lines.append(f"{when:%H:%M:%S}  {moment.text}"[:width])
    return "".join(f"{line}\n" for line in lines)


def _table(rows: Sequence[tuple[str, ...]], width: int) -> list[str]:
    """Columns of which nothing is known are left out."""
    kept = [
        number
        for number in range(len(COLUMNS))
        if number < 3 or any(row[number] not in ("-", "") for row in rows)  # noqa: PLR2004 (who it is)
    ]
    shown = [
        tuple(COLUMNS[number] for number in kept),
        *(tuple(row[number] for number in kept) for row in rows),
    ]
    widths = [max(len(row[column]) for row in shown) for column in range(len(kept) - 1)]
    return ["  ".join([*map(str.ljust, row[:-1], widths), row[-1]])[:width].rstrip() for row in shown]


_UNITS = ("B", "K", "M", "G", "T", "P")
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def size(count: float | None) -> str:
    """Bytes: `512B`, `1.2G`; `-` where it is not known."""
    if count is None:
        return "-"
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:  # noqa: PLR2004 (four digits are too many)
        count /= 1024
        unit += 1
    return f"{count:.1f}{_UNITS[unit]}" if unit and count < 10 else f"{count:.0f}{_UNITS[unit]}"  # noqa: PLR2004 (as above)


def cores(used: float | None) -> str:
    """CPU in per cent of one core, as top(1) does."""
    return "-" if used is None else f"{used * 100:.0f}%"


def share(part: float | None, whole: float | None = 1.0) -> str:
    """`42%`."""
    return "-" if part is None or not whole else f"{part / whole * 100:.0f}%"


def steps(step: int | None, total: int | None, rate: float | None) -> str:
    """`120/1000 2.5/s`."""
    if step is None:
        return "-"
    of = "" if total is None else f"/{total}"
    return f"{step}{of}" + ("" if rate is None else f" {rate:.3g}/s")


def bar(part: float, width: int) -> str:
    """A bar of so many letters for a share from 0 to 1."""
    eighths = round(max(0.0, min(1.0, part)) * width * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(width)


FAILURE = "x"


def strip(view: View, width: int) -> str:
    """A letter for each part of the time since the job began: the last digit of the round, `-` for none, `x` for a failure."""
    length = max(view.time - view.began, 1.0)

    def place(time: float) -> int:
        return max(0, min(width - 1, int((time - view.began) / length * width)))

    letters = ["-"] * width
    for one in view.rounds:
        first = place(one.begin)
        last = width - 1 if one.end is None else place(one.end)
        letters[first : last + 1] = str(one.number % 10) * (last + 1 - first)
    for moment in view.moments:
        if moment.kind == "failure":
            letters[place(moment.time)] = FAILURE
    return "".join(letters)
