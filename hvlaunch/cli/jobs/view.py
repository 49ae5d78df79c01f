"""A job's output as stored, shown as the job's own terminal would show it; and `hvlaunch logs`."""

import argparse
import json
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, cast

from hvlaunch.cli.process import BROKEN_PIPE, print_answer
from hvlaunch.console.lines import Stream, visible
from hvlaunch.console.notes import lost_output_text
from hvlaunch.console.output_store import Stored, StoreReader, from_where, options_of, segments
from hvlaunch.console.printer import Printer
from hvlaunch.job import ConsoleOptions
from hvlaunch.outside import REPORT, KnownJob, choose, has_driver, has_ended
from hvlaunch.outside.control import ControlClient, DriverGone

__all__ = ["OutputView", "Ranks", "await_output", "is_shown", "logs"]

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


class OutputView:
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
        else _print_text(job, items, OutputView(reader, options.ranks))
    )
    if code == 0 and options.follow and not has_ended(job):
        hint = f"to continue it, if its workers still live: hvlaunch attach {job.id}"
        raise DriverGone(f"job {job.id} has had no driver for {_DRIVER_PATIENCE:g} s", hint=hint)
    return code


def _print_text(job: KnownJob, items: Iterator[Stored], view: OutputView) -> int:
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
