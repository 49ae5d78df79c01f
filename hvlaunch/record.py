"""Files that outlive the process: append-only logs, and numbers in shared memory backed by a file.

A record of a log is 4 bytes of length, a CRC-32 (which may continue the previous record's), a CRC-32 of these 8 bytes,
and the body. Numbers are little-endian. Shared memory costs no system call for each change. The boot id tells whether its
values, and times of the monotonic clock, are still valid.
"""

import errno
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "PAGE",
    "BadLog",
    "Log",
    "Mark",
    "SharedFile",
    "boot_id",
    "follow",
    "pack_record",
    "read_records",
    "write_whole_at",
]

_HEAD = struct.Struct("<III")
_CHECKED = struct.Struct("<II")
"""The part of a head under its own checksum."""
_MOST = 1 << 30
"""The longest body for follow(), in bytes; a longer one is damage."""
_READ_SIZE = 1 << 18
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class BadLog(ValueError):
    """No writer leaves such bytes, whenever it is killed; the message names the damage."""


class Mark(NamedTuple):
    """A place between two records: bytes from the start of the file, and the checksum to be continued."""

    size: int
    check: int = 0


def pack_record(pieces: Iterable[bytes], previous: int = 0) -> tuple[bytes, int]:
    """Return a record in its form on disk, and its checksum.

    With the previous record's checksum as `previous`, a reader notices missing, doubled and foreign records.
    """
    # Joined first: a checksum of many small pieces costs more than the copy.
    body = b"".join(pieces)
    check = zlib.crc32(body, previous)
    head = _CHECKED.pack(len(body), check)
    return b"".join((head, zlib.crc32(head).to_bytes(4, "little"), body)), check


def read_records(data: memoryview, start: Mark) -> Iterator[tuple[memoryview, Mark]]:
    """Yield each body in the content of a file, with the mark behind; a torn last record is left out.

    Raises BadLog if anything follows a broken record.
    """
    at, check = start
    while at + _HEAD.size <= len(data):
        size, expected, head_check = _HEAD.unpack_from(data, at)
        # The head has its own checksum: a damaged length would hide all later records.
        if not size or zlib.crc32(data[at : at + _CHECKED.size]) != head_check:
            break
        body = data[at + _HEAD.size : at + _HEAD.size + size]
        check = zlib.crc32(body, check)
        end = at + _HEAD.size + size
        if end > len(data):
            return
        if check != expected:
            if any(data[end:]):
                raise BadLog(f"a checksum is wrong, at byte {at}")
            return
        yield body, Mark(end, check)
        at = end
    # After a loss of power, a file may be longer than what was written to it: by zeros.
    if len(data) - at >= _HEAD.size and any(data[at:]):
        raise BadLog(f"what follows byte {at} is no record")


def follow(descriptor: int, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yield the bodies of whole records from `offset` on, each with the offset behind, as far as written now.

    For a growing file, whose records continue no checksum.
    """
    kept, start = b"", offset
    while data := os.pread(descriptor, max(_READ_SIZE, _missing(kept)), start + len(kept)):
        kept += data
        used = 0
        while (end := _end_of_record(kept, used)) is not None:
            yield kept[used + _HEAD.size : end], start + end
            used = end
        kept, start = kept[used:], start + used


def _missing(data: bytes) -> int:
    """Return the missing bytes of the record at the start of `data`; 0 if unknown."""
    if len(data) < _HEAD.size:
        return 0
    size = _HEAD.unpack_from(data)[0]
    return _HEAD.size + size - len(data) if size <= _MOST else 0


def _end_of_record(data: bytes, at: int) -> int | None:
    """Return the end of the record at `at`; None if it is incomplete or damaged."""
    if len(data) - at < _HEAD.size:
        return None
    size, check, head_check = _HEAD.unpack_from(data, at)
    end: int = at + _HEAD.size + size
    view = memoryview(data)
    if end > len(data) or zlib.crc32(view[at : at + _CHECKED.size]) != head_check:
        return None
    return end if zlib.crc32(view[at + _HEAD.size : end]) == check else None


def write_whole_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write all data at `offset`, the end of the file, or leave the file unchanged. Raises OSError."""
    end = offset
    try:
        end += os.pwrite(descriptor, data, offset)
        # A disk that is almost full takes a part.
        while end < offset + len(data):
            end += os.pwrite(descriptor, data[end - offset :], end)
    except OSError:
        # If this fails too, a reader cuts the torn record off.
        with suppress(OSError):
            os.ftruncate(descriptor, offset)
        raise


class Log:
    """Appends to a file, whose records continue each other's checksums. For one thread.

    A SIGKILL loses no appended record; with `is_synced`, neither does a loss of power.
    """

    def __init__(self, path: Path, descriptor: int, end: Mark, *, is_synced: bool) -> None:
        self.path = path
        self._size, self._check = end
        self._descriptor = descriptor
        self._is_synced = is_synced

    @classmethod
    def create(cls, path: Path, magic: bytes, *, is_synced: bool = False) -> "Log":
        """Create a file for this user only, with `magic` at its beginning. Raises OSError."""
        log = cls(path, os.open(path, _NEW, 0o600), Mark(0), is_synced=is_synced)
        try:
            log._write(magic, 0)
            if is_synced:
                _sync_directory(path)
        except OSError:
            log.close()
            raise
        return log

    @classmethod
    def resume(cls, path: Path, end: Mark, *, is_synced: bool = False) -> "Log":
        """Continue behind `end`, a mark of read_records(); the bytes behind are cut off. Raises OSError."""
        log = cls(path, os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), end, is_synced=is_synced)
        try:
            os.ftruncate(log._descriptor, end.size)
        except OSError:
            log.close()
            raise
        return log

    @property
    def end(self) -> Mark:
        """Behind the last record."""
        return Mark(self._size, self._check)

    @property
    def size(self) -> int:
        return self._size

    def append(self, pieces: Iterable[bytes]) -> None:
        """Write a record: readers find all of it or nothing. Raises OSError."""
        data, check = pack_record(pieces, self._check)
        self._write(data, check)

    def _write(self, data: bytes, check: int) -> None:
        write_whole_at(self._descriptor, data, self._size)
        if self._is_synced:
            os.fdatasync(self._descriptor)
        self._size += len(data)
        self._check = check

    def replace(self, start: Mark, records: Iterable[Iterable[bytes]]) -> None:
        """Replace everything behind `start` at once: readers find the old records or the new.

        Raises OSError; the file is unchanged then.
        """
        part = self.path.with_name(f"{self.path.name}.part")
        # A process killed during replace() leaves such a file behind.
        part.unlink(missing_ok=True)
        copy = Log(part, os.open(part, _NEW, 0o600), Mark(0), is_synced=False)
        try:
            while copy.size < start.size:
                copy._write(self._read(copy.size, start.size), start.check)
            for pieces in records:
                copy.append(pieces)
            # The content before the name: after a loss of power, the name must not lead to an empty file.
            if self._is_synced:
                os.fdatasync(copy._descriptor)
            # The moment of the replacement: a kill before leaves the old file, after it the new.
            part.rename(self.path)
        except BaseException:
            copy.close()
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        self._descriptor, copy._descriptor = copy._descriptor, self._descriptor
        copy.close()
        self._size, self._check = copy.end
        if self._is_synced:
            _sync_directory(self.path)

    def _read(self, begin: int, end: int) -> bytes:
        """Return a non-empty part of the file. Raises OSError."""
        data = os.pread(self._descriptor, min(_READ_SIZE, end - begin), begin)
        if not data:
            raise OSError(errno.EIO, "another program has cut the file")
        return data

    def close(self) -> None:
        """May be called again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _sync_directory(path: Path) -> None:
    """Make the file's name durable. Raises OSError."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


PAGE = mmap.ALLOCATIONGRANULARITY
"""Mappings begin at multiples of this many bytes."""


class SharedFile:
    """A file of this user's, whose bytes are mapped into memory. Not safe for threads.

    A SIGKILL loses no byte that was written to a mapping; a loss of power can, unless the mapping is flushed.
    """

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        """Open or create the file; `is_new` forbids an existing one. Raises OSError."""
        exclusive = os.O_EXCL if is_new else 0
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | exclusive
        self.descriptor = os.open(path, flags, 0o600)

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def reserve(self, offset: int, size: int) -> None:
        """Allocate disk blocks for these bytes, without changing the values. Raises OSError."""
        # On a full disk, a write to a mapped page without a block kills the process by SIGBUS. Writing the bytes
        # back allocates the blocks on every system; posix_fallocate() is missing on macOS.
        data = os.pread(self.descriptor, size, offset).ljust(size, b"\0")
        if os.pwrite(self.descriptor, data, offset) != size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def map(self, offset: int, size: int, *, is_sparse: bool = False) -> mmap.mmap:
        """Map a part of the file, even beyond close(); `offset` is a multiple of PAGE. Raises OSError.

        With `is_sparse` the caller reserves a page before writing to it.
        """
        if is_sparse:
            os.truncate(self.descriptor, max(self.size, offset + size))
        elif (end := self.size) < offset + size:
            # The bytes behind `end` have no block yet. Those before it have: on a full disk they can still be mapped.
            self.reserve(end, offset + size - end)
        # The mapping has its own duplicate of the descriptor.
        return mmap.mmap(self.descriptor, size, offset=offset)

    def close(self) -> None:
        """Close the file. May be called again."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def boot_id() -> str:
    """Return the id of this machine's boot, or "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
