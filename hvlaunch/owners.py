"""Who else can read or change a file: asked of files that decide what runs, or that hold a secret."""

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = [
    "make_own_directory",
    "open_not_planted",
    "other_reader",
    "other_writer",
    "part_of",
    "reason",
    "write_whole",
    "writer_of_directory",
]

_READ_BY_OTHERS = 0o077


def other_reader(status: os.stat_result) -> str | None:
    """Who else can use a private key with this status, in words; None where nobody can.

    The rule is OpenSSH's (sshkey_perm_ok in authfile.c): a file of another user is that user's business, and
    so is what root reads.
    """
    if status.st_uid == os.getuid() and status.st_mode & _READ_BY_OTHERS:
        return f"other users can read or change it (mode {stat.S_IMODE(status.st_mode):03o})"
    return None


def other_writer(status: os.stat_result) -> str | None:
    """Who else can change a file with this status, in words; None where only this user and root can.

    A group that is this user's alone, as many systems make one for each user, is this user.
    """
    if stat.S_ISCHR(status.st_mode):  # /dev/null, a terminal
        return None
    if status.st_uid not in (os.getuid(), 0):
        return f"it belongs to {_user(status.st_uid)}"
    mode = f"(mode {stat.S_IMODE(status.st_mode):03o})"
    if status.st_mode & stat.S_IWOTH:
        return f"every user of this machine can change it {mode}"
    if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid):
        return f"group {_group(status.st_gid)} can change it {mode}"
    return None


def writer_of_directory(path: str) -> str | None:
    """Who else can remove or replace what this user has in a directory, in words; None where nobody can.

    Where the directory is sticky, as /tmp is, everybody may make files, and only remove their own.
    """
    status = Path(path).stat()
    if status.st_mode & stat.S_ISVTX and status.st_uid in (os.getuid(), 0):
        return None
    return other_writer(status)


def make_own_directory(path: str) -> None:
    """Make a directory, and those above it, for this user alone; one that is there stays as it is.

    Raises OSError, also where the directory is another user's, or every user can make files in it: then what is
    in it may be theirs. A link is followed only if it is this user's or root's.
    """
    Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    link, status = os.lstat(path), Path(path).stat()
    for owner in (link.st_uid, status.st_uid):
        if owner not in (os.getuid(), 0):
            raise PermissionError(errno.EPERM, f"it belongs to {_user(owner)}", path)
    if status.st_mode & stat.S_IWOTH:
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(
            errno.EPERM, f"every user of this machine can make files in it (mode {mode:03o})", path
        )


def open_not_planted(path: str, flags: int, mode: int) -> int:
    """Open a file to write; a link there is followed only if it is this user's or root's, as that of /dev/stdout is.

    So a link that another user has put into a directory that everybody may write to leads nowhere.
    Raises OSError, also where the file that is there belongs to another user.
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
        of_others = (stat.S_ISREG,)  # /dev/stdout may be a pipe of who ran sudo
    status = os.fstat(descriptor)
    if any(is_kind(status.st_mode) for is_kind in of_others) and status.st_uid not in (os.getuid(), 0):
        os.close(descriptor)
        raise PermissionError(errno.EPERM, f"it belongs to {_user(status.st_uid)}", path)
    return descriptor


def part_of(path: Path) -> tuple[Path, int]:
    """A new file of this user's beside `path`, that may take its name, and a descriptor to write it. Raises OSError."""
    part = path.with_name(f".hvlaunch-{os.urandom(4).hex()}.part")
    return part, open_not_planted(str(part), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def write_whole(path: Path, data: bytes, mode: int) -> None:
    """Write a file, by a new one that takes its name: it is there as a whole, or as it was before. Raises OSError.

    `mode` is the file's, whatever the umask.
    """
    part, descriptor = part_of(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _is_own_group(group: int) -> bool:
    """Whether this user is the only one in it."""
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
    """Why the operating system did not do it, in words for the middle of a sentence."""
    return (error.strerror or os.strerror(error.errno or 0)).lower()
