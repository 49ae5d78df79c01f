"""A job's stored output in this terminal, as the job's own would show it: `hvlaunch logs`, and `hvlaunch attach`, which leaves the job running."""

import argparse
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, cast

from hvlaunch.children import uninterrupted
from hvlaunch.cli.process import BROKEN_PIPE, complain, print_answer
from hvlaunch.console.lines import Stream, visible
from hvlaunch.console.notes import lost_output_text
from hvlaunch.console.output_store import (
    STREAMS,
    Position,
    Stored,
    StoreReader,
    from_where,
    newest_lines,
    options_of,
    segments,
)
from hvlaunch.console.printer import Printer
from hvlaunch.console.status import count, duration
from hvlaunch.errors import EXIT_HOSTS
from hvlaunch.hosts.parse import host_set
from hvlaunch.job import ConsoleOptions
from hvlaunch.outside import (
    REPORT,
    SUCCESSOR_LOG,
    KnownJob,
    choose,
    has_driver,
    has_ended,
    result_of,
    start_minder,
    start_successor,
)
from hvlaunch.outside.control import ControlClient, DriverGone, state_of

__all__ = ["Ranks", "Viewed", "attach", "await_output", "described", "is_shown", "logs"]

Ranks = tuple[range, ...] | None
"""None shows every rank."""

_WINDOW = 1 << 20
"""Bytes that may wait for a slow reader of the terminal."""
_LOOK = 0.05
_PATIENCE = 5.0
"""Seconds for a driver to begin storing output."""


def is_shown(item: Stored, ranks: Ranks) -> bool:
    """Return whether an item belongs to one of these ranks, or to no rank."""
    return item.rank is None or ranks is None or any(item.rank in part for part in ranks)


def await_output(job: KnownJob) -> None:
    """Ask the driver to store the job's output, and wait until it does. Raises DriverGone.

    If the job ends meanwhile, only what is stored remains.
    """
    if _is_kept(job) or _is_over(job):
        return
    # A job in a terminal stores no output until a viewer asks.
    deadline = time.monotonic() + _PATIENCE
    try:
        ControlClient(job, _PATIENCE).post("/output", {})
    except DriverGone:
        while not _is_over(job):
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK)
    while not _is_kept(job) and not _is_over(job):
        if time.monotonic() > deadline:
            raise DriverGone(
                f"job {job.id}: its output can't be kept", hint=f"df {shlex.quote(str(job.directory))}"
            )
        time.sleep(_LOOK)


def _is_kept(job: KnownJob) -> bool:
    """Return whether output is stored. Raises OSError."""
    # A good end removes the directory.
    with suppress(FileNotFoundError):
        return bool(segments(job.directory))
    return False


def _is_over(job: KnownJob) -> bool:
    """Return whether the job has ended or its driver was killed."""
    return has_ended(job) or not has_driver(job.directory)


class _OutputView:
    """Prints a job's output to this process's stdout and stderr."""

    def __init__(self, reader: StoreReader, ranks: Ranks) -> None:
        """Show these ranks; None shows the ranks of the job's own options."""
        head = reader.head()
        options = options_of(head) if head is not None else ConsoleOptions()
        self.options = options if ranks is None else replace(options, ranks=ranks)
        self._has_times = "{time" in self.options.prefix
        self._time = 0.0
        self._changed = threading.Condition()
        self._waiting = 0
        self.is_read = True
        """False once the reader of stdout or stderr is gone."""
        self.printer = Printer(
            sys.stdout.buffer,
            sys.stderr.buffer,
            options=self.options,
            now=lambda: datetime.fromtimestamp(self._time).astimezone(),
            on_broken=self._break,
        )

    @property
    def is_idle(self) -> bool:
        """Whether everything is written."""
        return not self._waiting

    def await_room(self) -> None:
        """Wait until the terminal's reader has taken enough of the earlier output."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting < _WINDOW or not self.is_read)

    def show(self, item: Stored) -> None:
        """Print an item without waiting."""
        # The prefix shows the time of the output, not of its display.
        if self._has_times:
            self.printer.in_turn(partial(setattr, self, "_time", item.time))
        rank = item.rank or 0
        match item.kind:
            case "head":
                self._place(json.loads(item.data)["places"])
            case "placed":
                self._place(json.loads(item.data))
            case "said":
                self.printer.say(item.data.decode(errors="replace"))
            case "shown":
                self.printer.show(item.data.decode(errors="replace"))
            case "stdout" | "stderr":
                with self._changed:
                    # Counted until printed: a slow terminal must slow reading.
                    self._waiting += len(item.data)
                self.printer.output(rank, item.kind, item.data, self._done)
            case _:
                self.printer.end_stream(rank, cast("Stream", item.kind.removesuffix(" ended")))

    def _place(self, places: Mapping[str, Any]) -> None:
        self.printer.learn_places(
            {int(rank): (host, local_rank) for rank, (host, local_rank) in places.items()}
        )

    def _done(self, size: int) -> None:
        with self._changed:
            self._waiting -= size
            self._changed.notify()

    def _break(self) -> None:
        with self._changed:
            self.is_read = False
            self._changed.notify()


_DRIVER_PATIENCE = 10.0
"""Seconds for a successor to begin."""
_STREAMS = {"stdout": "stdout", "stderr": "stderr", "said": "hvlaunch", "shown": "report"}


def logs(jobs: Sequence[KnownJob], options: argparse.Namespace) -> int:
    """Print a job's stored output; return the exit code. Raises HvlaunchError."""
    job = choose(jobs, options.job)
    await_output(job)
    # A failed job in a terminal stored no output, but its report is kept.
    if (report := _report_alone(job)) is not None:
        return print_answer(report)
    reader = StoreReader(job.directory)
    if options.since is not None:
        reader.seek_time(options.since)
    early = options.since or 0.0
    items = from_where(_stored(job, reader, follows=options.follow), lambda item: item.time < early)
    code = (
        _print_json(items, options.ranks)
        if options.json
        else _print_text(job, items, _OutputView(reader, options.ranks))
    )
    if code == 0 and options.follow and not has_ended(job):
        hint = f"to continue it, if its workers still live: hvlaunch attach {job.id}"
        raise DriverGone(f"job {job.id} has had no driver for {_DRIVER_PATIENCE:g} s", hint=hint)
    return code


def _print_text(job: KnownJob, items: Iterator[Stored], view: _OutputView) -> int:
    for item in items:
        view.await_room()
        view.show(item)
        if not view.is_read:
            return BROKEN_PIPE
    if not has_driver(job.directory) and (lost := lost_output_text(job.directory)) is not None:
        view.printer.say(lost)
    view.printer.close()
    return 0 if view.is_read else BROKEN_PIPE


def _report_alone(job: KnownJob) -> str | None:
    """Return the report of a failed job without stored output."""
    if segments(job.directory):
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        return visible(str(json.loads((job.directory / REPORT).read_bytes())["text"]))
    return None


def _stored(job: KnownJob, reader: StoreReader, *, follows: bool) -> Iterator[Stored]:
    """Yield stored items; with `follows` until the job ends, or has had no driver for long."""
    last = time.monotonic()
    while True:
        last = time.monotonic() if has_driver(job.directory) else last
        # Read once more after the end: output may have come in between.
        is_over = not follows or has_ended(job) or time.monotonic() > last + _DRIVER_PATIENCE
        yield from reader.read()
        if is_over:
            return
        time.sleep(_LOOK)


def _print_json(items: Iterator[Stored], ranks: Ranks) -> int:
    for item in items:
        if item.kind in _STREAMS and is_shown(item, ranks):
            text = item.data.decode(errors="replace")
            record = {"time": item.time, "rank": item.rank, "stream": _STREAMS[item.kind], "text": text}
            if code := print_answer(f"{json.dumps(record)}\n"):
                return code
    return 0


_LINES = 100
# Segments of stored output to search for the newest lines.
_SEGMENTS = 2
# Seconds before output if the line about the job's state is late: it should come first.
_SOON = 0.3
_STATE_PATIENCE = 5.0
_TAKE_OVER_PATIENCE = 60.0
_LEAVE_PATIENCE = 0.5
_VIEWED = "viewed"


def attach(jobs: Sequence[KnownJob], options: argparse.Namespace) -> int:
    """Show the job until it ends or Ctrl-C; return the job's exit code, or 0. Raises HvlaunchError."""
    job = choose(jobs, options.job)
    viewed = Viewed(job)
    successors = _Successors(job)
    if not has_driver(job.directory) and not has_ended(job):
        if viewed.position is None and not segments(job.directory):
            # The job's terminal has shown everything up to now: the whole store is new.
            viewed.position = Position(0, 0)
        successors.start(lambda: None)
    await_output(job)
    reader = StoreReader(job.directory, viewed.position)
    view = _OutputView(reader, options.ranks)
    _say_state(job, view)
    items = _read(job, reader, view, viewed, successors)
    if viewed.position is None:
        items = _newest(job, reader, view, items)
    shown = viewed.position
    try:
        for item in items:
            view.await_room()
            # A signal between the two would show a line twice, or never.
            with uninterrupted():
                view.show(item)
                shown = reader.position
            if not view.is_read:
                return BROKEN_PIPE
        view.printer.close()
    except KeyboardInterrupt:
        view.printer.close(_LEAVE_PATIENCE)
        complain(f"job {job.id} continues; to stop it: hvlaunch stop {job.id}")
        return 0
    finally:
        if shown is not None:
            viewed.note(shown)
    result = result_of(job)
    return 0 if result is None else int(result["exit_code"])


def _read(
    job: KnownJob, reader: StoreReader, view: _OutputView, viewed: "Viewed", successors: "_Successors"
) -> Iterator[Stored]:
    """Yield stored output until the job ends; start a successor if the driver is gone. Raises DriverGone."""
    while True:
        # Read once more after the end: output may have come in between.
        is_over = has_ended(job)
        yield from reader.read()
        if reader.has_missed:
            reader.has_missed = False
            view.printer.say("some of its output is no longer kept")
        if is_over:
            return
        if view.is_idle:
            viewed.note(reader.position)
        if not has_driver(job.directory) and not has_ended(job):
            successors.start(
                lambda: view.printer.say("its driver was killed; another driver takes the job over")
            )
        time.sleep(_LOOK)


def _newest(
    job: KnownJob, reader: StoreReader, view: _OutputView, items: Iterator[Stored]
) -> Iterator[Stored]:
    """Yield `items`, beginning with the last lines stored now."""
    reader.seek_newest(_SEGMENTS)
    looking = StoreReader(job.directory, reader.position)
    ranks = view.options.ranks
    early, surplus = newest_lines(looking.read(), _LINES, lambda item: is_shown(item, ranks))
    looking.close()
    left = iter(range(early))
    for item in from_where(items, lambda _item: next(left, None) is not None):
        if surplus and item.kind in STREAMS and is_shown(item, ranks):
            yield item._replace(data=item.data.split(b"\n", surplus)[-1])
            surplus = 0
        else:
            yield item


class _Successors:
    """Drivers started here for a job whose driver is gone."""

    def __init__(self, job: KnownJob) -> None:
        self._job = job
        self._newest: subprocess.Popen[bytes] | None = None

    def start(self, say: Callable[[], None]) -> None:
        """Start a successor, unless a driver runs already, and a minder, which may have died with the machine.

        `say` is called before the start. Raises DriverGone.
        """
        job = self._job
        if (launcher := job.about.get("launcher")) is not None:
            cause = f"job {job.id}: its driver was killed, and no other can take over a job of {launcher}"
            raise DriverGone(cause, hint="start it again: its old workers end by themselves")
        say()
        # Exit code EXIT_HOSTS: no host answered, and another successor would fail in the same way.
        if self._newest is not None and self._newest.wait() == EXIT_HOSTS:
            raise self._gone()
        self._newest = start_successor(job.directory)
        deadline = time.monotonic() + _TAKE_OVER_PATIENCE
        while not has_driver(job.directory) and not has_ended(job):
            if self._newest.poll() is not None or time.monotonic() > deadline:
                raise self._gone()
            time.sleep(_LOOK)
        with suppress(OSError):  # a full disk, or a directory that the job's end removed
            start_minder(job.directory)

    def _gone(self) -> DriverGone:
        job = self._job
        return DriverGone(f"job {job.id}: its driver was killed, and no other can take it over{_why(job)}")


def _why(job: KnownJob) -> str:
    """Return the successor's last words."""
    with suppress(OSError):
        lines = (job.directory / SUCCESSOR_LOG).read_text(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""
    return ""


class Viewed:
    """Position up to which this user has seen the job's output, in a file of the job's directory."""

    def __init__(self, job: KnownJob) -> None:
        self._path = job.directory / _VIEWED
        self.position: Position | None = None
        with suppress(OSError, ValueError):
            segment, offset = map(int, self._path.read_text().split())
            self.position = Position(segment, offset)

    def note(self, position: Position) -> None:
        if position == self.position:
            return
        # Fixed width: pwrite replaces the whole of the previous position at once.
        text = f"{position.segment:9} {position.offset:12}\n".encode()
        with uninterrupted(), suppress(OSError):  # no directory, or a full disk
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(file, text, 0)
            finally:
                os.close(file)
            self.position = position


def _say_state(job: KnownJob, view: _OutputView) -> None:
    """Print the job's state, possibly late: a busy driver answers late."""

    def ask() -> None:
        view.printer.say(described(job))

    asking = threading.Thread(target=ask, name="state", daemon=True)
    asking.start()
    asking.join(_SOON)


def described(job: KnownJob) -> str:
    """Return what the job does, or how it ended."""
    subject = job.label
    since = f", begun {duration(max(0.0, time.time() - job.began))} ago"
    if has_ended(job):
        result = result_of(job)
        return f"{subject} has ended{since}, exit code {0 if result is None else result['exit_code']}"
    state = state_of(job, _STATE_PATIENCE)
    if state is None:
        return f"{subject}: its driver (process {job.about.get('pid')}) does not answer{since}"
    hosts = host_set(host["host"] for host in state["hosts"] if host["state"] == "ready")
    current = f", round {state['round']['number']}" if state["round"] and job.is_elastic else ""
    on_hosts = f" on {hosts}" if hosts else ""
    return f"{subject}: {state['phase']}{current}, {count(len(state['workers']), 'worker')}{on_hosts}{since}; Ctrl-C leaves it running"
