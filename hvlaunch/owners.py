"""Ownership of files and sockets: other users who can read or change what decides what runs, or what holds a secret."""

import errno
import os
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = [
    "make_own_directory",
    "open_directory",
    "open_not_planted",
    "other_reader",
    "other_writer",
    "part_of",
    "path_hint",
    "peer_is_own",
    "reason",
    "write_whole",
    "writer_of_directory",
]

_READ_BY_OTHERS = 0o077
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_UCRED = struct.Struct("iII")
"""Linux' struct ucred: pid, uid, gid (unix(7))."""
_XUCRED_SIZE = 76
_XUCRED = struct.Struct("II")
"""The beginning of macOS' struct xucred: version, uid (sys/ucred.h)."""
_SOL_LOCAL = 0
_LOCAL_PEERCRED = 1


def other_reader(status: os.stat_result) -> str | None:
    """Return why other users can use a private key with this status, in words, or None.

    The rule is OpenSSH's (sshkey_perm_ok in authfile.c): a file of another user is that user's concern, and
    root reads all.
    """
    if status.st_uid == os.getuid() and status.st_mode & _READ_BY_OTHERS:
        return f"other users can read or change it (mode {stat.S_IMODE(status.st_mode):03o})"
    return None


def other_writer(status: os.stat_result) -> str | None:
    """Return who else can change a file with this status, in words; None if only this user and root can.

    A group with only this user in it, as many systems create for each user, counts as this user.
    """
    if stat.S_ISCHR(status.st_mode):  # /dev/null, a terminal
        return None
    if status.st_uid not in (os.getuid(), 0):
        return f"it belongs to {_user(status.st_uid)}"
    mode = f"(mode {stat.S_IMODE(status.st_mode):03o})"
    if status.st_mode & stat.S_IWOTH:
        return f"every user of this machine can change it {mode}"
    # Debian and others give each user a private group with umask 002: that group is no other user.
    if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid):
        return f"group {_group(status.st_gid)} can change it {mode}"
    return None


def writer_of_directory(path: str) -> str | None:
    """Return who else can remove or replace this user's files in a directory, in words, or None.

    In a sticky directory such as /tmp everybody may create files, but remove only their own. A link's owner can lead it to
    another directory.
    """
    link, status = os.lstat(path), Path(path).stat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (os.getuid(), 0):
        return f"it belongs to {_user(link.st_uid)}"
    if status.st_mode & stat.S_ISVTX and status.st_uid in (os.getuid(), 0):
        return None
    return other_writer(status)


def make_own_directory(path: str) -> None:
    """Create a private directory and its missing parents, all with mode 700; existing directories stay unchanged.

    Raises OSError, also if the directory belongs to another user, or if every user can replace it or create files in it:
    its content may then be another user's. A link is followed only if it belongs to this user or root.
    """
    missing: list[str] = []
    existing = Path(path)
    while not os.path.lexists(existing) and existing.name:
        missing.append(existing.name)
        existing = existing.parent
    _check_not_planted(existing)
    descriptor = os.open(existing, _DIRECTORY)
    try:
        for name in reversed(missing):
            existing /= name
            descriptor = _make_below(name, descriptor, str(existing))
    finally:
        os.close(descriptor)
    status = Path(path).stat()
    if status.st_uid not in (os.getuid(), 0):
        raise PermissionError(errno.EPERM, f"it belongs to {_user(status.st_uid)}", path)
    # A sticky directory such as /tmp may contain a directory of this user's, but can't be one.
    if status.st_mode & stat.S_IWOTH:
        raise _open_to_all(status, path)
    if not missing:
        _check_not_planted(Path(path).parent)


def _check_not_planted(path: Path) -> None:
    """Raises OSError if every user can replace this user's files in the directory, or for another user's link."""
    link, status = path.lstat(), path.stat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (os.getuid(), 0):
        raise PermissionError(errno.EPERM, f"it belongs to {_user(link.st_uid)}", str(path))
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise _open_to_all(status, str(path))


def _open_to_all(status: os.stat_result, path: str) -> PermissionError:
    mode = stat.S_IMODE(status.st_mode)
    return PermissionError(
        errno.EPERM, f"every user of this machine can make files in it (mode {mode:03o})", path
    )


def _make_below(name: str, parent: int, path: str) -> int:
    """Create a private directory in the open directory `parent`, which is closed; return it open. Raises OSError."""
    # mkdir(parents=True) would give parents the umask's mode, by which a group may replace what is in them.
    try:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
        below = _open_directory(name, path, parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    os.close(parent)
    return below


def open_directory(path: Path) -> int:
    """Open a directory of this user's, without other writers and not by a link. Raises OSError."""
    return _open_directory(str(path), str(path))


def _open_directory(name: str, path: str, parent: int | None = None) -> int:
    """Open `name` below `parent`; `path` is for errors. Raises OSError."""
    try:
        descriptor = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    # The open directory is checked, not its name, which could be given to another in between.
    if (writer := other_writer(os.fstat(descriptor))) is not None:
        os.close(descriptor)
        raise PermissionError(errno.EPERM, writer, path)
    return descriptor


def path_hint(path: str | Path) -> str:
    """Return what to try for a path without a file."""
    return (
        "check the path"
        if Path(path).is_absolute()
        else f"its full path; a relative one starts at {Path.cwd()}"
    )


def peer_is_own(connection: socket.socket) -> bool:
    """True for a program of this user at the other end of a Unix socket, or of root, the master of everything."""
    try:
        if hasattr(socket, "SO_PEERCRED"):
            _, uid, _ = _UCRED.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            )
        else:
            xucred = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED_SIZE)
            _, uid = _XUCRED.unpack_from(xucred)
    except (OSError, struct.error):
        return False
    return uid in (os.getuid(), 0)


def open_not_planted(path: str, flags: int, mode: int) -> int:
    """Open a file for writing. A link is followed only if it belongs to this user or root, such as /dev/stdout.

    A link that another user planted in a shared directory is refused. Raises OSError, also if the file belongs
    to another user.
    """
    flags |= os.O_CLOEXEC
    of_others: tuple[Callable[[int], bool], ...] = (stat.S_ISREG, stat.S_ISFIFO)
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW, mode)
    except OSError as error:
        if error.errno != errno.ELOOP or os.lstat(path).st_uid not in (os.getuid(), 0):
            raise
        if writer_of_directory(str(Path(path).parent)) is not None:
            raise
        descriptor = os.open(path, flags, mode)
        # /dev/stdout may be a pipe of the user that ran sudo, so pipes of others are allowed here.
        of_others = (stat.S_ISREG,)
    status = os.fstat(descriptor)
    if any(is_kind(status.st_mode) for is_kind in of_others) and status.st_uid not in (os.getuid(), 0):
        os.close(descriptor)
        raise PermissionError(errno.EPERM, f"it belongs to {_user(status.st_uid)}", path)
    return descriptor


def part_of(path: Path) -> tuple[Path, int]:
    """Create a temporary file beside `path`, to be renamed to it; return it with its descriptor. Raises OSError."""
    part = path.with_name(f".hvlaunch-{os.urandom(4).hex()}.part")
    return part, open_not_planted(str(part), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def write_whole(path: Path, data: bytes, mode: int) -> None:
    """Write a file by renaming a temporary one: readers see the old or the new content. Raises OSError.

    The file gets `mode` regardless of the umask.
    """
    part, descriptor = part_of(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            # On the descriptor, before the data: no other user can read the file in between.
            os.fchmod(descriptor, mode)
            file.write(data)
        # Renaming is atomic: a crash leaves the old file, not half of the new one.
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _is_own_group(group: int) -> bool:
    """Return True if this user is the group's only member."""
    import grp  # noqa: PLC0415 (only where a group may write)
    import pwd  # noqa: PLC0415

    with suppress(KeyError):
        me, entry = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
        return entry.gr_gid == me.pw_gid and entry.gr_name == me.pw_name and set(entry.gr_mem) <= {me.pw_name}
    return False


def _user(number: int) -> str:
    import pwd  # noqa: PLC0415 (only for a message)

    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


def _group(number: int) -> str:
    import grp  # noqa: PLC0415 (only for a message)

    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def reason(error: OSError) -> str:
    """Return the operating system's reason, for the middle of a sentence."""
    return (error.strerror or os.strerror(error.errno or 0)).lower()
