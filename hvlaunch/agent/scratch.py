"""The job's private directory on a host: the workers' error files, the agent's socket, and the function to call."""

from __future__ import annotations

import os
import sys

from hvlaunch.agent.quick import socket

__all__ = ["CALL", "SOCKET", "keep_call", "listen", "make", "remove"]

SOCKET = "agent"
CALL = "call"
"""The file with the function that the workers call."""

_PREFIX = "hvlaunch-"
_LONGEST = 4096
_SHORT = 100
"""Length of a directory in which a socket's path still fits the kernel's limit of 108 bytes."""


def make() -> str:
    """Make a private directory and return its path; in a container, return the directory of the guardian outside."""
    # Removed from the environment: a worker may run hvlaunch itself. Without a path it marks the processes of a job.
    path = os.environ.get("HVL_CONTAINER", "")
    # The directory is removed in the end, so another one must not be named by mistake.
    if path.startswith("/") and os.path.basename(path).startswith(_PREFIX):
        del os.environ["HVL_CONTAINER"]
        return path
    refusals = []
    for base in (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", "/dev/shm"):  # noqa: S108
        path = os.path.abspath(os.path.join(base or ".", _PREFIX + os.urandom(8).hex()))
        try:
            if base and path.isprintable() and len(path) <= _LONGEST:
                # mkdir fails for an existing path, even a link: another user can't have prepared the directory.
                os.mkdir(path, 0o700)
                return path
        except OSError as error:
            refusals.append("%s: %s" % (base, os.strerror(error.errno or 0).lower()))
    sys.exit("hvlaunch agent: no place for temporary files (%s)" % ", ".join(refusals))


def listen(directory: str) -> socket.socket:
    """Return a socket to which carriers (agent/wire/carrier.py) connect. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = os.open(directory, os.O_RDONLY)
    try:
        # A long path goes by the descriptor's link in /proc, which is short.
        is_short = len(os.fsencode(directory)) <= _SHORT
        listener.bind(os.path.join(directory if is_short else "/proc/self/fd/%d" % fd, SOCKET))
    finally:
        os.close(fd)
    listener.listen(8)
    listener.setblocking(False)
    return listener


def keep_call(directory: str, part: bytes) -> None:
    """Append the next part of the function's file. Raises OSError."""
    with open(os.path.join(directory, CALL), "ab") as file:
        file.write(part)


def remove(path: str) -> None:
    """Remove the directory with its files, and the workers' commits in memory, as far as possible."""
    for name in (SOCKET, CALL):
        try:
            os.unlink(os.path.join(path, name))
        except OSError:  # noqa: PERF203 (there are two)
            pass  # no such file
    # The commits' directory: see agent/commits/__init__.py.
    for directory in (path, "/dev/shm/%s.kept" % os.path.basename(path)):  # noqa: S108 (private)
        try:
            os.rmdir(directory)
        except FileNotFoundError:  # noqa: PERF203 (there are two)
            pass
        except OSError:
            import shutil  # noqa: PLC0415 (takes 8 ms; few workers leave a file)

            shutil.rmtree(directory, ignore_errors=True)
