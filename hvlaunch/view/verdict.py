"""The verdict of a view: one line that says what is wrong with the job, or how far it is. Pure."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from hvlaunch.console.status import duration
from hvlaunch.hosts.parse import fold_hosts, fold_ranks
from hvlaunch.view.model import RankRow, View, ViewEnding, as_json
from hvlaunch.view.timeline import Moment, RoundSpan

__all__ = ["JobVerdict", "verdict", "view_record"]

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
