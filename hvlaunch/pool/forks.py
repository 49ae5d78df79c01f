"""The fork server of a pool, from its side: a process beside the pool's, which outlives it as long as it has drivers."""

import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from hvlaunch.outside.directory import reachable
from hvlaunch.outside.forked import SOCKET

__all__ = ["Forks"]

_PROGRAM = "import sys; sys.path[:] = {path!r}; from hvlaunch.forked.server import main; main({listener}, {owner}, {name!r})"
_END_PATIENCE = 1.0


class Forks:
    """Until close(), drivers for jobs on this pool are forked; where that can't be, they start as ever."""

    def __init__(self, directory: Path, name: str) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._link, owner = socket.socketpair()
        with owner, suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            with reachable(directory) as path:
                listener.bind(f"{path}/{SOCKET}")
            (directory / SOCKET).chmod(0o600)
            listener.listen()
            program = _PROGRAM.format(
                path=sys.path, listener=listener.fileno(), owner=owner.fileno(), name=name
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                pass_fds=[listener.fileno(), owner.fileno()],
                start_new_session=True,
            )

    def close(self) -> None:
        """No more are forked; what has been goes on."""
        self._link.close()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):  # it has drivers
                self._process.wait(_END_PATIENCE)
