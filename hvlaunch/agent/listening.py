"""The program of another user that listens on a port of this host."""

from __future__ import annotations

import os

from hvlaunch.agent.shapes import plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Optional

__all__ = ["other_user_at"]

_LISTENING = "0A"  # TCP_LISTEN
_LONGEST_NAME = 256


def other_user_at(port: int) -> Optional[Dict[str, Any]]:
    """Return the uid, name and program of another user who listens on the port; None if no other user does."""
    for table in ("tcp", "tcp6"):
        try:
            with open("/proc/self/net/" + table) as listing:
                lines = listing.readlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, _, _, _, uid, _, inode = line.split()[:10]
            if state == _LISTENING and int(local.rpartition(":")[2], 16) == port and int(uid) != os.geteuid():
                return {
                    "uid": int(uid),
                    "port": port,
                    "user": _name_of(uid),
                    "program": _program_with(inode, int(uid)),
                }
    return None


def _name_of(uid: str) -> Optional[str]:
    """Return the user's name by /etc/passwd."""
    # Not by the pwd module: a directory service that does not answer would hold up the agent.
    try:
        with open("/etc/passwd", "rb") as users:
            lines = users.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    fields = (line.split(":") for line in lines)
    return next((plain(user[0], _LONGEST_NAME) for user in fields if user[2:3] == [uid]), None)


def _program_with(inode: str, uid: int) -> Optional[str]:
    """Return name and pid of the user's process that has this socket; None if the kernel does not show it to us."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        folder = "/proc/" + pid
        try:
            if os.stat(folder).st_uid != uid:
                continue
            links = [os.readlink(folder + "/fd/" + fd) for fd in os.listdir(folder + "/fd")]
            if "socket:[" + inode + "]" in links:
                with open(folder + "/comm", errors="replace") as comm:
                    return plain(comm.read().strip(), _LONGEST_NAME - 16) + ", pid " + pid
        except OSError:
            continue  # it has ended, or only root may look
    return None
