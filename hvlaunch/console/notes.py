"""Notes of the console for a successor driver, in shared memory: unfinished lines, sizes of files, lost output."""

import os
import struct
import zlib
from contextlib import closing, suppress
from mmap import mmap
from pathlib import Path

from hvlaunch.console.lines import Key, Stream
from hvlaunch.record import PAGE, SharedFile

__all__ = ["FileSizes", "LostOutput", "UnfinishedLines", "lost_output_text"]

_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")

_LINE = struct.Struct("<II")
"""Before an unfinished line: its size and its CRC-32."""
_SLOT = 1 << 16
"""Bytes of the file for each rank and stream. The file is sparse: unwritten pages take no room on the disk."""
_SLOTS_PER_MAPPING = 256
"""A mapping holds a file descriptor, and therefore spans many slots."""

_LOST = "lost"
_LOST_NUMBERS = struct.Struct("<QQ")
"""Lost bytes, and the errno of the latest failure."""


class UnfinishedLines:
    """The beginnings of unfinished lines, acknowledged to agents but not shown yet. For one thread.

    The file is created with the first note. Lines longer than `longest` bytes are not noted, nor any on a full disk.
    """

    longest = _SLOT - _LINE.size

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: SharedFile | None = None
        self._mappings: dict[int, mmap] = {}
        self._reserved: set[int] = set()
        """Slots whose first page has a block on the disk."""
        self.noted: dict[Key, bytes] = {}
        """Non-empty lines of this process."""

    def note(self, key: Key, text: bytes) -> None:
        """Record the beginning of this rank's unfinished line; empty without a line."""
        text = text if len(text) <= self.longest else b""
        if text == self.noted.get(key, b""):
            return
        with suppress(OSError):
            if self._file is None:
                self._file = SharedFile(self._path)
            rank, stream = key
            slot = len(_STREAMS) * rank + _STREAMS.index(stream)
            self._write(self._file, slot, _LINE.pack(len(text), zlib.crc32(text)) + text)
            # Only after the write: a failed note is tried again with the next change.
            self.noted[key] = text
            if not text:
                del self.noted[key]

    def _write(self, file: SharedFile, slot: int, data: bytes) -> None:
        """Raises OSError."""
        mapping = self._mapping(file, slot // _SLOTS_PER_MAPPING) if len(data) <= PAGE else None
        if mapping is None:
            os.pwrite(file.descriptor, data, _SLOT * slot)
            return
        if slot not in self._reserved:
            file.reserve(_SLOT * slot, PAGE)
            self._reserved.add(slot)
        # Not by a system call: one for each printed page is a tenth of the cost of printing.
        start = _SLOT * (slot % _SLOTS_PER_MAPPING)
        mapping[start : start + len(data)] = data

    def _mapping(self, file: SharedFile, number: int) -> mmap | None:
        """Map these slots; None if the system refuses even a sparse file of this size."""
        if number not in self._mappings:
            size = _SLOT * _SLOTS_PER_MAPPING
            with suppress(OSError):
                self._mappings[number] = file.map(size * number, size, is_sparse=True)
        return self._mappings.get(number)

    def read(self) -> dict[Key, bytes]:
        """Return the notes of another process."""
        # By system calls: another process' file may be shorter than a mapping.
        lines: dict[Key, bytes] = {}
        with suppress(OSError):
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                for slot in range(-(-os.fstat(descriptor).st_size // _SLOT)):
                    head = os.pread(descriptor, _LINE.size, _SLOT * slot).ljust(_LINE.size, b"\0")
                    size, checksum = _LINE.unpack(head)
                    text = os.pread(descriptor, min(size, self.longest), _SLOT * slot + _LINE.size)
                    # A process that was killed while it wrote leaves a wrong checksum.
                    if text and zlib.crc32(text) == checksum:
                        rank, stream = divmod(slot, len(_STREAMS))
                        lines[rank, _STREAMS[stream]] = text
            finally:
                os.close(descriptor)
        return lines

    def forget(self) -> None:
        """Remove the file: the lines are stored elsewhere now."""
        self._path.unlink(missing_ok=True)
        if self._file is not None:
            self._file.close()
            self._file = None
        for mapping in self._mappings.values():
            mapping.close()
        self._mappings.clear()
        self._reserved.clear()
        self.noted.clear()


class FileSizes:
    """The acknowledged size of each rank's files with --output-filename, by rank and stream."""

    def __init__(self, path: Path, ranks: int, *, is_known: bool) -> None:
        """Map the known sizes at `path`, or zeros, to be published later. Raises OSError."""
        self.is_known = is_known
        self._path = path
        # Unpublished sizes have another name: a killed driver may have noted only some of them.
        self._part = path.with_name(f"{path.name}.part")
        if not is_known:
            # Of a driver killed before publish().
            self._part.unlink(missing_ok=True)
        size = 8 * len(_STREAMS) * ranks
        with closing(SharedFile(path if is_known else self._part, is_new=not is_known)) as file:
            if is_known and file.size < size:
                raise OSError(f"{path}: it has {file.size} bytes in place of {size}")
            self._sizes = memoryview(file.map(0, size)).cast("Q")

    def publish(self) -> None:
        """Let a successor rely on the sizes, now complete. Raises OSError."""
        if not self.is_known:
            self._part.rename(self._path)
            self.is_known = True

    def of(self, rank: int, stream: Stream) -> int:
        return self._sizes[self._index(rank, stream)]

    def note(self, rank: int, stream: Stream, size: int) -> None:
        self._sizes[self._index(rank, stream)] = size

    @staticmethod
    def _index(rank: int, stream: Stream) -> int:
        return len(_STREAMS) * rank + _STREAMS.index(stream)


class LostOutput:
    """How much of a job's output could not be stored, until users are told.

    The file is made before the disk is full. If it can't be made, only this process knows.
    """

    def __init__(self, directory: Path) -> None:
        """Continue from the numbers of an earlier driver, if any."""
        self._numbers: mmap | bytearray = bytearray(_LOST_NUMBERS.size)
        with suppress(OSError), closing(SharedFile(directory / _LOST)) as file:
            self._numbers = file.map(0, PAGE)

    @property
    def size(self) -> int:
        """The number of lost bytes."""
        return int(_LOST_NUMBERS.unpack_from(self._numbers)[0])

    @property
    def text(self) -> str:
        """The sentence for users."""
        return _lost_text(*_LOST_NUMBERS.unpack_from(self._numbers))

    def add(self, size: int, error: int | None = None) -> None:
        """Count lost bytes; `error` is the errno, if it changed."""
        total, latest = _LOST_NUMBERS.unpack_from(self._numbers)
        self._note(total + size, latest if error is None else error)

    def forget(self) -> None:
        """Reset the count: users were told."""
        if self.size:
            self._note(0, 0)

    def _note(self, size: int, error: int) -> None:
        self._numbers[: _LOST_NUMBERS.size] = _LOST_NUMBERS.pack(size, error)


def lost_output_text(directory: Path) -> str | None:
    """Return the sentence for users about the job's directory; None without lost output."""
    with suppress(OSError, struct.error):
        descriptor = os.open(directory / _LOST, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            size, error = _LOST_NUMBERS.unpack(os.read(descriptor, _LOST_NUMBERS.size))
            return _lost_text(size, error) if size else None
        finally:
            os.close(descriptor)
    return None


def _lost_text(size: int, error: int) -> str:
    return f"{size} bytes of output are lost: {os.strerror(error).lower()}"
