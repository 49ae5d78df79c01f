"""Memory that a fork shares with its parent, made its own beforehand: what is written later need not be copied first."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator, Tuple

__all__ = ["take_own_pages"]

_MADV_POPULATE_WRITE = 23  # madvise(2), since Linux 5.14


def take_own_pages() -> None:
    """Copy all that this process may write and no other sees. An older kernel does it page by page, as they are written."""
    try:
        import ctypes  # noqa: PLC0415 (some builds of Python have none)

        madvise = ctypes.CDLL(None).madvise
        for start, end in _private():
            if madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_POPULATE_WRITE) != 0:
                return
    except (ImportError, AttributeError, OSError, ValueError):
        pass


def _private() -> Iterator[Tuple[int, int]]:
    """The addresses of what is mapped so: see proc_pid_maps(5)."""
    with open("/proc/self/maps", "rb") as file:
        for line in file.read().splitlines():
            span, rights = line.split()[:2]
            if rights == b"rw-p":
                start, _, end = span.partition(b"-")
                yield int(start, 16), int(end, 16)
