"""What a link has of the printer."""

from collections.abc import Callable
from typing import Protocol

from hvlaunch.console.lines import Stream
from hvlaunch.console.recent import Origin

__all__ = ["OutputPrinter"]


class OutputPrinter(Protocol):
    """Where workers' output goes. `done` is called with the number of bytes once they are printed; `note` before that, as in Output.

    `origin` names the link and the frame: what has the same was printed before.
    """

    def output(
        self,
        rank: int,
        stream: Stream,
        data: bytes,
        done: Callable[[int], None],
        origin: Origin,
        note: Callable[[bool], None] | None,
    ) -> None: ...

    def end(self, rank: int, stream: Stream, done: Callable[[int], None], origin: Origin) -> None: ...

    def tail(self, rank: int) -> bytes:
        """The last bytes of its stderr."""
