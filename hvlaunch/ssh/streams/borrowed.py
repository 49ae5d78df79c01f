"""The TCP socket of an ssh process that this one has started: a second descriptor of it, by pidfd_getfd(2)."""

import contextlib
import ctypes
import os
import socket
import sys
from pathlib import Path

__all__ = ["borrow"]

_PIDFD_GETFD = 438


def borrow(pid: int) -> socket.socket | None:
    """Ours to close, else the connection outlives the process.

    None where the process has none, as with a ProxyCommand, where the kernel has no such call (before Linux 5.6), and where it
    forbids it (kernel.yama.ptrace_scope above 1).
    """
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                if str(entry.readlink()).startswith("socket:"):
                    found = socket.socket(fileno=_get(process, int(entry.name)))
                    if found.proto == socket.IPPROTO_TCP:
                        return found
                    found.close()
        finally:
            os.close(process)
    return None


def _get(process: int, number: int) -> int:
    fd = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, number, 0))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return fd
