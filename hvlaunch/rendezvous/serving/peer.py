"""Whose program is at the other end of a Unix socket."""

import os
import socket
import struct

__all__ = ["is_own_user"]

_UCRED = struct.Struct("iII")
"""Linux' struct ucred: pid, uid, gid (unix(7))."""
_XUCRED_SIZE = 76
_XUCRED = struct.Struct("II")
"""What macOS' struct xucred begins with: version, uid (sys/ucred.h)."""
_SOL_LOCAL = 0
_LOCAL_PEERCRED = 1


def is_own_user(connection: socket.socket) -> bool:
    """Whether it is this user's, or root's, who may do everything anyway. A kernel that can't tell is not asked."""
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
