"""The directory of a job, by which this user's other programs find the job while it runs and afterwards."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hvlaunch.errors import EXIT_USAGE, HvlaunchError
from hvlaunch.owners import make_own_directory, open_directory, writer_of_directory

__all__ = [
    "ABOUT",
    "CONTROL",
    "IN_MAKING",
    "KEYS",
    "LOCK",
    "MINDER",
    "REPORT",
    "RESULT",
    "STORE",
    "DriverLives",
    "JobDirectory",
    "NoJobDirectory",
    "check_root",
    "has_driver",
    "has_minder",
    "is_own_directory",
    "jobs_directory",
    "reachable",
    "remove",
    "remove_secrets",
    "take_lock",
]

LOCK, ABOUT, RESULT, CONTROL = "lock", "about.json", "result.json", "control"
REPORT = "report.json"
"""The failure report of a job that has ended."""
KEYS, STORE = "keys.json", "store"
"""The secrets of a job for a successor: keys and workers' environment, and the values of the rendezvous."""
MINDER = "minder"
"""The lock of the job's minder."""
IN_MAKING = "."
"""First letter of the names of incomplete directories."""

_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOKING = 0.5
"""Seconds after which a held lock belongs to a driver. Other programs take it for a moment to look: _is_held()."""
_PART = ".part"
_ROOM = 4096
_LONGEST = 100
"""Bytes of a socket's path: below the limits of Linux (107) and macOS (103)."""


class NoJobDirectory(HvlaunchError):
    """A job can't have a directory; `cause` says why. A job runs without a directory, but other programs do not see it."""

    exit_code = EXIT_USAGE


class DriverLives(HvlaunchError):
    """A driver holds the lock of the job: the first driver lives, or a successor has taken the job over."""

    exit_code = EXIT_USAGE


def jobs_directory(environ: Mapping[str, str]) -> Path:
    """Return `$XDG_STATE_HOME/hvlaunch/jobs` (XDG Base Directory Specification 0.8).

    Raises NoJobDirectory if the user has no home.
    """
    state = environ.get("XDG_STATE_HOME", "")
    if not state.startswith("/"):
        # The specification says that a relative path is to be ignored.
        home = os.path.expanduser("~")  # noqa: PTH111 (Path.expanduser raises an error without a home)
        if not home.startswith("/"):
            raise NoJobDirectory("this user has no home directory", hint="XDG_STATE_HOME=DIRECTORY")
        state = f"{home}/.local/state"
    return Path(state) / "hvlaunch" / "jobs"


class JobDirectory:
    """The directory of a job of this process, which holds its lock until close() or until it ends in any way."""

    def __init__(self, root: Path, job_id: str, about: Mapping[str, Any]) -> None:
        """Make the directory with `about`, the facts of the job's start. Raises NoJobDirectory."""
        self.path = root / job_id
        self.about = about
        self.is_detached = False
        """True if the job has left its terminal: then its result is kept in any case."""
        self._is_kept = self._is_adopted = False
        making = root / f"{IN_MAKING}{job_id}"
        try:
            make_own_directory(str(root))
            check_root(root)
            making.mkdir(0o700)
            try:
                self._lock = os.open(making / LOCK, _FILE, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _write(making / ABOUT, about)
                # Other programs see only whole directories with a held lock.
                making.rename(self.path)
            except OSError:
                remove(making)
                raise
        except OSError as error:
            cause = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
            raise NoJobDirectory(str(cause).lower()) from None

    @classmethod
    def adopt(cls, path: Path) -> "JobDirectory":
        """Take over the directory of a job whose driver was killed. Raises NoJobDirectory, DriverLives."""
        directory = cls.__new__(cls)
        try:
            os.close(open_directory(path))
            directory.path, directory._lock = path, _locked(path)  # noqa: SLF001 (an instance of this class)
            (path / f"{ABOUT}{_PART}").unlink(missing_ok=True)
            directory.about = {**json.loads((path / ABOUT).read_bytes()), "pid": os.getpid()}
            (path / CONTROL).unlink(missing_ok=True)
            with suppress(OSError):
                # A full disk is no reason to let the job end.
                _write(
                    path / ABOUT,
                    directory.about,
                    is_synced=True,
                    # It replaces a file that is on the disk already.
                )
        except (OSError, ValueError, TypeError) as error:
            cause = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise NoJobDirectory(f"{path}: {cause.lower()}") from None
        directory.is_detached, directory._is_kept, directory._is_adopted = True, False, True  # noqa: SLF001 (as above)
        return directory

    def listen(self) -> socket.socket:
        """Return the control socket, which listens. Raises NoJobDirectory."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with reachable(self.path) as path:
                listener.bind(f"{path}/{CONTROL}")
            (self.path / CONTROL).chmod(0o600)
            listener.listen()
        except OSError as error:
            listener.close()
            raise NoJobDirectory(f"{self.path / CONTROL}: {(error.strerror or str(error)).lower()}") from None
        return listener

    def reserve(self) -> None:
        """Reserve space for the result and for a minder's lock, since the job may fill the disk. Raises OSError."""
        os.close(os.open(self.path / MINDER, _FILE & ~os.O_EXCL, 0o600))
        part = self.path / f"{RESULT}{_PART}"
        if not part.exists():
            # It exists after a takeover: the driver before has reserved it.
            with open(part, "xb", opener=_private) as file:
                file.write(b" " * _ROOM)

    def keep(self, result: Mapping[str, Any], report: Mapping[str, Any] | None = None) -> None:
        """Keep the directory after the job, with its result and failure report. Raises OSError."""
        if report is not None:
            with suppress(OSError):
                # The disk is full; only the result has reserved space.
                _write(self.path / REPORT, report)
        _write(self.path / RESULT, result)
        self._is_kept = True

    def close(self) -> None:
        """Stop to answer for the job, and remove a directory that is not kept."""
        with suppress(OSError):
            (self.path / CONTROL).unlink(missing_ok=True)
            if not self._is_kept and not self._is_adopted:
                remove(self.path)
        os.close(self._lock)


def has_driver(directory: Path) -> bool:
    """True if a driver holds the job's lock."""
    return _is_held(directory / LOCK)


def has_minder(directory: Path) -> bool:
    """True if the job has a minder, which starts another driver if this one is killed."""
    return _is_held(directory / MINDER)


def _is_held(lock: Path) -> bool:
    """True if a process holds this lock."""
    # The kernel does not tell who holds a lock: it is taken for a moment, as a shared one, so that two who look do not
    # disturb each other.
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def check_root(root: Path) -> None:
    """Check that no other user can change the directory of jobs, or replace its entries. Raises OSError, NoJobDirectory."""
    # The parent too: whoever can write to it can replace the directory.
    for path in (root, root.parent):
        if (writer := writer_of_directory(str(path))) is not None:
            raise NoJobDirectory(f"{path}: {writer}", hint=f"chmod go-w {path}, if it is yours")


def is_own_directory(path: Path) -> bool:
    """True for a directory without other writers; False for a link."""
    try:
        os.close(open_directory(path))
    except OSError:
        return False
    return True


def _locked(path: Path) -> int:
    """Take the lock of a directory; return its descriptor. Raises OSError, DriverLives."""
    try:
        return take_lock(path / LOCK)
    except BlockingIOError:
        if has_driver(path):
            raise DriverLives(f"{path}: the job's driver lives", hint="hvlaunch jobs") from None
        cause = f"{path / LOCK}: a process that looked whether the job has a driver was stopped in the middle"
        raise NoJobDirectory(cause, hint="kill -CONT that process") from None


def take_lock(path: Path, flags: int = 0) -> int:
    """Take a lock; return its descriptor. Raises BlockingIOError if another process holds it, OSError."""
    lock = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    deadline = time.monotonic() + _LOOKING
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(_LOOKING / 50)
                continue
            os.close(lock)
            raise
        return lock


@contextmanager
def reachable(directory: Path) -> Iterator[str]:
    """Yield a name of the directory that is short enough for a socket's address."""
    if len(os.fsencode(directory / CONTROL)) <= _LONGEST:
        yield str(directory)
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def remove(directory: Path) -> None:
    """Remove a job's directory, which has only files; no link is followed. Raises OSError."""
    descriptor = open_directory(directory)
    try:
        for name in os.listdir(descriptor):  # noqa: PTH208 (of a descriptor)
            # In the open directory, since another may have got its name meanwhile.
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)
    directory.rmdir()


def remove_secrets(directory: Path) -> None:
    """Remove what only a successor needs: afterwards no driver can take the job over. Raises OSError."""
    # Not overwritten first: file systems that copy on write, and SSDs, would keep the old blocks all the same.
    for name in (KEYS, STORE, f"{STORE}{_PART}"):
        (directory / name).unlink(missing_ok=True)


def _write(path: Path, value: Mapping[str, Any], *, is_synced: bool = False) -> None:
    """Write a file that readers see whole or not at all; with `is_synced`, also after a power loss. Raises OSError."""
    part = path.with_name(f"{path.name}{_PART}")
    data = json.dumps(value).encode() + b"\n"
    try:
        with open(part, "r+b" if part.exists() else "xb", opener=_private) as file:
            file.write(data)
            file.truncate()
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        part.rename(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
