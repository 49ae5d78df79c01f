"""Where one call has its files on this machine: the program that the hosts get, and what the workers return."""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["CallDirectory"]

_PREFIX = "hvlaunch-call-"
_LOCK = "lock"
_MAKING_TIME = 60.0
"""Seconds after which a directory has its lock."""


class CallDirectory:
    """Of the process that makes it, which holds its lock until it removes it, or ends."""

    def __init__(self) -> None:
        """Those of callers that were killed together with their drivers go meanwhile. Raises OSError."""
        for path in _left_over():
            shutil.rmtree(path, ignore_errors=True)
        self._pid = os.getpid()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.program = self.path / "program"
        try:
            self._lock = (self.path / _LOCK).open("xb")
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def remove(self) -> None:
        """It may be gone already. A process that was forked since leaves it to the one that has made it."""
        if os.getpid() == self._pid:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()


def _left_over() -> Iterator[Path]:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            status = path.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_ours and status.st_mtime < time.time() - _MAKING_TIME and not _is_held(path / _LOCK):
                yield path


def _is_held(lock: Path) -> bool:
    """Whether somebody holds it, as far as that can be seen. Raises OSError."""
    with suppress(FileNotFoundError), lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
