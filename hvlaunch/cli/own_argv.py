"""Hiding the values of `-x NAME=VALUE` from `ps`, as far as that goes."""

import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["hide_values"]

_ARG_START, _ARG_END = 48, 49  # fields of /proc/PID/stat, counted from 1; see proc(5)


def hide_values(assignments: Iterable[str]) -> None:
    """Overwrite the VALUE of each NAME=VALUE on this process's own command line, as others see it.

    It was to be seen for the milliseconds until now, and may be in the shell's history; `-x NAME`
    and --env-file are better. Nothing happens where the system does not tell where its arguments lie.
    """
    words = tuple(word.encode(errors="surrogateescape") for word in assignments if "=" in word)
    span = _own_arguments() if words else None
    if span is None:
        return
    import ctypes  # noqa: PLC0415 (only for those who use it)

    start, end = span
    memory = (ctypes.c_char * (end - start)).from_address(start)
    # endswith: -xNAME=VALUE is one word.
    hidden = [_hidden(word) if word.endswith(words) else word for word in memory.raw.split(b"\0")]
    memory.raw = b"\0".join(hidden)


def _hidden(word: bytes) -> bytes:
    name, equals, value = word.partition(b"=")
    return name + equals + b"*" * len(value)


def _own_arguments() -> tuple[int, int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    start, end = (int(fields[number - 3]) for number in (_ARG_START, _ARG_END))
    return (start, end) if 0 < start < end else None
