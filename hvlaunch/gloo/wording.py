"""Sentences of the engine, and numbers in them."""

import signal

__all__ = ["count", "interrupted"]


def count(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def interrupted(number: int, grace: float) -> str:
    """What a signal to hvlaunch leads to. Its own SIGPIPE can't come once more."""
    if number == signal.SIGPIPE:
        return f"nobody reads the output any more: workers have {grace:g} s to end"
    name = signal.Signals(number).name
    return f"got {name}: workers have {grace:g} s to end; once more kills them at once"
