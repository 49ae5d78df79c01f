"""Who listens on a port of this host."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

__all__ = ["other_user_at"]

_LISTENING = "0A"  # TCP_LISTEN


def other_user_at(port: int) -> Optional[int]:
    """The uid of another user whose program listens on the port; None where no such one does."""
    for table in ("tcp", "tcp6"):
        try:
            with open("/proc/self/net/" + table) as listing:
                lines = listing.readlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, _, _, _, uid = line.split()[:8]
            if state == _LISTENING and int(local.rpartition(":")[2], 16) == port and int(uid) != os.geteuid():
                return int(uid)
    return None
