"""The view in words: its verdict, the plain table for a terminal without textual, a pipe or a log, lines of output, and stacks. Pure."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from hvlaunch.console.lines import aligned, visible
from hvlaunch.console.output_store import Stored
from hvlaunch.console.status import duration
from hvlaunch.hosts.parse import fold_hosts, fold_ranks, number_set
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.telemetry.stack import from_json, summary, tree_lines
from hvlaunch.view.model import HostRow, RankRow, View, ViewEnding, as_json
from hvlaunch.view.timeline import Moment, RoundSpan

__all__ = [
    "COLUMNS",
    "FAILURE",
    "FEW",
    "JobVerdict",
    "bar",
    "cells",
    "cores",
    "header",
    "host_cells",
    "newest_lines_with",
    "plain",
    "rank_cells",
    "share",
    "shown_stacks",
    "size",
    "steps",
    "strip",
    "verdict",
    "view_record",
    "worst_ranks",
]

_NEWS = 60.0
"""Seconds for which a failure is the verdict after a round of full size has followed it."""


class JobVerdict(NamedTuple):
    """A headline for readers two metres away, and a line for those who come closer."""

    tone: Literal["good", "wait", "bad"]
    text: str
    detail: str = ""


def view_record(view: View) -> dict[str, Any]:
    """Return a view and its verdict for programs."""
    return {"verdict": verdict(view)._asdict(), **as_json(view)}


def verdict(view: View) -> JobVerdict:
    """Return the verdict: the worst that is true of the job now."""
    if view.ending is not None:
        return _end(view.ending, view.moments, view.time - view.began)
    if view.hang is not None:
        ranks = fold_ranks(view.hang.ranks)
        return JobVerdict("bad", f"Hung for {duration(round(view.hang.seconds))}: {ranks}", view.hang.text)
    if bad := _bad_ranks(view.ranks):
        return bad
    if view.phase in ("stopping", "closing"):
        cause = _first_failure(view.moments, view.rounds)
        still = f"{len(view.ranks)} of {view.size} ranks still run"
        return JobVerdict("bad", _sentence(cause), still) if cause else JobVerdict("wait", "Stopping", still)
    if view.round_state in ("broken", "changing") and view.rounds:
        last = view.rounds[-1]
        tone: Literal["bad", "wait"] = "bad" if last.failure else "wait"
        return JobVerdict(
            tone, f"{_sentence(last.failure or 'workers come or go')}; the next round forms", last.cause or ""
        )
    if away := [host.host for host in view.hosts if host.state == "away"]:
        plural = "s are" if len(away) > 1 else " is"
        return JobVerdict(
            "wait",
            f"Connection{plural} lost: {fold_hosts(away)}",
            "hvlaunch connects again; the workers go on",
        )
    return _course(view)


def _end(ending: ViewEnding, moments: Sequence[Moment], seconds: float) -> JobVerdict:
    code = f"exit code {ending.exit_code} after {duration(seconds)}"
    if ending.interrupted is not None:
        return JobVerdict("wait", f"Stopped by {ending.interrupted}", code)
    if ending.exit_code == 0:
        return JobVerdict("good", f"Finished after {duration(seconds)}", "exit code 0")
    if ending.rank is not None:
        exits = (moment.text for moment in moments if moment.kind == "failure" and moment.rank == ending.rank)
        return JobVerdict(
            "bad", f"Failed: rank {ending.rank} on host {ending.host}", "; ".join([*list(exits)[-1:], code])
        )
    return JobVerdict("bad", f"Failed: {ending.cause or code}", code if ending.cause else "")


def _bad_ranks(ranks: Sequence[RankRow]) -> JobVerdict | None:
    for text, rows in (
        ("Stopped by a signal", [row for row in ranks if row.is_stopped]),
        ("Hung", [row for row in ranks if row.state == "hanging"]),
    ):
        if rows:
            names = fold_ranks(row.rank for row in rows)
            return JobVerdict("bad", f"{text}: {names}", f"on {fold_hosts(row.host for row in rows)}")
    return None


def _first_failure(moments: Sequence[Moment], rounds: Sequence[RoundSpan]) -> str:
    """Return the first failure of the newest round; later ones are its consequences. Empty if the user stops the job."""
    since = rounds[-1].begin if rounds else 0.0
    first = next(
        (moment for moment in moments if moment.time >= since and moment.kind in ("failure", "job")), None
    )
    return first.text if first is not None and first.kind == "failure" else ""


def _course(view: View) -> JobVerdict:
    """Return the verdict of a job that runs, or forms a round."""
    working = [row for row in view.ranks if row.state == "working"]
    missing = [host.host for host in view.hosts if host.state == "connecting"]
    if view.phase == "connecting" or not view.rounds:
        ready = sum(host.state == "ready" for host in view.hosts)
        detail = f"hvlaunch connects to {fold_hosts(missing)}" if missing else ""
        return JobVerdict("wait", f"Forming: {ready} of {len(view.hosts)} hosts are ready", detail)
    *earlier, current = view.rounds
    failure = earlier[-1].failure if earlier else None
    is_smaller = any(sum(span.hosts.values()) > view.size for span in earlier)
    if failure is not None and (is_smaller or view.time - current.begin < _NEWS):
        return JobVerdict(
            "wait",
            f"{_sentence(failure)}; round {current.number} formed with {view.size}",
            earlier[-1].cause or "",
        )
    if view.phase == "finishing":
        return JobVerdict(
            "good",
            f"Finishing: {view.size - len(view.ranks)} of {view.size} ranks are done",
            _progress(working),
        )
    if len(working) < view.size:
        return JobVerdict("wait", f"Forming: {len(working)} of {view.size} ranks work", "")
    word = "Training" if any(row.step is not None for row in working) else "Running"
    return JobVerdict("good", f"{word}: {len(working)} of {view.size} ranks", _progress(working))


def _progress(ranks: Sequence[RankRow]) -> str:
    """Describe the rank that is furthest behind, and name the slowest."""
    rows = [row for row in ranks if row.step is not None]
    if not rows:
        return ""
    row = min(rows, key=lambda row: (row.step or 0, row.rank))
    parts = [f"step {row.step}" + ("" if row.total is None else f" of {row.total}")]
    if row.rate is not None:
        parts.append(f"{row.rate:.3g} steps/s")
    if row.loss is not None:
        parts.append(f"loss {row.loss:.4g}")
    parts += [f"rank {slow.rank} on host {slow.host} is the slowest" for slow in rows if slow.is_slowest]
    return ", ".join(parts)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


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


_STREAMS = ("stdout", "stderr")
_LONGEST_LINE = 4096
"""Bytes of a line; a longer line is split."""


def newest_lines_with(
    items: Iterable[Stored], text: str, ranks: Collection[int] | None, count: int
) -> list[Mapping[str, Any]]:
    """Return the last `count` lines of these ranks with `text` in them; case does not matter. None: all ranks, and hvlaunch.

    A line has `time` (seconds since 1970), `rank` (None for hvlaunch's messages), `stream` and `text`.
    """
    lines_found: deque[Mapping[str, Any]] = deque(maxlen=count)
    unfinished: dict[tuple[int | None, str], bytes] = {}
    pattern = text.casefold()

    def add(item: Stored, line: bytes) -> None:
        # A program may overwrite its line: a terminal shows the last state.
        shown = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
        if pattern in shown.casefold():
            lines_found.append({"time": item.time, "rank": item.rank, "stream": item.kind, "text": shown})

    for item in items:
        if ranks is not None and item.rank not in ranks:
            continue
        key = item.rank, item.kind.removesuffix(" ended")
        if item.kind in _STREAMS:
            *lines, unfinished_line = (unfinished.pop(key, b"") + item.data).split(b"\n")
            # A worker may never end its line.
            if len(unfinished_line) > _LONGEST_LINE:
                lines, unfinished_line = [*lines, unfinished_line], b""
            if unfinished_line:
                unfinished[key] = unfinished_line
        elif item.kind in ("said", "shown"):
            lines = item.data.split(b"\n")
        else:
            lines = [unfinished.pop(key)] if key in unfinished else []
        for line in lines:
            add(item, line)
    # A line without its end yet may be what a reader looks for.
    for (rank, stream), line in unfinished.items():
        add(
            Stored(
                lines_found[-1]["time"] if lines_found else 0.0,
                "stderr" if stream == "stderr" else "stdout",
                rank=rank,
            ),
            line,
        )
    return list(lines_found)


def shown_stacks(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to POST /stacks as text: `summary` in a line, and `lines` with equal stacks merged, the rarest first."""
    stacks = from_json(answer)
    if not stacks:
        return {"summary": "no workers", "lines": []}
    return {"summary": visible(summary(stacks)), "lines": [visible(line) for line in tree_lines(stacks)]}
