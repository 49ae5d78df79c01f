"""What decides: events in, actions out, without I/O, clock, threads or chance. replay() takes a journal through it again."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvlaunch.engine.entries import replay

__all__ = ["replay"]


def __getattr__(name: str) -> Any:
    """What no job needs is imported when it is asked for."""
    if name != "replay":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hvlaunch.engine.entries import replay  # noqa: PLC0415 (see the docstring)

    return replay
