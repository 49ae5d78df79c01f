"""`hvlaunch attach`: show a job's output as if the job had been started here, and leave it running."""

import argparse
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from hvlaunch.children import uninterrupted
from hvlaunch.cli.jobs.view import OutputView, await_output, is_shown
from hvlaunch.cli.process import BROKEN_PIPE, complain
from hvlaunch.console.output_store import (
    STREAMS,
    Position,
    Stored,
    StoreReader,
    from_where,
    newest_lines,
    segments,
)
from hvlaunch.console.status import count, duration
from hvlaunch.errors import EXIT_HOSTS
from hvlaunch.hosts.parse import host_set
from hvlaunch.outside import KnownJob, choose, has_driver, has_ended, result_of
from hvlaunch.outside.control import DriverGone, state_of
from hvlaunch.outside.minder import SUCCESSOR_LOG, start_minder, start_successor

__all__ = ["Viewed", "attach", "described"]

_LINES = 100
# Segments of stored output to search for the newest lines.
_SEGMENTS = 2
_LOOK = 0.05
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
    view = OutputView(reader, options.ranks)
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
    job: KnownJob, reader: StoreReader, view: OutputView, viewed: "Viewed", successors: "_Successors"
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
    job: KnownJob, reader: StoreReader, view: OutputView, items: Iterator[Stored]
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


def _say_state(job: KnownJob, view: OutputView) -> None:
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
