"""The minder of a detached job: a process that starts another driver if a driver was killed, and ends with the job."""

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvlaunch.errors import EXIT_HOSTS
from hvlaunch.outside import ABOUT, MINDER, RESULT, has_driver, has_minder, take_lock

__all__ = ["SUCCESSOR_LOG", "start_minder", "start_process", "start_successor"]

SUCCESSOR_LOG = "successor.log"
"""The file with the error of the last successor that could not take the job over."""

_MOST_STARTS, _WITHIN = 3, 600.0
_LOOK = 0.1


def start_minder(directory: Path) -> None:
    """Start the job's minder, which outlives this process, unless the job has one. Raises OSError."""
    if has_minder(directory):
        return
    try:
        lock = take_lock(directory / MINDER, os.O_CREAT)
    # Another process is starting the minder at this moment.
    except BlockingIOError:
        return
    try:
        # The minder inherits the lock, so the job is never without it between the two processes.
        start_process("hvlaunch.outside.minder", directory, kept=[lock])
    finally:
        os.close(lock)


def start_successor(directory: Path) -> "subprocess.Popen[bytes]":
    """Start a driver that takes the job over, in a session of its own; its stderr goes to SUCCESSOR_LOG. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    log = os.open(directory / SUCCESSOR_LOG, flags, 0o600)
    try:
        return start_process("hvlaunch.gloo.successor", directory, log)
    finally:
        os.close(log)


def start_process(
    module: str,
    path: Path,
    log: int = subprocess.DEVNULL,
    kept: Sequence[int] = (),
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Run a module of hvlaunch in a session of its own: it outlives this process. `path` is its first argument. Raises OSError."""
    # Not `python -m`: it would import from the working directory first, which may hold any files.
    program = (
        f"import runpy, sys; sys.path[:] = {sys.path!r}; runpy.run_module({module!r}, run_name='__main__')"
    )
    return subprocess.Popen(
        [sys.executable, "-I", "-c", program, str(path), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=kept,
        env=environ,
        start_new_session=True,
    )


def _mind(directory: Path) -> None:
    """Watch until the job has ended, can't be taken over, or has lost too many drivers."""
    starts: deque[float] = deque(maxlen=_MOST_STARTS)
    successor: subprocess.Popen[bytes] | None = None
    while True:
        # Not by a lock that blocks: a minder that is stopped just as it gets the lock would keep successors from it.
        while has_driver(directory):
            time.sleep(_LOOK)
        if successor is not None and successor.wait() == EXIT_HOSTS:
            return
        if not (directory / ABOUT).exists() or (directory / RESULT).exists():
            return
        # A driver that dies again and again has a cause that another start does not remove.
        if len(starts) == _MOST_STARTS and time.monotonic() < starts[0] + _WITHIN:
            return
        starts.append(time.monotonic())
        successor = start_successor(directory)
        while successor.poll() is None and not has_driver(directory):
            time.sleep(_LOOK)


if __name__ == "__main__":
    _mind(Path(sys.argv[1]))
