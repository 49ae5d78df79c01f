"""Leases on a host's GPUs or slots: locks on files in a directory shared by the host's users.

A lease is a flock(2) on one file, and the agent keeps the descriptor: workers and errands do not inherit the descriptor, a lost
connection or another driver has no effect, and the kernel gives the lease back with the agent's end, in whatever way it ends.

Any file in the directory may be another user's making. So links are never followed, only regular files with a single name are
locked, files of other users are never written to, and no open() waits for a FIFO. Notes beside the locks are for display only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Set

__all__ = [
    "MOST_NAMES",
    "TAKEN",
    "TICKET",
    "AgentLeases",
    "NotShared",
    "hold",
    "is_locked",
    "note_name",
    "open_directory",
    "open_lock",
    "read_note",
    "write_note",
]

TICKET = "ticket."
"""Begin of the name of a waiting job's file, which its agent locks as long as the job waits."""
MOST_NAMES = 1024
TAKEN = "taken"
"""Why a lease can't be had: it is another job's."""
_SHARED = 0o1777
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_LONGEST_NOTE = 4096
_TRIES = 4
_PAUSE = 0.003
"""Seconds between two tries: another user's look at a lock holds it for microseconds."""


class NotShared(Exception):
    """The directory, or a lock in it, can't be used; the text says why."""


def open_directory(path: str) -> int:
    """Return a descriptor of the directory; make a missing directory. Raises NotShared."""
    try:
        os.mkdir(path, _SHARED)
        # The umask may have changed the mode, and another user's job refuses a directory of another mode.
        os.chmod(path, _SHARED)
    except FileExistsError:
        pass
    except OSError as error:
        raise NotShared("%s: %s" % (path, os.strerror(error.errno or 0))) from None
    for _ in range(_TRIES):
        try:
            return _opened_directory(path)
        except NotShared as error:
            fault = error
        # Another user may be between the two calls above.
        time.sleep(_PAUSE)
    raise fault


def _opened_directory(path: str) -> int:
    try:
        fd = os.open(path, _READ | os.O_DIRECTORY)
    except OSError as error:
        # open(2) says ENOTDIR for a link, with O_DIRECTORY.
        is_link = error.errno in (errno.ELOOP, errno.ENOTDIR)
        cause = "it is no directory" if is_link else os.strerror(error.errno or 0)
        raise NotShared("%s: %s" % (path, cause)) from None
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if mode & _SHARED != _SHARED:
        os.close(fd)
        raise NotShared("%s: its mode is %o and must be 1777" % (path, mode))
    return fd


def open_lock(folder: int, name: str, *, make: bool = True) -> int:
    """Return a descriptor of a lock's file; a missing file is made, or is an error. Raises NotShared, OSError."""
    fd = -1
    for _ in range(_TRIES):
        try:
            fd = os.open(name, _READ, dir_fd=folder)
            break
        except FileNotFoundError:
            if not make:
                raise
        except PermissionError:
            # The file of another user who is between the two calls below, with an unusual umask.
            time.sleep(_PAUSE)
            continue
        try:
            fd = os.open(name, _READ | os.O_CREAT | os.O_EXCL, 0o444, dir_fd=folder)
        except FileExistsError:
            continue  # another user was quicker
        # Readable for everybody, whatever the umask, and not writable: flock(2) needs no more.
        os.fchmod(fd, 0o444)
        break
    if fd < 0:
        raise NotShared("it can't be opened, or comes and goes")
    facts = os.fstat(fd)
    # A second name could be any file of this file system, or another GPU's lock.
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1:
        os.close(fd)
        raise NotShared("it is no plain file")
    return fd


def is_locked(fd: int) -> bool:
    """True if another process holds the lock. The look takes the lock for microseconds."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def read_note(folder: int, name: str, uid: int) -> str:
    """Return this user's note; empty if the file is not the user's own."""
    try:
        fd = os.open(name, _READ, dir_fd=folder)
    except OSError:
        return ""
    try:
        facts = os.fstat(fd)
        is_plain = stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1 and facts.st_uid == uid
        return os.read(fd, _LONGEST_NOTE).decode("ascii", "replace") if is_plain else ""
    except OSError:
        return ""
    finally:
        os.close(fd)


def note_name(name: str, uid: int) -> str:
    """Return the name of a user's note about a lock."""
    return "%s.%d" % (name, uid)


class AgentLeases:
    """The leases of this agent."""

    def __init__(self) -> None:
        self._fds: Dict[str, int] = {}
        self._folder = -1
        self._path = ""

    def hold(self, order: Dict[str, Any]) -> Dict[str, Any]:
        """Hold exactly the locks of the order, and return the held locks. If a new lock can't be had, no new lock is taken."""
        names: List[str] = order["names"]
        cause: Optional[str] = None
        taken: List[str] = []
        try:
            if self._path != order["directory"]:
                self._give_back(set(self._fds))
                self._folder = open_directory(order["directory"])
                self._path = order["directory"]
            self._give_back(set(self._fds) - set(names))
            for name in names:
                if name not in self._fds:
                    self._take(name, order["note"])
                    taken.append(name)
        except NotShared as error:
            cause = str(error)
        except OSError as error:
            cause = os.strerror(error.errno or 0)
        if cause is not None:
            self._give_back(set(taken))
        return {"names": sorted(self._fds), "cause": cause}

    def _take(self, name: str, note: str) -> None:
        """Raises NotShared, OSError."""
        is_ticket = name.startswith(TICKET)
        if is_ticket:
            # The kernel's time of its last change tells how long its job has waited: the file must be new.
            self._remove(name)
            write_note(self._folder, name, note)
        fd = open_lock(self._folder, name)
        try:
            _lock(fd)
            # The file may have been removed, by its owner or a cleaner, and made anew by another job.
            _check_name(self._folder, name, fd)
        except (NotShared, OSError):
            os.close(fd)
            raise
        self._fds[name] = fd
        if not is_ticket:
            try:
                write_note(self._folder, note_name(name, os.geteuid()), note)
            except (NotShared, OSError):
                pass  # others see the user, not the job

    def _give_back(self, names: Set[str]) -> None:
        for name in names:
            if name.startswith(TICKET):
                self._remove(name)
            os.close(self._fds.pop(name))

    def _remove(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self._folder)
        except OSError:
            pass  # gone, or another user's


_HELD = AgentLeases()


def hold(order: Dict[str, Any]) -> Dict[str, Any]:
    """Carry out the order with the leases of this process."""
    return _HELD.hold(order)


def _check_name(folder: int, name: str, fd: int) -> None:
    """Raises NotShared if the name belongs to another file by now, OSError for a missing name."""
    if not os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), os.fstat(fd)):
        raise NotShared("%s: it was replaced" % name)


def _lock(fd: int) -> None:
    """Raises NotShared if another process holds the lock."""
    for number in range(_TRIES):
        time.sleep(_PAUSE if number else 0)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        return
    raise NotShared(TAKEN)


def write_note(folder: int, name: str, text: str) -> None:
    """Write a file of this user. Raises NotShared, OSError."""
    fd = os.open(name, _WRITE | os.O_CREAT, 0o644, dir_fd=folder)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1 or facts.st_uid != os.geteuid():
            raise NotShared("%s: it is another user's, or no plain file" % name)
        # The umask may take this from others, who read who holds a lock.
        os.fchmod(fd, 0o644)
        # Written only now: before the check the name could have led to any file. Cut last: a reader finds no empty note.
        data = text.encode("ascii", "replace")[:_LONGEST_NOTE]
        os.write(fd, data)
        os.ftruncate(fd, len(data))
    finally:
        os.close(fd)
