"""The program between the driver's new connection and a waiting agent: copies bytes.

A carrier knows no secret: driver and agent authenticate each other through it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn, Optional

__all__ = ["EXIT_NO_AGENT", "main"]

EXIT_NO_AGENT = 3
_CHUNK = 1 << 15
_END_PATIENCE = 10.0
_POLL = 0.005


def main(directory: str) -> NoReturn:
    """Copy between stdin, stdout and the agent with this scratch directory, until either end closes."""
    # A socket of packets keeps the agent's pieces whole, so each can be a single write to stdout.
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        os.chdir(directory)  # a socket's path has at most 107 bytes
        link.connect("agent")
        peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    except OSError as error:
        sys.stderr.write("hvlaunch carrier: no agent: %s\n" % os.strerror(error.errno or 0))
        os._exit(EXIT_NO_AGENT)
    if int.from_bytes(peer[4:8], sys.byteorder) != os.geteuid():
        sys.stderr.write("hvlaunch carrier: no agent: another user's program listens in its place\n")
        os._exit(EXIT_NO_AGENT)
    signal.setitimer(signal.ITIMER_REAL, 0)  # the command line set it
    guardian = _parent_of(int.from_bytes(peer[:4], sys.byteorder))
    threading.Thread(target=_send, args=(link,), daemon=True).start()
    while True:
        try:
            data = link.recv(_CHUNK)
        except OSError:
            data = b""
        if not data:
            break
        _write(data)
    _wait_for_end(directory, guardian)
    os._exit(0)


def _send(link: socket.socket) -> NoReturn:
    try:
        while True:
            data = os.read(0, _CHUNK)
            if not data:
                break
            link.sendall(data)
    except OSError:
        pass
    os._exit(0)


def _write(data: bytes) -> None:
    """Write to stdout, a piece in a single write."""
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        os._exit(0)


def _wait_for_end(directory: str, guardian: Optional[int]) -> None:
    """Wait until the guardian has killed leftover processes: on the first connection, too, the channel ends only then."""
    deadline = time.monotonic() + _END_PATIENCE
    # The guardian is no child of this process, so it can only be polled.
    while guardian is not None and os.path.exists(directory) and time.monotonic() < deadline:
        try:
            os.kill(guardian, 0)
        except OSError:
            return
        time.sleep(_POLL)


def _parent_of(pid: int) -> Optional[int]:
    """Return the parent's pid; None if /proc can't show it."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as stat:
            # The name in parentheses may have spaces and parentheses itself, so the fields count from the last one.
            return int(stat.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError):
        return None
