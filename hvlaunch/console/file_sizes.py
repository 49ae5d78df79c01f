"""How much of each rank's files is on record, so that another driver goes on just there."""

import mmap
import os
from pathlib import Path

from hvlaunch.console.lines import Stream

__all__ = ["FileSizes"]

_NUMBER = 8
_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")


class FileSizes:
    """Bytes by rank and stream, in memory that a file shares: they outlive the process."""

    def __init__(self, path: Path, ranks: int, *, is_known: bool) -> None:
        """What is there, or zeros, which are not at `path` before publish(). Raises OSError."""
        self.is_known = is_known
        self._path = path
        self._part = path.with_name(f"{path.name}.part")
        if not is_known:
            self._part.unlink(missing_ok=True)
        new = 0 if is_known else os.O_CREAT | os.O_EXCL
        file = os.open(
            path if is_known else self._part, os.O_RDWR | new | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            size = _NUMBER * len(_STREAMS) * ranks
            if not is_known:
                os.posix_fallocate(
                    file, 0, size
                )  # what has no block could not be written where the disk is full
            self._numbers = memoryview(mmap.mmap(file, size)).cast("Q")
        except ValueError as error:
            raise OSError(f"{path}: {error}") from None
        finally:
            os.close(file)

    def publish(self) -> None:
        """All is noted: others may go by it. Raises OSError."""
        if not self.is_known:
            self._part.rename(self._path)
            self.is_known = True

    def of(self, rank: int, stream: Stream) -> int:
        return self._numbers[self._place(rank, stream)]

    def note(self, rank: int, stream: Stream, size: int) -> None:
        self._numbers[self._place(rank, stream)] = size

    @staticmethod
    def _place(rank: int, stream: Stream) -> int:
        return len(_STREAMS) * rank + _STREAMS.index(stream)
