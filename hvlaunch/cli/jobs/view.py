"""Looking on at a job: its output as it is kept, shown as a terminal of its own would have shown it."""

import json
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, cast

from hvlaunch.console.lines import Stream
from hvlaunch.console.printer import Printer
from hvlaunch.console.stored import Stored, StoreReader, options_of, segments
from hvlaunch.job import ConsoleOptions
from hvlaunch.outside.control import Control, DriverGone
from hvlaunch.outside.directory import has_driver
from hvlaunch.outside.known import KnownJob, has_ended

__all__ = ["Ranks", "View", "await_output", "is_shown"]

Ranks = tuple[range, ...] | None
"""None is all."""

_WINDOW = 1 << 20
"""Bytes that may wait for who reads the terminal."""
_LOOK = 0.05
_PATIENCE = 5.0
"""Seconds for a driver to begin to keep output."""


def is_shown(item: Stored, ranks: Ranks) -> bool:
    """Whether it is of these ranks, or of none."""
    return item.rank is None or ranks is None or any(item.rank in part for part in ranks)


def await_output(job: KnownJob) -> None:
    """See to it that the job's output is kept, which that of a job in a terminal is not until somebody asks.

    Where the job ends meanwhile, there is what is kept. Raises DriverGone.
    """
    if _is_kept(job) or _is_over(job):
        return
    deadline = time.monotonic() + _PATIENCE
    try:
        Control(job, _PATIENCE).post("/output", {})
    except DriverGone:
        while not _is_over(job):
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK)
    while not _is_kept(job) and not _is_over(job):
        if time.monotonic() > deadline:
            raise DriverGone(f"job {job.id}: its output can't be kept", hint=f"df {job.directory}")
        time.sleep(_LOOK)


def _is_kept(job: KnownJob) -> bool:
    """Whether there is output of it. Raises OSError."""
    with suppress(FileNotFoundError):  # the directory is gone, as after a good end
        return bool(segments(job.directory))
    return False


def _is_over(job: KnownJob) -> bool:
    """Whether it has ended, or its driver was killed."""
    return has_ended(job) or not has_driver(job.directory)


class View:
    """Prints a job's output to stdout and stderr of this process."""

    def __init__(self, reader: StoreReader, ranks: Ranks) -> None:
        """`ranks` are shown; None: those that the job's own options say."""
        head = reader.head()
        options = options_of(head) if head is not None else ConsoleOptions()
        self.options = options if ranks is None else replace(options, ranks=ranks)
        self._has_times = "{time" in self.options.prefix
        self._time = 0.0
        self._changed = threading.Condition()
        self._waiting = 0
        self.is_read = True
        """Whether anybody takes what is printed."""
        self.printer = Printer(
            sys.stdout.buffer,
            sys.stderr.buffer,
            options=self.options,
            now=lambda: datetime.fromtimestamp(self._time).astimezone(),
            on_broken=self._break,
        )

    @property
    def is_idle(self) -> bool:
        """Whether all that came was written."""
        return not self._waiting

    def await_room(self) -> None:
        """Wait until whoever reads the terminal has taken enough of what came before."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting < _WINDOW or not self.is_read)

    def show(self, item: Stored) -> None:
        """Print it. Does not wait."""
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
