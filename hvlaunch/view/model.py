"""The view of a job: made of the driver's answers, samples, events and output, and kept up to date. Pure."""

import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from hvlaunch.console.lines import visible, visible_line
from hvlaunch.console.output_store import Stored
from hvlaunch.view.timeline import Moment, RoundSpan, Timeline

__all__ = [
    "Feed",
    "HostRow",
    "Model",
    "RankProgress",
    "RankRow",
    "Tails",
    "View",
    "ViewEnding",
    "ViewHang",
    "as_json",
    "host_rows",
    "slowest_rank",
]

_SLOW = 0.9
"""Share of the median rate below which a rank is slow."""
_TOLD_WITHIN = 1.5
"""Seconds between two reports of a rank: ranks at the same point may differ by the steps of this time."""
_WORST = ("hanging", "stopping", "dismissed", "waiting", "starting", "ended", "working")
"""States of ranks, the worst first."""
_WORST_HOSTS = ("none", "excluded", "away", "parting", "closing", "connecting", "ready")


@dataclass(frozen=True, slots=True)
class RankProgress:
    """Steps that a rank reports. `rate` is in steps per second."""

    step: int
    total: int | None = None
    rate: float | None = None
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class RankRow:
    """A worker; unknown values are None."""

    rank: int
    host: str
    state: str
    pid: int | None
    step: int | None
    total: int | None
    rate: float | None
    loss: float | None
    cpu: float | None
    """Cores in use, including the worker's children."""
    memory: int | None
    """Resident bytes."""
    gpu: float | None
    """Utilization of the worker's GPUs, from 0 to 1."""
    gpu_memory: int | None
    """Bytes."""
    silent: float | None
    """Seconds since the worker printed last."""
    activity: str | None
    """State of its busiest process unless running: sleeping, waiting for a disk, stopped."""
    printed: int
    """Bytes of output."""
    line: str
    is_slowest: bool
    role: str = ""
    """Its role and its rank there, `gen:1`; empty in jobs without roles."""

    @property
    def name(self) -> str:
        """Its name in tables."""
        return self.role or str(self.rank)

    @property
    def is_stopped(self) -> bool:
        """True if a signal stopped the process."""
        return self.activity is not None and self.activity.startswith("stopped")

    @property
    def severity(self) -> int:
        """Return a number for sorting; 0 is the worst."""
        return 0 if self.is_stopped else _place(_WORST, self.state)


@dataclass(frozen=True, slots=True)
class HostRow:
    """A host with its ranks, the worst first; unknown values are None."""

    host: str
    state: str
    cores: int | None
    cpu: float | None
    memory_used: int | None
    memory_total: int | None
    gpus: int
    gpu: float | None
    gpu_memory_used: int | None
    gpu_memory_total: int | None
    network_in: float | None
    network_out: float | None
    disk_read: float | None
    disk_write: float | None
    problems: tuple[str, ...]
    ranks: tuple[RankRow, ...]
    slow: str = ""
    """Cause of its slowness in comparison with the others; empty without."""
    commits: int | None = None
    """Bytes of commits in memory."""

    @property
    def severity(self) -> tuple[int, int, bool]:
        """Return a key for sorting; smaller is worse."""
        worst = min((row.severity for row in self.ranks), default=len(_WORST))
        return _place(_WORST_HOSTS, self.state), worst, not any(row.is_slowest for row in self.ranks)


def host_rows(
    job: Mapping[str, Any],
    samples: Iterable[Mapping[str, Any]],
    last: Mapping[int, tuple[str, int]],
    away: Collection[str] = (),
) -> list[HostRow]:
    """Return the rows of a job, the worst first.

    `job` is the answer to GET /job, `samples` that to GET /samples; `last` has the last line and the bytes printed, by rank;
    `away` has hosts whose connection is made again.
    """
    hung = set((job.get("hang") or {}).get("ranks", ()))
    sample_of = {sample["host"]: sample for sample in samples}
    workers: dict[str, list[Mapping[str, Any]]] = {}
    for worker in job["workers"]:
        workers.setdefault(worker["host"], []).append(worker)
    # Of a rank with two workers, during a change of rounds, the later one counts.
    progress = {
        worker["rank"]: RankProgress(
            report["step"], report["total"], report["rate"], (report.get("metrics") or {}).get("loss")
        )
        for worker in job["workers"]
        if (report := worker.get("progress")) is not None
    }
    slowest = slowest_rank(progress)
    rows = []
    for host in job["hosts"]:
        name = host["host"]
        sample = sample_of.get(name)
        worker_samples = {entry["rank"]: entry for entry in (sample or {}).get("workers", ())}
        gpus = {gpu["index"]: gpu for gpu in (sample or {}).get("gpus", ())}
        ranks = [
            _rank_row(
                worker,
                worker_samples.get(worker["rank"]),
                gpus,
                progress.get(worker["rank"]),
                *last.get(worker["rank"], ("", 0)),
                is_slowest=worker["rank"] == slowest,
                is_hung=worker["rank"] in hung,
            )
            for worker in workers.get(name, ())
        ]
        ranks.sort(key=lambda row: (row.severity, not row.is_slowest, row.rank))
        # An excluded host may still be connected while its workers end.
        state = "excluded" if host["is_excluded"] else "away" if name in away else host["state"]
        # A host that was never used, or is excluded and empty, is of no interest.
        if ranks or host["is_listed"] or state not in ("none", "excluded"):
            slow = host.get("slow") or ""
            rows.append(_host_row(name, state, sample, list(gpus.values()), ranks, slow))
    # Rows of equal severity keep the order of the hosts.
    order = {host["host"]: number for number, host in enumerate(job["hosts"])}
    return sorted(rows, key=lambda row: (row.severity, order[row.host]))


def slowest_rank(progress: Mapping[int, RankProgress]) -> int | None:
    """Return the rank furthest behind in steps; if all are at the same step, a clearly slower rank; else None."""
    if len(progress) < 2:  # noqa: PLR2004 (one rank alone is not slow)
        return None
    rates = {rank: state.rate for rank, state in progress.items() if state.rate is not None}
    if not rates:
        return None
    # The lowest rank among equals: the answer must not jump from look to look.
    behind = min(progress, key=lambda rank: (progress[rank].step, rank))
    lead = max(state.step for state in progress.values()) - progress[behind].step
    # Ranks report at different moments, so a small lead does not count.
    if lead > max(rates.values()) * _TOLD_WITHIN:
        return behind
    slow = min(rates, key=lambda rank: (rates[rank], rank))
    # The median hardly moves with a few very slow or very fast ranks.
    return slow if rates[slow] < _SLOW * median(rates.values()) else None


def _rank_row(
    worker: Mapping[str, Any],
    sample: Mapping[str, Any] | None,
    gpus: Mapping[int, Mapping[str, Any]],
    progress: RankProgress | None,
    line: str,
    printed: int,
    *,
    is_slowest: bool,
    is_hung: bool,
) -> RankRow:
    sample = sample or {}
    used = [gpus[index] for index in sample.get("gpus", ()) if index in gpus]
    return RankRow(
        rank=worker["rank"],
        host=worker["host"],
        state="hanging" if is_hung else worker["state"],
        pid=sample.get("pid"),
        step=None if progress is None else progress.step,
        total=None if progress is None else progress.total,
        rate=None if progress is None else progress.rate,
        loss=None if progress is None else progress.loss,
        cpu=sample.get("cpu"),
        memory=sample.get("memory"),
        gpu=_mean(used, "utilization"),
        gpu_memory=_sum(used, "memory_used"),
        silent=sample.get("last_output"),
        activity=_activity(sample),
        printed=printed,
        line=line,
        is_slowest=is_slowest,
        role=worker.get("role", ""),
    )


_ACTIVITIES = {"S": "sleeps", "D": "waits for a disk or device", "T": "stopped by a signal", "Z": "ended"}


def _activity(sample: Mapping[str, Any]) -> str | None:
    activity = _ACTIVITIES.get(sample.get("state", ""))
    kernel_function = sample.get("waits_in")
    return f"{activity} ({kernel_function})" if activity and kernel_function else activity


def _host_row(
    name: str,
    state: str,
    sample: Mapping[str, Any] | None,
    gpus: Sequence[Mapping[str, Any]],
    ranks: Sequence[RankRow],
    slow: str,
) -> HostRow:
    sample = sample or {}
    return HostRow(
        host=name,
        state=state,
        cores=sample.get("cores"),
        cpu=sample.get("cpu"),
        memory_used=sample.get("memory_used"),
        memory_total=sample.get("memory_total"),
        gpus=len(gpus),
        gpu=_mean(gpus, "utilization"),
        gpu_memory_used=_sum(gpus, "memory_used"),
        gpu_memory_total=_sum(gpus, "memory_total"),
        network_in=sample.get("network_in"),
        network_out=sample.get("network_out"),
        disk_read=sample.get("disk_read"),
        disk_write=sample.get("disk_write"),
        problems=tuple(sample.get("problems", ())),
        ranks=tuple(ranks),
        slow=slow,
        commits=sample.get("commits"),
    )


def _mean(gpus: Sequence[Mapping[str, Any]], field: str) -> float | None:
    return sum(gpu[field] for gpu in gpus) / len(gpus) if gpus else None


def _sum(gpus: Sequence[Mapping[str, Any]], field: str) -> int | None:
    return sum(gpu[field] for gpu in gpus) if gpus else None


def _place(order: Sequence[str], word: str) -> int:
    # Unknown states come first, where the user sees them.
    return order.index(word) if word in order else 0


@dataclass(frozen=True, slots=True)
class ViewEnding:
    """The end of a job, with the last lines of the guilty rank."""

    exit_code: int
    interrupted: str | None
    """The signal that ended the job."""
    cause: str | None
    hint: str | None
    host: str | None
    rank: int | None
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ViewHang:
    """A hang of the whole job."""

    seconds: float
    """Time since the last progress of any rank."""
    ranks: tuple[int, ...]
    """Ranks that the others wait for."""
    text: str


@dataclass(frozen=True, slots=True)
class View:
    """A job at one moment."""

    time: float
    """Seconds since 1970."""
    id: str
    name: str | None
    command: tuple[str, ...]
    began: float
    """Seconds since 1970."""
    phase: str
    round: int | None
    """Number of an elastic job's round."""
    round_state: str | None
    size: int
    """Number of workers in the round."""
    is_sampled: bool
    """True if there are samples of hosts and workers."""
    hosts: tuple[HostRow, ...]
    moments: tuple[Moment, ...]
    rounds: tuple[RoundSpan, ...]
    hang: ViewHang | None
    ending: ViewEnding | None

    @property
    def ranks(self) -> list[RankRow]:
        return [row for host in self.hosts for row in host.ranks]


class Model:
    """Collects events and output, and makes views of them."""

    def __init__(self) -> None:
        self._timeline = Timeline()
        self._tails = Tails()

    @property
    def ending(self) -> ViewEnding | None:
        """Return the job's end; None before its last event."""
        record = self._timeline.ending
        if record is None:
            return None
        rank = record.get("rank")
        lines = () if rank is None else tuple(self._tails.lines(rank))
        fields = {name: record.get(name) for name in ("interrupted", "cause", "hint", "host")}
        return ViewEnding(exit_code=record["exit_code"], rank=rank, lines=lines, **fields)

    def add_events(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add the next events."""
        for record in records:
            self._timeline.add_event(record)

    def forget_events(self) -> None:
        """Forget all events: a new driver sends them again from the first."""
        self._timeline = Timeline()

    def add_output(self, items: Iterable[Stored]) -> None:
        """Add the next items of the job's output store."""
        for item in items:
            if item.rank is not None and item.kind in ("stdout", "stderr"):
                self._tails.feed(item.rank, item.kind, item.data)

    def view(self, job: Mapping[str, Any], samples: Iterable[Mapping[str, Any]] | None, now: float) -> View:
        """Return the view at `now` (seconds since 1970): `job` is the answer to GET /job, `samples` the newest of its hosts."""
        last = {
            worker["rank"]: (self._tails.line(worker["rank"]), self._tails.printed[worker["rank"]])
            for worker in job["workers"]
        }
        current = job["round"] or {}
        # A static job has one round, which is no news.
        is_elastic = job.get("is_elastic", True)
        shown = current if is_elastic else {}
        return View(
            time=now,
            id=job["id"],
            name=visible_line(job.get("name") or "") or None,
            command=tuple(str(word) for word in job.get("command") or ()),
            began=job["began"],
            # The last event comes after the last answer of the driver.
            phase=job["phase"] if self.ending is None else "ended",
            round=shown.get("number"),
            round_state=shown.get("state"),
            size=current.get("size", 0),
            is_sampled=bool(samples),
            hosts=tuple(host_rows(job, samples or (), last, self._timeline.away)),
            moments=tuple(self._timeline.moments(is_elastic=is_elastic)),
            rounds=tuple(self._timeline.rounds),
            hang=self._hang(job, now),
            ending=self.ending,
        )

    def _hang(self, job: Mapping[str, Any], now: float) -> ViewHang | None:
        record = job.get("hang")
        if record is None or self.ending is not None:
            return None
        # The driver's figure is that of the moment at which it noticed.
        since = self._timeline.hung_since
        seconds = record["seconds"] if since is None else max(record["seconds"], now - since)
        return ViewHang(seconds, tuple(record["ranks"]), visible_line(record["text"]))


def as_json(view: View) -> dict[str, Any]:
    """Return a view as data for JSON."""
    return asdict(view)


_LONGEST = 512
"""Bytes of a line that are kept."""
_MOST_LINES = 20
_INVISIBLE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


class Tails:
    """Keeps the last lines of each rank; feed() adds output."""

    def __init__(self) -> None:
        self.printed: Counter[int] = Counter()
        """Bytes by rank."""
        self._lines: dict[int, deque[bytes]] = {}
        self._unfinished: dict[tuple[int, str], bytes] = {}

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Add output. Only the last state of a progress bar counts."""
        self.printed[rank] += len(data)
        pending = self._unfinished.get((rank, stream), b"") + data
        # A terminal shows CR LF as one line end, but a CR alone overwrites the line.
        *whole, unfinished = pending.replace(b"\r\n", b"\n").split(b"\n")
        # Two states suffice: the last may be empty so far.
        self._unfinished[rank, stream] = b"\r".join(unfinished.split(b"\r")[-2:])[-_LONGEST:]
        lines = self._lines.setdefault(rank, deque(maxlen=_MOST_LINES))
        # Older lines would drop out of the deque at once.
        lines.extend(state for line in whole[-_MOST_LINES:] if (state := _shown(line)))

    def lines(self, rank: int) -> list[str]:
        """Return the newest lines, at the end the unfinished line of each stream; of a progress bar the last state."""
        unfinished = [_shown(self._unfinished.get((rank, stream), b"")) for stream in ("stdout", "stderr")]
        return [_text(line) for line in (*self._lines.get(rank, ()), *unfinished) if line.strip()]

    def line(self, rank: int) -> str:
        """Return the last of lines()."""
        return next(reversed(self.lines(rank)), "")


def _shown(line: bytes) -> bytes:
    """Return the last state of a line that was overwritten, as a terminal shows it."""
    # A progress bar may clear its line at the end.
    states = [state for state in line.split(b"\r") if state.strip()]
    return states[-1][:_LONGEST] if states else b""


def _text(line: bytes) -> str:
    """Decode a line without colours and control characters, which a terminal would obey."""
    text = line.decode(errors="replace")
    return visible(_INVISIBLE.sub("", text).replace("\t", " ").rstrip())


class Feed:
    """The view of one job.

    `ask` returns the answer to GET of a path at the control socket, None for 404; `read` the new items of the output store;
    `now` the seconds since 1970.
    """

    def __init__(
        self,
        ask: Callable[[str], Any],
        read: Callable[[], Iterable[Stored]],
        now: Callable[[], float],
    ) -> None:
        self._ask = ask
        self._read = read
        self._now = now
        self._model = Model()
        self._number = 0
        self._job: Mapping[str, Any] | None = None

    @property
    def has_ended(self) -> bool:
        """True after the job's last event."""
        return self._model.ending is not None

    def await_news(self, seconds: int) -> None:
        """Wait for a new event, at most for some seconds."""
        if not self.has_ended:
            # A driver ends as soon as it has sent its last event: asking for it twice would lose it.
            self._take_events(f"/events?since={self._number}&wait={seconds}")

    def current_view(self) -> View:
        """Return the job now. Raises the errors of `ask`."""
        self._read_events()
        self._model.add_output(self._read())
        samples = None
        # After the last event the driver's loop has ended, and does not answer.
        if not self.has_ended or self._job is None:
            job = self._ask("/job")
            # Another driver has taken the job over, and counts its events from 0.
            if self._job is not None and job["pid"] != self._job["pid"]:
                self._model.forget_events()
                self._number = 0
                self._read_events()
            self._job = job
            samples = _samples(self._ask("/samples"))
        return self._model.view(self._job, samples, self._now())

    def _read_events(self) -> None:
        while not self.has_ended and self._take_events(f"/events?since={self._number}"):
            pass

    def _take_events(self, path: str) -> bool:
        """Ask for events, and add them to the model; False if no event came."""
        page = self._ask(path)
        self._model.add_events(page["events"])
        self._number = page["next"]
        return bool(page["events"])


def _samples(answer: Any) -> list[Mapping[str, Any]]:
    """Return the samples in an answer to GET /samples."""
    return [] if answer is None else list(answer["hosts"])
