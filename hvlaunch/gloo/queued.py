"""The program of a queued job's first driver, run_queued(): its arguments are QUEUE NUMBER ID wait|fill DESCRIPTOR.

The server of the queue starts the program, with a lock to hold until its end. The job was read at its submission: later options,
files and variables do not count. The output is in the job's directory, as for other detached jobs.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from hvlaunch.engine.codec import BadData, decode
from hvlaunch.errors import EXIT_INTERNAL, EXIT_USAGE, BadUsage, HvlaunchError
from hvlaunch.gloo.controller import run
from hvlaunch.job import JobSpec, QueuedAs
from hvlaunch.outside.queue import ENVIRONMENT, SPECS, Queue, QueueEntry

__all__ = ["as_queued", "run_queued", "submission_errors"]


def run_queued() -> NoReturn:
    """Run the program."""
    # As other drivers: no exit handlers of libraries after the job's end.
    code = EXIT_USAGE
    try:
        code = _run(*sys.argv[1:])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run(queue: str, number: str, job_id: str, way: str, lock: str) -> int:
    # The job's own processes must not hold the lock.
    os.set_inheritable(int(lock), False)
    entry = QueueEntry(Queue(Path(queue)), number, job_id)
    try:
        spec = _spec(entry, QueuedAs(Path(queue), number, job_id), may_wait=way == "wait")
        with suppress(OSError):
            # A tree that is gone is no reason to fail: hosts get the copy.
            os.chdir(spec.cwd)
        return run(spec, stdout=sys.stdout.buffer, stderr=sys.stderr.buffer).exit_code
    except HvlaunchError as error:
        entry.note_failure(error.exit_code, str(error))
        return error.exit_code
    except Exception as error:
        entry.note_failure(EXIT_INTERNAL, f"internal error: {type(error).__name__}: {error}")
        raise


def _spec(entry: QueueEntry, queued: QueuedAs, *, may_wait: bool) -> JobSpec:
    """Return the job of the submission. Raises BadUsage."""
    with submission_errors():
        words = json.loads((entry.directory / SPECS).read_bytes())[queued.number]
        variables = json.loads((entry.directory / ENVIRONMENT).read_bytes())["workers"]
        spec: JobSpec = decode(JobSpec, words)
    if spec.leases is None:
        # A batch job: its worker takes the leases, and learns here for which job.
        spec = replace(spec, command=(*spec.command, str(queued.queue), queued.number))
    return replace(as_queued(spec, entry, queued, may_wait=may_wait), env=variables[queued.number])


@contextmanager
def submission_errors() -> Iterator[None]:
    """Turn errors of reading a submission into BadUsage."""
    try:
        yield
    except OSError as error:
        raise BadUsage(f"its submission is gone: {error}") from None
    except (BadData, ValueError, LookupError) as error:
        raise BadUsage(f"another version of hvlaunch has queued it: {error}", hint="queue it again") from None


def as_queued(spec: JobSpec, entry: QueueEntry, queued: QueuedAs, *, may_wait: bool) -> JobSpec:
    """Return the job as the queue starts it: with the files of its submission, and its turn for leases."""
    leases = None if spec.leases is None else spec.leases._replace(wait=may_wait, passes_own=not may_wait)
    sync = None if spec.sync is None else spec.sync._replace(job=entry.directory)
    return replace(spec, leases=leases, sync=sync, queued=queued)
