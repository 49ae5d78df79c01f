"""The status of a job's start, and durations and counts in words."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "AskStatus",
    "OnStatus",
    "Status",
    "ago",
    "code_words",
    "count",
    "counted",
    "duration",
    "size_words",
]


class Status(NamedTuple):
    """A description of what hvlaunch waits for."""

    text: str
    """One line, or several."""
    done: int = 0
    """Number of connected hosts."""
    of: int = 0
    """Number of hosts to connect, or 0 if unknown."""


AskStatus: TypeAlias = Callable[[], Status]
"""Called repeatedly, because a status tells how long it has lasted."""
OnStatus: TypeAlias = Callable[[AskStatus | None], None]
"""Receives each new status; None means that hvlaunch waits for nothing."""


def counted(done: int, of: int, failed: int, seconds: float) -> str:
    """Describe how many hosts are connected."""
    lost = f", {failed} failed" if failed else ""
    return f"{done}/{of}{lost}, {seconds:.0f} s"


_MINUTE, _HOUR = 60, 3600
_SHORT_HASH = 8


def duration(seconds: float) -> str:
    """Return a duration in words: `0.04 s`, `12.4 s`, `3 min 12 s`, `2 h 14 min`."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"


def ago(seconds: float) -> str:
    """Return how long ago something was, in one unit: `12 s ago`, `2 min ago`, `3 h ago`, `2 d ago`."""
    for unit, size in (("d", 24 * _HOUR), ("h", _HOUR), ("min", _MINUTE)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"


def size_words(count: float) -> str:
    """Return a number of bytes in words: `512 B`, `65.5 kB`, `1.05 MB`, `80 GB`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        # Rounded to three digits, 999,600 bytes are a megabyte.
        if count >= 0.9995 * factor:
            number = float(f"{count / factor:.3g}")
            return f"{number:.15g} {unit}"
    return f"{count:.0f} B"


def code_words(code: object) -> tuple[str, str]:
    """Return the short hash of a job's code and its short commit: `3f2a91c4`, `a1b2c3d4-dirty`; empty if unknown.

    `code` comes from `about.json`.
    """
    if not isinstance(code, Mapping):
        return "", ""
    tree, commit = str(code.get("hash") or ""), str(code.get("commit") or "")
    dirty = "-dirty" if commit and code.get("is_dirty") else ""
    return tree[:_SHORT_HASH], f"{commit[:_SHORT_HASH]}{dirty}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 worker`, `2 workers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
