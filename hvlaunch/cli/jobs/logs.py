"""`hvlaunch logs`: a job's output as far as it is kept."""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from hvlaunch.cli.jobs.view import Ranks, View, await_output, is_shown
from hvlaunch.cli.process import BROKEN_PIPE, print_answer
from hvlaunch.console.lines import visible
from hvlaunch.console.notes import lost_output_text
from hvlaunch.console.stored import Stored, StoreReader, from_where, segments
from hvlaunch.outside.control import DriverGone
from hvlaunch.outside.directory import REPORT, has_driver
from hvlaunch.outside.known import KnownJob, choose, has_ended

__all__ = ["logs"]

_LOOK = 0.05
_PATIENCE = 10.0
"""Seconds for another driver to begin."""
_STREAMS = {"stdout": "stdout", "stderr": "stderr", "said": "hvlaunch", "shown": "report"}


def logs(jobs: Sequence[KnownJob], options: argparse.Namespace) -> int:
    """Print it; the exit code. Raises HvlaunchError."""
    job = choose(jobs, options.job)
    await_output(job)
    if (report := _report_alone(job)) is not None:
        return print_answer(report)
    reader = StoreReader(job.directory)
    if options.since is not None:
        reader.seek_time(options.since)
    early = options.since or 0.0
    found = from_where(_read(job, reader, follows=options.follow), lambda item: item.time < early)
    code = (
        _print_json(found, options.ranks) if options.json else _print(job, found, View(reader, options.ranks))
    )
    if code == 0 and options.follow and not has_ended(job):
        hint = f"to go on with it, if its workers still live: hvlaunch attach {job.id}"
        raise DriverGone(f"job {job.id} has had no driver for {_PATIENCE:g} s", hint=hint)
    return code


def _print(job: KnownJob, found: Iterator[Stored], view: View) -> int:
    for item in found:
        view.await_room()
        view.show(item)
        if not view.is_read:
            return BROKEN_PIPE
    if not has_driver(job.directory) and (lost := lost_output_text(job.directory)) is not None:
        view.printer.say(lost)
    view.printer.close()
    return 0 if view.is_read else BROKEN_PIPE


def _report_alone(job: KnownJob) -> str | None:
    """Of a job that has failed and whose output is not kept."""
    if segments(job.directory):
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        return visible(str(json.loads((job.directory / REPORT).read_bytes())["text"]))
    return None


def _read(job: KnownJob, reader: StoreReader, *, follows: bool) -> Iterator[Stored]:
    """What is kept; with `follows` until the job has ended, or has had no driver for long."""
    last = time.monotonic()
    while True:
        last = time.monotonic() if has_driver(job.directory) else last
        is_over = not follows or has_ended(job) or time.monotonic() > last + _PATIENCE
        yield from reader.read()
        if is_over:
            return
        time.sleep(_LOOK)


def _print_json(found: Iterator[Stored], ranks: Ranks) -> int:
    for item in found:
        if item.kind in _STREAMS and is_shown(item, ranks):
            text = item.data.decode(errors="replace")
            record = {"time": item.time, "rank": item.rank, "stream": _STREAMS[item.kind], "text": text}
            if code := print_answer(f"{json.dumps(record)}\n"):
                return code
    return 0
