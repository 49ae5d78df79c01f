"""The bottom rows of a terminal, redrawn in place: progress bars, and what hvlaunch waits for; or a prompt."""

import re
from collections.abc import Callable, Sequence

__all__ = ["LiveRows"]

_ESCAPES = r"(\x1b\[[0-9;:]*m)|\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\^_]|[\x00-\x1f\x7f-\x9f]"
_NO_WRAP, _WRAP = b"\x1b[?7l", b"\x1b[?7h"
_FRAME = 0.1
"""Seconds between two pictures."""
_STATUS_DELAY = 1.0
"""Seconds before a status is shown: a quick start shows none."""
_TICK = 1.0
"""Seconds after which a status is asked again: it tells how long hvlaunch has waited."""
_RESET = b"\x1b[0m"
_BACK, _UP, _CLEAR_BELOW = b"\r", b"\x1b[%dA", b"\x1b[J"


class LiveRows:
    """Rows below all else on a terminal. The cursor waits at the start of the first one, or behind a prompt.

    So what others write meanwhile (the echo of ^C, another program) begins a line, and is overwritten or scrolls off.

    A row that is longer than the terminal is wide is cut by the terminal itself (DECAWM), whatever its width.
    `now` is in seconds, of any clock that never goes back.
    """

    def __init__(self) -> None:
        self._shown = False
        self._stale = False
        self._next_frame = 0.0
        self._status: Callable[[], list[bytes]] | None = None
        self._status_from = 0.0
        self._status_rows: list[bytes] | None = None
        self._status_due = 0.0
        self._prompt: bytes | None = None
        self.is_asking = False
        """Whether the prompt is shown, alone, with the cursor behind it."""

    def status(self, rows: Callable[[], list[bytes]] | None, now: float) -> None:
        """Show what hvlaunch waits for, as the last rows, once it has waited for a second; None: it waits no more.

        It is asked again each second.
        """
        if rows is not None and self._status is None:
            self._status_from = now + _STATUS_DELAY
        if rows is None:
            self._next_frame = now
        self._status, self._status_rows, self._stale = rows, None, True

    def prompt(self, row: bytes | None, now: float) -> None:
        """Show this row alone, for the user to type behind it; None: the others again.

        It is not drawn again before something else is written, because that would remove what the user has typed.
        """
        if row != self._prompt:
            self._prompt, self.is_asking = row, False
            self._stale, self._next_frame = True, now

    def touch(self) -> None:
        """The bars have changed."""
        self._stale = True

    @property
    def deadline(self) -> float | None:
        """When they are to be drawn again, if nothing else is written; None where nothing has changed."""
        if self.is_asking:
            return None
        if self._stale:
            return self._next_frame
        if self._status is None:
            return None
        return self._status_from if self._status_rows is None else self._status_due

    def erase(self) -> bytes:
        """The bytes that remove the rows; other text may follow."""
        shown, self._shown = self._shown, False
        return _BACK + _CLEAR_BELOW if shown else b""

    def draw(self, bars: Sequence[bytes], now: float) -> bytes:
        """The bytes that show the bars and the status, where no row is shown and the cursor is at the start of a line."""
        self._stale, self._next_frame = False, now + _FRAME
        if self._prompt is not None:
            self._shown = self.is_asking = self._stale = True
            return _NO_WRAP + _printable(self._prompt) + _RESET + _WRAP
        rows = list(bars)
        if self._status is not None and now >= self._status_from:
            if self._status_rows is None or now >= self._status_due:
                self._status_rows, self._status_due = self._status(), now + _TICK
            rows += self._status_rows
        self._shown = bool(rows)
        if not rows:
            return b""
        up = _UP % (len(rows) - 1) if len(rows) > 1 else b""
        return _NO_WRAP + b"\n".join(_printable(row) + _RESET for row in rows) + _WRAP + _BACK + up


def _printable(row: bytes) -> bytes:
    """The row without what would move the cursor; colours stay."""
    return re.sub(_ESCAPES, lambda found: found[1] or "", row.decode(errors="replace")).encode()
