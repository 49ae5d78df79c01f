"""The engine decides: events in, actions out, without I/O, clock, threads or randomness. replay() repeats a journal."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvlaunch.engine.codec import replay

__all__ = ["replay"]


def __getattr__(name: str) -> Any:
    """Import replay() on first use: no job needs it."""
    if name != "replay":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hvlaunch.engine.codec import replay  # noqa: PLC0415 (see the docstring)

    return replay
