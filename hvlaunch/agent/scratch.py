"""The job's private directory on a host: the workers' error files, the agent's socket, and the function that they call."""

from __future__ import annotations

import os
import sys

from hvlaunch.agent.quick import socket

__all__ = ["CALL", "SOCKET", "keep_call", "listen", "make", "remove"]

SOCKET = "agent"
CALL = "call"
"""The program of a job that calls a function."""

_LONGEST = 4096
_SHORT = 100
"""Bytes of a directory in which a socket's name is short enough for the kernel (108)."""


def make() -> str:
    """A private directory, removed at the end."""
    refusals = []
    for base in (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", "/dev/shm"):  # noqa: S108
        path = os.path.abspath(os.path.join(base or ".", "hvlaunch-" + os.urandom(8).hex()))
        try:
            if base and path.isprintable() and len(path) <= _LONGEST:
                os.mkdir(path, 0o700)
                return path
        except OSError as error:
            refusals.append("%s: %s" % (base, os.strerror(error.errno or 0).lower()))
    sys.exit("hvlaunch agent: no place for temporary files (%s)" % ", ".join(refusals))


def listen(directory: str) -> socket.socket:
    """Let carriers come (agent/carrier.py). Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = os.open(directory, os.O_RDONLY)
    try:
        is_short = len(os.fsencode(directory)) <= _SHORT
        listener.bind(os.path.join(directory if is_short else "/proc/self/fd/%d" % fd, SOCKET))
    finally:
        os.close(fd)
    listener.listen(8)
    listener.setblocking(False)
    return listener


def keep_call(directory: str, part: bytes) -> None:
    """The next part of that program. Raises OSError."""
    with open(os.path.join(directory, CALL), "ab") as file:
        file.write(part)


def remove(path: str) -> None:
    """Remove the directory and what is in it, as far as it goes, if it is there."""
    for name in (SOCKET, CALL):
        try:
            os.unlink(os.path.join(path, name))
        except OSError:  # noqa: PERF203 (there are two)
            pass  # there was none
    try:
        os.rmdir(path)
    except FileNotFoundError:
        pass
    except OSError:
        import shutil  # noqa: PLC0415 (costs 8 ms, and is needed only where a worker left a file)

        shutil.rmtree(path, ignore_errors=True)
