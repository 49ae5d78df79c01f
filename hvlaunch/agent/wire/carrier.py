"""The program that joins the driver's new connection to an agent that waits for it: bytes to and fro, and nothing else.

It knows no secret: driver and agent prove each other through it what they are.
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
_LOOK = 0.005


def main(directory: str) -> NoReturn:
    """Carry between stdin and stdout and the agent whose scratch directory this is, until one of the two ends."""
    link = socket.socket(
        socket.AF_UNIX, socket.SOCK_SEQPACKET
    )  # so that what the agent sends keeps its pieces
    try:
        os.chdir(directory)  # the name of a socket has to be short
        link.connect("agent")
        peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    except OSError as error:
        sys.stderr.write("hvlaunch carrier: no agent: %s\n" % os.strerror(error.errno or 0))
        os._exit(EXIT_NO_AGENT)
    if int.from_bytes(peer[4:8], sys.byteorder) != os.geteuid():
        sys.stderr.write("hvlaunch carrier: no agent: another user's program is there\n")
        os._exit(EXIT_NO_AGENT)
    signal.setitimer(signal.ITIMER_REAL, 0)  # that of the command line
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
    """To stdout; what is no longer than a piece, in one go."""
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        os._exit(0)


def _wait_for_end(directory: str, guardian: Optional[int]) -> None:
    """The driver is to hear that the agent has ended when its guardian has ended what was left, as on its first connection."""
    deadline = time.monotonic() + _END_PATIENCE
    while guardian is not None and os.path.exists(directory) and time.monotonic() < deadline:
        try:
            os.kill(guardian, 0)
        except OSError:
            return
        time.sleep(_LOOK)


def _parent_of(pid: int) -> Optional[int]:
    """None where /proc does not tell."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError):
        return None
