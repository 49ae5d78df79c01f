"""Bindings of a job's workers, read back from their hosts: a table, and sentences about differences from the order."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from hvlaunch.agent.wire.frames import exactly, or_null, record, several, text, whole
from hvlaunch.console.lines import aligned
from hvlaunch.engine import events as on
from hvlaunch.hosts.parse import host_set
from hvlaunch.job import Bind

if TYPE_CHECKING:
    from hvlaunch.driver.observing import Answer, Observers, Target

__all__ = ["Bindings", "table"]

_LOOKS = (0.5, 5.0, 30.0, 120.0)
"""Seconds after the last start: a program binds itself long after its start."""
_PATIENCE = 5.0
_MOST_ROWS = 100
_MOST_DETAILS = 16
_MOST_WORKERS = 1 << 16
_TEXT = text(4096)
_NOTE = exactly(text(256), 2)
_PROCESS = whole(1, 1 << 22)
_ROWS = several(
    record(
        {
            "rank": whole(0, 1 << 31),
            "ordered": or_null(_TEXT),
            "cpus": _TEXT,
            "memory": _TEXT,
            "threads": _TEXT,
            "gpus": or_null(_TEXT),
            "other": or_null(record({"pid": _PROCESS, "name": text(64), "cpus": _TEXT})),
            "notes": several(_NOTE, 16),
        }
    ),
    _MOST_WORKERS,
)
"""An observer's answer; processes of the same user may have written any text."""

Row: TypeAlias = Mapping[str, Any]

_HEADS = ("host", "worker", "processors", "memory", "threads", "GPUs")


def table(rows_by_host: Mapping[str, Sequence[Sequence[str]]]) -> list[str]:
    """Return lines of a table; `rows_by_host` has each worker's columns from the third on. Hosts with equal rows share a row."""
    hosts: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for host, rows in rows_by_host.items():
        hosts.setdefault(tuple(map(tuple, rows)), []).append(host)
    lines = [
        (host_set(names), str(number), *row)
        for rows, names in hosts.items()
        for number, row in enumerate(rows)
    ]
    return aligned([_HEADS, *lines[:_MOST_ROWS]]) + (
        [f"and {len(lines) - _MOST_ROWS} more"] if len(lines) > _MOST_ROWS else []
    )


class _Look:
    """The hosts' answers to a question."""

    def __init__(self) -> None:
        self.expected: int | None = None
        self.answers: list[Answer] = []

    @property
    def is_complete(self) -> bool:
        return len(self.answers) == self.expected


class Bindings:
    """Asks the hosts after each start of workers, and some times later. `say` prints a message, `clock` is in seconds."""

    def __init__(
        self,
        mode: Bind,
        observers: "Observers",
        clock: Callable[[], float],
        say: Callable[[str], None],
        *,
        is_verbose: bool,
    ) -> None:
        self._mode = mode
        self._observers = observers
        self._clock = clock
        self._say = say
        self._is_verbose = is_verbose
        self._lock = threading.Lock()
        self._starts = 0
        """Number of starts: a look of an older start is void."""
        self._said: set[str] = set()

    def watch(self, event: on.Event, _actions: object, _now: float) -> None:
        """Order looks after a start."""
        if isinstance(event, on.WorkerStarted):
            self._starts += 1
            self._order(self._starts, 0)

    def _order(self, start: int, number: int) -> None:
        if number < len(_LOOKS):
            self._observers.at(self._clock() + _LOOKS[number], partial(self._ask, start, number))

    def _ask(self, start: int, number: int) -> None:
        if start != self._starts:
            return
        look = _Look()
        names = self._observers.ask("bindings", _question, _PATIENCE, partial(self._take, look, number))
        with self._lock:
            look.expected = len(names)
            is_complete = look.is_complete
        if is_complete and names:
            self._show(look.answers, is_first=number == 0)
        self._order(start, number + 1)

    def _take(self, look: _Look, number: int, answer: "Answer") -> None:
        with self._lock:
            look.answers.append(answer)
            is_complete = look.is_complete
        if is_complete:
            self._show(look.answers, is_first=number == 0)

    def _show(self, answers: "Sequence[Answer]", *, is_first: bool) -> None:
        """Say the hosts' answers, each sentence once for the job."""
        rows = {answer.host: answer.value for answer in answers if _ROWS(answer.value) and answer.value}
        if self._is_verbose and is_first and rows:
            cells = {
                host: [
                    (row["cpus"], _memory(row["memory"]), row["threads"] or "-", row["gpus"] or "-")
                    for row in workers
                ]
                for host, workers in sorted(rows.items(), key=lambda entry: entry[1][0]["rank"])
            }
            self._say("\n  ".join([f"bindings (--bind {self._mode}), from /proc:", *table(cells)]))
        for kind, sentence in _sentences(self._mode, rows):
            if kind not in self._said:
                self._said.add(kind)
                self._say(sentence)


def _memory(policy: str) -> str:
    """Return the nodes of a memory policy in the kernel's words, `prefer:0`."""
    return policy.removeprefix("prefer:") if policy not in ("", "default", "local") else "any"


def _question(target: "Target") -> Mapping[str, Any] | None:
    if not target.workers:
        return None
    return {"workers": list(target.workers.items()), "scratch": target.scratch}


def _sentences(mode: Bind, rows_by_host: Mapping[str, Sequence[Row]]) -> Iterator[tuple[str, str]]:
    """Yield a sentence for each kind of difference, behind a name of the kind."""
    hosts: dict[str, dict[str, None]] = {}
    details: dict[str, dict[str, None]] = {}
    again: list[str] = []
    for host, rows in rows_by_host.items():
        for row in rows:
            for word, detail in row["notes"]:
                hosts.setdefault(word, {})[host] = None
                details.setdefault(word, {})[detail] = None
            if row["other"] is not None:
                other = row["other"]
                again.append(
                    f"process {other['pid']} ({other['name']}) of rank {row['rank']} on {host} has processors "
                    f"{other['cpus']}, and --bind gave {row['ordered']}"
                )
    instead = "its worker is not bound" if mode == "gpu" else "its worker is bound by slot"
    for word, names in hosts.items():
        detail = ", ".join(list(details[word])[:_MOST_DETAILS])
        sentence = {
            "outside": f"NUMA node {detail}, which has a worker's GPU, has no processor in the cpuset, so {instead}",
            "unknown": f"the NUMA node of GPU {detail} is not known, so {instead}",
            "memory": f"the kernel refuses a memory policy ({detail}); memory comes from the node where a worker runs",
            "affinity": f"the kernel refuses to bind a worker ({detail})",
        }.get(word)
        if sentence is not None:
            yield f"{word} {detail} {host_set(names)}", f"{host_set(names)}: {sentence}"
    if again:
        more = f", and {len(again) - 1} more" if len(again) > 1 else ""
        sentence = f"another program binds too: {again[0]}{more}"
        yield "again", f"{sentence}; try: --bind none, or the program without its own binding"
