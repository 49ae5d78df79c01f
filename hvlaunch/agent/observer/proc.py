"""Files of /proc that are read again and again: opened once, since to open one costs more than to read it."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

__all__ = ["ProcFile", "allow_many_files"]

_READ = 1 << 16


class ProcFile:
    """One file, from its first reading on."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: Optional[int] = None

    def read(self) -> bytes:
        """All that it has now. Raises OSError: that of a process which is gone stays gone, whoever gets its number."""
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDONLY)
        data = os.pread(self._fd, _READ, 0)
        if len(data) < _READ:
            return data
        while True:
            more = os.pread(self._fd, _READ, len(data))
            if not more:
                return data
            data += more

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def allow_many_files() -> None:
    """Two are kept open for each process of the workers."""
    import resource  # noqa: PLC0415 (some builds of Python have none)

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 16
    soft = most if hard == resource.RLIM_INFINITY else min(hard, most)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except (OSError, ValueError):
        pass
