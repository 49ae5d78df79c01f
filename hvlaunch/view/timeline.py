"""Time line of a job: its rounds and the important events of hosts and ranks, with causes (docs/interfaces/events.md). Pure."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from hvlaunch.console.lines import visible
from hvlaunch.hosts.parse import fold_ranks, host_set

__all__ = ["Moment", "RoundSpan", "Timeline"]

Kind = Literal["job", "round", "host", "failure"]
Record = Mapping[str, Any]

_KEPT = 200


@dataclass(frozen=True, slots=True)
class Moment:
    """An important event, in a few words."""

    time: float
    """Seconds since 1970."""
    kind: Kind
    text: str
    host: str | None = None
    rank: int | None = None
    round: int | None = None


@dataclass(slots=True)
class RoundSpan:
    """A round from its start to its end; `end` is None while it runs."""

    number: int
    begin: float
    hosts: dict[str, int] = field(default_factory=dict)
    """Number of workers by host."""
    end: float | None = None
    cause: str | None = None
    """Cause of its end."""
    failure: str | None = None
    """Cause of its end in three words; None if its end was planned."""


class Timeline:
    """Collects rounds and moments from a job's events, which are added in order."""

    def __init__(self) -> None:
        self._moments: deque[Moment] = deque(maxlen=_KEPT)
        self._rounds: deque[RoundSpan] = deque(maxlen=_KEPT)
        self.ending: Record | None = None
        """The job's last event."""
        self.away: set[str] = set()
        """Hosts whose connection is lost, and is made again."""
        self.hung_since: float | None = None
        """Time of the last progress of a job that is hung."""

    def moments(self, *, is_elastic: bool) -> list[Moment]:
        """Return the newest moments in order. A static job has one round, and its user need not know the word."""
        return [
            moment
            if is_elastic or moment.kind != "round"
            else replace(moment, text=moment.text.removeprefix(_begin_of(moment.round)))
            for moment in self._moments
        ]

    @property
    def rounds(self) -> list[RoundSpan]:
        return list(self._rounds)

    def add_event(self, record: Record) -> None:
        """Add the next event."""
        # fromisoformat() of Python 3.10 does not know the Z.
        when = datetime.fromisoformat(record["time"].replace("Z", "+00:00")).timestamp()
        kind = record["type"]
        number = record.get("round")
        # A round may begin by several events; the first of them counts.
        if kind in _BEGIN and isinstance(number, int):
            self._begin(number, when)
        if kind in _END:
            self._end(when, record.get("cause") or record.get("text"), _failure(record.get("reason")))
        if kind == "job_ended":
            self.ending = record
        if kind == "host_away":
            self.away.add(record["host"])
        elif kind in ("host_back", "host_lost", "host_lost_at_end"):
            self.away.discard(record["host"])
        if kind == "job_hanging":
            self.hung_since = when - record["seconds"]
        if kind in ("workers_starting", "worker_placed"):
            self._place(record, when)
        if kind == "worker_exited" and self._rounds and self._rounds[-1].end is not None:
            # The worker was stopped because its round is over.
            return
        if (entry := _TEXTS.get(kind)) is not None and (text := entry[1](record)):
            host, rank = record.get("host"), record.get("rank")
            self._moments.append(Moment(when, entry[0], visible(text), host, rank, number))

    def _begin(self, number: int, when: float) -> None:
        # A late event of an earlier round must not begin it again.
        if not self._rounds or self._rounds[-1].number < number:
            self._end(when, None, None)
            self._rounds.append(RoundSpan(number, when))

    def _end(self, when: float, cause: str | None, failure: str | None) -> None:
        if self._rounds and self._rounds[-1].end is None:
            self._rounds[-1].end = when
            # Causes may have text from hosts, with control characters that a terminal would obey.
            self._rounds[-1].cause = None if cause is None else visible(cause)
            self._rounds[-1].failure = None if failure is None else visible(failure)

    def _place(self, record: Record, when: float) -> None:
        self._begin(record["round"], when)
        last = self._rounds[-1]
        if last.number == record["round"]:
            count = len(record["ranks"]) if "ranks" in record else 1
            # Elastic jobs place workers of a host one by one.
            last.hosts[record["host"]] = last.hosts.get(record["host"], 0) + count


_FAILURES = {
    "worker_ended": "rank {rank} failed",
    "worker_hangs": "rank {rank} was hung",
    "worker_left": "rank {rank} left its round",
    "no_commit": "no worker committed",
    "job_hung": "the job was hung",
    "not_met": "the workers did not meet",
    "workers_fail": "workers failed again and again",
}


def _failure(reason: Record | None) -> str | None:
    """Describe a failure in three words; None for planned ends (docs/events.md has the kinds of reasons)."""
    if reason is None:
        return None
    if reason["kind"] == "host_problem":
        return f"host {reason['host']} {'is lost' if reason.get('error') == 'HostLost' else 'failed'}"
    return _FAILURES[reason["kind"]].format_map(reason) if reason["kind"] in _FAILURES else None


def _because(record: Record) -> str:
    cause = record.get("cause")
    return f": {cause}" if cause else ""


def _round(record: Record) -> str:
    hosts = record.get("hosts") or ()
    place = f" on {host_set(hosts)}" if hosts else ""
    return f"{_begin_of(record['round'])}{_count(record['workers'], 'worker')}{place}"


def _begin_of(number: int | None) -> str:
    return f"round {number} begins: "


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _exit(record: Record) -> str:
    """Describe a worker's end; empty for a good end."""
    if record.get("code") == 0:
        return ""
    how = f"signal {record['signal']}" if record.get("signal") else f"exit code {record.get('code')}"
    killer = ", killed for want of memory" if record.get("oom_killed") else ""
    return f"{_rank(record)} ended with {how}{killer}"


def _rank(record: Record) -> str:
    rank = record.get("rank")
    worker = "a worker" if rank is None else fold_ranks([rank])
    return f"{worker} on {record['host']}" if record.get("host") else worker


def _host(event: str) -> Callable[[Record], str]:
    return lambda record: f"{record['host']} {event}{_because(record)}"


def _text(record: Record) -> str:
    return str(record.get("text") or record["type"].replace("_", " "))


def _end_of_job(record: Record) -> str:
    error = f": {record['cause']}" if record.get("cause") else ""
    return f"the job has ended with exit code {record['exit_code']}{error}"


def _not_started(record: Record) -> str:
    return f"{_rank(record)} can't be started: {record.get('cause')}"


_BEGIN = ("round_starting", "round_formed")
_END = ("round_broken", "round_changing", "round_ending", "job_ending", "job_ended", "interrupting")
_TEXTS: Mapping[str, tuple[Kind, Callable[[Record], str]]] = {
    "round_starting": ("round", _round),
    "round_formed": ("round", _round),
    "round_broken": ("failure", lambda record: f"round {record['round']} is broken{_because(record)}"),
    "round_changing": ("round", lambda record: f"round {record['round']} changes{_because(record)}"),
    "round_ending": ("failure", lambda record: f"round {record['round']} ends{_because(record)}"),
    "worker_exited": ("failure", _exit),
    "worker_not_started": ("failure", _not_started),
    "worker_killed": ("failure", _text),
    "worker_start_failed": ("failure", _text),
    "host_ready": ("host", lambda record: f"{record['host']} is ready"),
    "host_failed": ("failure", _host("did not get ready")),
    "host_not_usable": ("failure", _host("can't be used")),
    "host_skipped": ("failure", _host("is skipped")),
    "host_lost": ("failure", _host("is lost")),
    "host_lost_at_end": ("failure", _host("is lost")),
    "host_parting": ("host", _host("leaves")),
    "host_away": ("host", _host("has lost its connection")),
    "host_back": ("host", lambda record: f"{record['host']} is back after {record['seconds']:.1f} s"),
    "host_excluded": ("failure", _text),
    "slots_lacking": ("host", _text),
    "pool_empty": ("host", _text),
    "interrupted": ("job", lambda record: f"signal {record['signal']}"),
    "interrupting": ("job", _text),
    "job_hanging": ("failure", _text),
    "job_going_on": ("job", _text),
    "job_ending": ("job", lambda record: f"the job ends{_because(record)}"),
    "job_ended": ("job", _end_of_job),
}
"""Kind and text of a moment, by type of event. Other events are not shown."""
