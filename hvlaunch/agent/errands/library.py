"""Keeps hvlaunch's modules for workers on this host: a zip file, named by its SHA-256, for the end of PYTHONPATH."""

from __future__ import annotations

import hashlib
import os
import stat
import time

from hvlaunch.agent.cache import own_directory
from hvlaunch.agent.wire.frames import record, text, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict

    from hvlaunch.agent.errands import ErrandStream

__all__ = ["ARGUMENTS", "RESULT", "run"]

ARGUMENTS = record({"hash": text(64), "size": whole(1, 1 << 24)})
RESULT = record({"path": text(4096, raw=True)})

_KEPT = 365 * 86400.0  # seconds for which a file stays without being used; workers may import from it late


def run(arguments: Dict[str, Any], stream: ErrandStream) -> Dict[str, Any]:
    """Return the path of the file. Its content comes over the stream, if it is not here."""
    name = arguments["hash"]
    if not name.isalnum():
        raise ValueError("no hash")
    directory = own_directory("library")
    path = os.path.join(directory, name + ".zip")
    if not _is_whole(path, name):
        stream.write(b"send\n")
        data = stream.read_exactly(arguments["size"])
        if hashlib.sha256(data).hexdigest() != name:
            raise ValueError("it was damaged on its way")
        # A name of its own: two jobs may write at the same time, and each renames a whole file.
        new = "%s.%d" % (path, os.getpid())
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(data)
        os.rename(new, path)
    os.utime(path)
    for other in os.scandir(directory):
        if other.stat(follow_symlinks=False).st_mtime < time.time() - _KEPT:
            os.unlink(other.path)
    return {"path": path}


def _is_whole(path: str, name: str) -> bool:
    """True for a regular file of this user with this hash, which nobody else can change."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            is_own = status.st_uid == os.geteuid() and not status.st_mode & 0o022
            if not stat.S_ISREG(status.st_mode) or not is_own or status.st_size > 1 << 24:
                return False
            return hashlib.sha256(file.read()).hexdigest() == name
    except OSError:
        return False
