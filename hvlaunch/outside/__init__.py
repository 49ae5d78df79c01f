"""Jobs as other programs of the same user see them: their directories, while they run and afterwards, and their minders.

A directory has a socket of the driver, too (control.py). The same holds for warm pools (pools.py). The minder of a detached job is a
process that starts another driver if a driver was killed, and ends with the job.
"""

import fcntl
import json
import os
import re
import shlex
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvlaunch.errors import EXIT_HOSTS, EXIT_USAGE, BadUsage, HvlaunchError
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.owners import make_own_directory, open_directory, writer_of_directory

if TYPE_CHECKING:
    import subprocess

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
    "SUCCESSOR_LOG",
    "DriverLives",
    "JobDirectory",
    "KnownJob",
    "NoJobDirectory",
    "await_driver",
    "await_end",
    "check_root",
    "choose",
    "has_driver",
    "has_ended",
    "has_minder",
    "is_locked",
    "is_own_directory",
    "jobs_directory",
    "known_job",
    "known_jobs",
    "prune",
    "reachable",
    "remove",
    "remove_secrets",
    "result_of",
    "start_minder",
    "start_process",
    "start_successor",
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
"""Seconds after which a held lock belongs to a driver. Other programs take it for a moment to look: is_locked()."""
_PART = ".part"
_ROOM = 4096
_LONGEST = 100
"""Bytes of a socket's path: below the limits of Linux (107) and macOS (103)."""


class NoJobDirectory(HvlaunchError):
    """`~/.local/state` can't be used: missing, read-only, or others can write. A job runs without a directory, but other programs do not see
    the job.

    Try: set `XDG_STATE_HOME`.
    """

    exit_code = EXIT_USAGE


class DriverLives(HvlaunchError):
    """A driver holds the lock of the job: the first driver lives, or another `hvlaunch attach` has taken the job over.

    Try: `hvlaunch attach JOB` again, to watch the job.
    """

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

    def __init__(self, root: Path, job_id: str, about: dict[str, Any]) -> None:
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

    def update(self) -> None:
        """Write `about` anew. On a full disk other programs see the former facts."""
        with suppress(OSError):
            _write(self.path / ABOUT, self.about)

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a file that readers see whole or not at all. Raises OSError."""
        _write(self.path / name, value)

    def close(self) -> None:
        """Stop to answer for the job, and remove a directory that is not kept."""
        with suppress(OSError):
            (self.path / CONTROL).unlink(missing_ok=True)
            if not self._is_kept and not self._is_adopted:
                remove(self.path)
        os.close(self._lock)


def has_driver(directory: Path) -> bool:
    """True if a driver holds the job's lock."""
    return is_locked(directory / LOCK)


def has_minder(directory: Path) -> bool:
    """True if the job has a minder, which starts another driver if this one is killed."""
    return is_locked(directory / MINDER)


def is_locked(lock: Path) -> bool:
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
            raise NoJobDirectory(
                f"{path}: {writer}", hint=f"chmod go-w {shlex.quote(str(path))}, if it is yours"
            )


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
        cause = f"{path / LOCK}: a process that was checking whether the job has a driver is stopped"
        raise NoJobDirectory(cause, hint="kill -CONT that process") from None


def take_lock(path: Path, flags: int = 0, patience: float = _LOOKING) -> int:
    """Take a lock; return its descriptor. Raises BlockingIOError if another process holds it for `patience` seconds, OSError."""
    lock = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    deadline = time.monotonic() + patience
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


_KEPT = 20
_DAY = 86400.0
_KEPT_FOR = {True: _DAY, False: 7 * _DAY}
"""Seconds for which a directory is kept, by whether the job ended well."""
_CONTENT = "*.pack"
"""Names of the files with the content of a job's tree (hvlaunch/sync/snapshot.py)."""
_MOST_CONTENT = 4 << 30
"""Bytes of content for `hvlaunch rerun`, of the jobs together."""
_INCOMPLETE = re.escape(IN_MAKING) + "[0-9a-f]{12}"
"""Names of incomplete directories of jobs."""
_MAKING_TIME = 60.0
"""Seconds after which an incomplete directory is abandoned."""
_LEASE = 3600.0
"""Seconds, for jobs whose lease is unknown."""
_MARGIN = 60.0
"""Seconds beyond the lease, in which agents end their workers."""
_MINDING = 10.0
"""Seconds within which a minder starts another driver."""
_LOOK = 0.05
_SHORTEST = 4
"""Letters that an abbreviated id needs."""


class KnownJob(NamedTuple):
    """A job by its directory: `about` has the facts of the start, `result` the end, if the job has ended."""

    id: str
    directory: Path
    about: Mapping[str, Any]
    result: Mapping[str, Any] | None
    has_driver: bool
    """True if the driver lives. A job without a driver and a result has lost its driver."""

    @property
    def label(self) -> str:
        """The job in words: `job 4a5fac6ebd8e (base)`."""
        name = self.about.get("name")
        return f"job {self.id} ({name})" if name else f"job {self.id}"

    @property
    def is_elastic(self) -> bool:
        return bool(self.about.get("is_elastic"))

    @property
    def never_ran(self) -> bool:
        """True if the job ended before a worker of it was started."""
        return self.result is not None and self.result.get("has_run") is False

    @property
    def began(self) -> float:
        """Seconds since the epoch."""
        began = self.about.get("began")
        return float(began) if isinstance(began, int | float) else 0.0

    @property
    def ended_well(self) -> bool:
        return self.result is not None and self.result.get("exit_code") == 0

    @property
    def ended(self) -> float:
        """Seconds since the epoch, of a job that has ended: the last change of its directory."""
        with suppress(OSError):
            return self.directory.lstat().st_mtime
        return 0.0


def known_jobs(root: Path) -> list[KnownJob]:
    """Return all jobs, the newest last. Links, and directories of other users, are ignored.

    Raises NoJobDirectory if another user could put directories there.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        check_root(root)
        names = [name for name in os.listdir(root) if not name.startswith(IN_MAKING)]  # noqa: PTH208 (names alone)
        jobs = [job for name in names if (job := known_job(root / name)) is not None]
        return sorted(jobs, key=lambda job: job.began)
    return []


def choose(jobs: Sequence[KnownJob], name: str | None) -> KnownJob:
    """Return the job with this id (four letters suffice) or name; without a name, the only job that runs or lost its driver.

    Raises BadUsage.
    """
    running = [job for job in jobs if job.has_driver]
    # A successor may take such a job over.
    running = running or [job for job in jobs if job.result is None]
    if name is None:
        if len(running) == 1:
            return running[0]
        if not running:
            raise BadUsage("no job runs here", hint="hvlaunch jobs")
        raise BadUsage(f"{len(running)} jobs run here: {_ids(running)}", hint="name one of them")
    matches = [job for job in jobs if name in (job.id, job.about.get("queue"))]
    # Running jobs come first among those with the same name.
    matches = matches or [job for job in running if name == job.about.get("name")]
    matches = matches or [job for job in jobs if name == job.about.get("name")]
    if not matches and len(name) >= _SHORTEST:
        matches = [job for job in jobs if job.id.startswith(name)]
    if not matches:
        raise BadUsage(f"there is no job {name}", hint="hvlaunch jobs")
    if len(matches) > 1:
        raise BadUsage(f"{len(matches)} jobs are called {name}: {_ids(matches)}", hint="the id of one")
    return matches[0]


def await_end(job: KnownJob) -> Mapping[str, Any] | None:
    """Wait until the job has no driver; return the kept result, or None, as after a good end."""
    # Not by a lock that blocks: a process that is stopped just as it gets the lock would keep successors from it.
    while await_driver(job):
        time.sleep(_LOOK)
    return result_of(job)


def await_driver(job: KnownJob) -> bool:
    """True if the job has a driver, or gets a successor within some seconds: a minder starts one."""
    deadline = time.monotonic() + _MINDING
    while not has_driver(job.directory):
        if result_of(job) is not None or not has_minder(job.directory) or time.monotonic() >= deadline:
            return has_driver(job.directory)
        time.sleep(_LOOK)
    return True


def result_of(job: KnownJob) -> Mapping[str, Any] | None:
    """Return the job's kept result, or None."""
    return _read(job.directory / RESULT)


def has_ended(job: KnownJob) -> bool:
    """True if the job has a result, or if its directory is gone, as after a good end."""
    return (job.directory / RESULT).exists() or not (job.directory / ABOUT).exists()


def prune(root: Path, now: float | None = None) -> None:
    """Remove the directories of ended jobs, except the newest 20 failed ones of a week and the newest 20 good ones of a day.

    Jobs without a driver lose their secrets as soon as no successor can take them over.
    """
    now = time.time() if now is None else now
    try:
        jobs = known_jobs(root)
        # The root is checked: through a planted link these could be hidden directories of any kind, such as .git.
        for name in os.listdir(root):  # noqa: PTH208 (names alone)
            if re.fullmatch(_INCOMPLETE, name) and (root / name).lstat().st_mtime < now - _MAKING_TIME:
                _try_to_remove(root / name)
    except (OSError, NoJobDirectory):
        return
    # The queue has still to learn how such a job has ended.
    over = [
        job for job in jobs if not job.has_driver and not (root.with_name("queue") / "open" / job.id).exists()
    ]
    for job in over:
        if (job.directory / KEYS).exists() and (job.result is not None or _is_dead(job, now)):
            _try_to_remove_secrets(job)
    _drop_content(job for job in over if job.result is not None)
    for ended_well, kept_for in _KEPT_FOR.items():
        ended = sorted((job for job in over if job.ended_well == ended_well), key=lambda job: job.ended)
        old = [job for job in ended[-_KEPT:] if job.ended < now - kept_for]
        for job in (*ended[:-_KEPT], *old):
            _try_to_remove(job.directory)


def _drop_content(jobs: Iterable[KnownJob]) -> None:
    """Remove the content of jobs' trees beyond 4 GB, from the oldest jobs first."""
    room, counted = _MOST_CONTENT, set[int]()
    for job in sorted(jobs, key=lambda job: job.began, reverse=True):
        packs = {path: path.lstat() for path in job.directory.glob(_CONTENT)}
        # Jobs of the same tree share most of it: the files are links.
        room -= sum(status.st_size for status in packs.values() if status.st_ino not in counted)
        counted |= {status.st_ino for status in packs.values()}
        for path in packs if room < 0 else ():
            path.unlink(missing_ok=True)


def _try_to_remove(directory: Path) -> None:
    with suppress(OSError):
        # Another driver may prune at the same time.
        remove(directory)


def _is_dead(job: KnownJob, now: float) -> bool:
    """True if the job has been without a driver for longer than its agents wait."""
    lease = job.about.get("lease")
    patience = (lease if isinstance(lease, int | float) else _LEASE) + _MARGIN
    try:
        # A driver renews the time while it lives.
        renewed = (job.directory / KEYS).lstat().st_mtime
    except OSError:
        return False
    # Locks of another machine's processes can't be seen from here, if a home directory is shared.
    is_here = job.about.get("machine") == os.uname().nodename
    return is_here and now > renewed + patience and not has_minder(job.directory)


def _try_to_remove_secrets(job: KnownJob) -> None:
    with suppress(OSError):
        # Under the lock: a successor that has just begun keeps its keys.
        lock = take_lock(job.directory / LOCK)
        try:
            remove_secrets(job.directory)
        finally:
            os.close(lock)


def known_job(directory: Path) -> KnownJob | None:
    """Return the job of this directory, or None, also if the directory is a link or another user can write to it."""
    if not is_own_directory(directory):
        return None
    about = _read(directory / ABOUT)
    if about is None:
        return None
    if not isinstance(name := about.get("name") or "", str) or not name.isprintable():
        # Another version's, or damaged: it must not move a terminal's cursor, or look like another row of a table.
        about = {**about, "name": ascii(name)[1:-1]}
    # Asked before the result is read: a driver writes the result before it releases the lock.
    runs = has_driver(directory)
    return KnownJob(directory.name, directory, about, _read(directory / RESULT), runs)


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _ids(jobs: Iterable[KnownJob]) -> str:
    return ", ".join(job.id for job in jobs)


SUCCESSOR_LOG = "successor.log"
"""The file with the error of the last successor that could not take the job over."""

_MOST_STARTS, _WITHIN = 3, 600.0
_MINDER_LOOK = 0.1


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
        start_process("hvlaunch.outside", "run_minder", directory, kept=[lock])
    finally:
        os.close(lock)


def start_successor(directory: Path) -> "subprocess.Popen[bytes]":
    """Start a driver that takes the job over, in a session of its own; its stderr goes to SUCCESSOR_LOG. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    log = os.open(directory / SUCCESSOR_LOG, flags, 0o600)
    try:
        return start_process("hvlaunch.gloo.controller", "run_successor", directory, log)
    finally:
        os.close(log)


def start_process(
    module: str,
    function: str,
    path: Path,
    log: int | None = None,
    kept: Sequence[int] = (),
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Run a function of a module in a process with a session of its own, which outlives this one. Raises OSError.

    `path` is its first argument.
    """
    import subprocess  # noqa: PLC0415 (a minder that starts nobody shall be small)

    # Not `python -m`: it would import from the working directory first, which may hold any files.
    program = f"import sys; sys.path[:] = {sys.path!r}; from {module} import {function}; {function}()"
    log = subprocess.DEVNULL if log is None else log
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
            time.sleep(_MINDER_LOOK)
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
            time.sleep(_MINDER_LOOK)


def run_minder() -> None:
    """Run the minder's program."""
    _mind(Path(sys.argv[1]))
