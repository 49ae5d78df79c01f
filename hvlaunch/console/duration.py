"""Spans of time and counts in words."""

__all__ = ["count", "duration"]

_MINUTE, _HOUR = 60, 3600


def duration(seconds: float) -> str:
    """`0.04 s`, `12.4 s`, `3 min 12 s`, `2 h 14 min`."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"


def count(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
