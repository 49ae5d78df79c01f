"""Numbers and names in sentences."""

from collections.abc import Sequence

__all__ = ["count", "hosts"]


def count(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def hosts(names: Sequence[str]) -> str:
    """`host a`, `hosts a, b`."""
    return f"host {names[0]}" if len(names) == 1 else f"hosts {', '.join(names)}"
