"""A job at one moment, as it is shown: of what the driver says of it, of its samples, events and output. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hvlaunch.console.stored import Stored
from hvlaunch.view.rows import HostRow, RankRow, host_rows
from hvlaunch.view.tails import Tails
from hvlaunch.view.timeline import Moment, RoundSpan, Timeline

__all__ = ["Ending", "Model", "View", "as_json"]


@dataclass(frozen=True, slots=True)
class Ending:
    """How the job has ended, and the last lines of the rank that is named for it."""

    exit_code: int
    cause: str | None
    hint: str | None
    host: str | None
    rank: int | None
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class View:
    """All that is shown."""

    time: float
    """Seconds since 1970."""
    id: str
    name: str | None
    command: tuple[str, ...]
    began: float
    """Seconds since 1970."""
    phase: str
    round: int | None
    round_state: str | None
    size: int
    """Workers of the round."""
    is_sampled: bool
    """Whether anything is known of what hosts and workers use."""
    hosts: tuple[HostRow, ...]
    moments: tuple[Moment, ...]
    rounds: tuple[RoundSpan, ...]
    ending: Ending | None

    @property
    def ranks(self) -> list[RankRow]:
        return [row for host in self.hosts for row in host.ranks]


class Model:
    """Gathers what comes bit by bit: events and output."""

    def __init__(self) -> None:
        self._timeline = Timeline()
        self._tails = Tails()

    @property
    def ending(self) -> Ending | None:
        """None until the job's last event was seen."""
        record = self._timeline.ending
        if record is None:
            return None
        rank = record.get("rank")
        lines = () if rank is None else tuple(self._tails.lines(rank))
        known = {name: record.get(name) for name in ("cause", "hint", "host")}
        return Ending(exit_code=record["exit_code"], rank=rank, lines=lines, **known)

    def see(self, records: Iterable[Mapping[str, Any]]) -> None:
        """The next events."""
        for record in records:
            self._timeline.see(record)

    def forget_events(self) -> None:
        """They will all come again."""
        self._timeline = Timeline()

    def hear(self, items: Iterable[Stored]) -> None:
        """The next items of the job's output store."""
        for item in items:
            if item.rank is not None and item.kind in ("stdout", "stderr"):
                self._tails.feed(item.rank, item.kind, item.data)

    def view(self, job: Mapping[str, Any], samples: Iterable[Mapping[str, Any]] | None, now: float) -> View:
        """The job as GET /job tells of it, with the newest samples of its hosts, in seconds since 1970."""
        last = {
            worker["rank"]: (self._tails.line(worker["rank"]), self._tails.printed[worker["rank"]])
            for worker in job["workers"]
        }
        current = job["round"] or {}
        return View(
            time=now,
            id=job["id"],
            name=job.get("name"),
            command=tuple(str(word) for word in job.get("command") or ()),
            began=job["began"],
            phase=job["phase"] if self.ending is None else "ended",
            round=current.get("number"),
            round_state=current.get("state"),
            size=current.get("size", 0),
            is_sampled=bool(samples),
            hosts=tuple(host_rows(job, samples or (), last)),
            moments=tuple(self._timeline.moments),
            rounds=tuple(self._timeline.rounds),
            ending=self.ending,
        )


def as_json(view: View) -> dict[str, Any]:
    """The same as data."""
    return asdict(view)
