"""Shared memory backed by a file: values outlive the process without a system call for each change; and the boot id.

The boot id tells whether they, and times of the monotonic clock, are still valid.
"""

import errno
import mmap
import os
from pathlib import Path

__all__ = ["PAGE", "SharedFile", "boot_id"]

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
            # What is behind `end` has no block yet. What is before it has: on a full disk it can still be mapped.
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
