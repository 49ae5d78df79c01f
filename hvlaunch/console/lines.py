"""Complete lines from byte chunks, a screen that many streams share, and text that is safe for a terminal."""

import re
from collections.abc import Hashable, Sequence
from typing import Literal

__all__ = [
    "LONGEST",
    "Key",
    "LineSplitter",
    "Screen",
    "Stream",
    "TracebackFilter",
    "aligned",
    "visible",
    "visible_line",
]

Stream = Literal["stdout", "stderr"]

Key = tuple[int, Stream]
"""A rank and one of its streams."""

LONGEST = 1 << 20
"""Maximum bytes kept of an unfinished line; a longer line is passed on in pieces."""

_EMPTY_RETURNS = rb"(?<=\n)\r+(?![\r\n])"
_RETURNED_ENDS = rb"\r+\n"
_REPEATED = rb"\r\r+"
_FIRST_END = rb"[\r\n]"


_TRACEBACK = (
    b"Traceback (most recent call last):",
    b"During handling of the above exception",
    b"The above exception was the direct cause",
)
_RANK = re.compile(rb"^\[rank[0-9]+\]: ?")


class LineSplitter:
    r"""Splits one stream's bytes into complete lines.

    A permanent line ends with `\n`, also instead of `\r\n`. A line that ends with a lone `\r` is a state of a
    progress bar, and the next line overwrites it. Repeated `\r` count once. A lone `\r` at the start of a line
    ends nothing: many progress bars begin with it. All other bytes pass unchanged, whether UTF-8 or not. The
    result does not depend on how chunks are cut.
    """

    __slots__ = ("_drawing", "_inside", "_returned", "_waiting", "has_states")

    def __init__(self) -> None:
        self.has_states = False
        """True if the last result of feed() contains a state of a progress bar, or the unfinished line is a state."""
        self._waiting = bytearray()
        # True inside a long line whose beginning was passed on.
        self._inside = False
        # True if the last chunk ended with \r: a \n may follow.
        self._returned = False
        # True after a \r without a later \n.
        self._drawing = False

    @property
    def state(self) -> bytes | None:
        """The unfinished line if a terminal would show it as a progress bar, or else None."""
        return bytes(self._waiting) if self._drawing or self._returned else None

    @property
    def unfinished(self) -> bytes:
        """The unfinished line, unless it is a progress bar's or is passed on in pieces."""
        return b"" if self._inside or self.state is not None else bytes(self._waiting)

    @property
    def waiting(self) -> int:
        """Size of the unfinished line in bytes, of any kind."""
        return len(self._waiting)

    def forget(self) -> None:
        """Drop the unfinished line, which has ended elsewhere: the next byte begins a line."""
        self._waiting.clear()

    def feed(self, data: bytes) -> bytes:
        """Return the lines that `data` completes, and a piece of a line after LONGEST bytes without an end."""
        returns = self._returned or b"\r" in data
        if returns:
            data = self._without_returns(data)
            cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        else:
            cut = data.rfind(b"\n") + 1
            self._drawing = self._drawing and not cut
        if cut:
            ready = b"".join((self._waiting, memoryview(data)[:cut]))
            self._waiting.clear()
            self._inside = False
        else:
            ready = b""
        self._waiting += memoryview(data)[cut:]
        # A worker that writes no newline must not fill the driver's memory.
        if len(self._waiting) >= LONGEST:
            ready += self._waiting
            self._waiting.clear()
            self._inside = True
            self._drawing = False
        self.has_states = self._drawing or self._returned or (returns and b"\r" in ready)
        return ready

    def finish(self) -> bytes:
        """Return the unfinished last line, now ended, or b"". The next bytes belong to a new stream."""
        ready = bytes(self._waiting) + b"\n" if self._waiting or self._inside else b""
        self._waiting.clear()
        self._inside = self._returned = self._drawing = False
        return ready

    def _without_returns(self, data: bytes) -> bytes:
        r"""Normalize `\r\n` and repeated `\r` in `data`; keep trailing `\r` for the next chunk."""
        if self._returned:
            # The \r of the last chunk counts now that its successor is known.
            data = b"\r" + data
        text = data.rstrip(b"\r")
        self._returned = len(text) < len(data)
        text = text.replace(b"\r\n", b"\n")
        if b"\r" not in text:
            self._drawing = self._drawing and b"\n" not in text
            return text
        self._drawing = text.rfind(b"\r") > text.rfind(b"\n") or (self._drawing and b"\n" not in text)
        if self._waiting or self._inside:
            text = re.sub(_EMPTY_RETURNS, b"", text)
        else:
            text = re.sub(_EMPTY_RETURNS, b"", b"\n" + text)[1:]
        text = re.sub(_REPEATED, b"\r", re.sub(_RETURNED_ENDS, b"\n", text))
        if self._inside and (end := re.search(_FIRST_END, text)):
            # The beginning of the line was passed on and can't be overwritten, so the line ends here.
            text = text[: end.start()] + b"\n" + text[end.end() :]
        return text


class TracebackFilter:
    """Removes Python tracebacks from the lines of several streams, and counts them."""

    def __init__(self) -> None:
        self.count = 0
        self._is_open: dict[Key, bool] = {}
        """False for a stream whose traceback has ended: another may follow, behind an empty line."""

    def feed(self, key: Key, text: bytes) -> bytes:
        """Return the text, complete lines of a stream, without tracebacks."""
        return b"".join(
            line for line in text.splitlines(keepends=True) if not self._is_of_traceback(key, line)
        )

    def _is_of_traceback(self, key: Key, line: bytes) -> bool:
        # torch has the rank before each line.
        line = _RANK.sub(b"", line)
        if line.startswith(_TRACEBACK):
            self.count += line.startswith(_TRACEBACK[0]) and key not in self._is_open
            self._is_open[key] = True
        elif line.strip() and not line.startswith(b" "):
            # A traceback ends with the first line that is not indented: the exception.
            if not self._is_open.pop(key, False):
                return False
            self._is_open[key] = False
        return key in self._is_open


class Screen:
    """Arranges the output of many owners on one terminal or file.

    Each line has a prefix, and no line is cut by another.
    """

    def __init__(self) -> None:
        # The owner of an unfinished line at the end of the screen.
        self._open: Hashable = None
        self.tracebacks: TracebackFilter | None = None
        """Filter of tracebacks on stderr; None to show them."""
        # Owners whose unfinished line another owner has ended: their own newline would be an empty line.
        self._cut: set[Hashable] = set()

    @property
    def is_whole(self) -> bool:
        """True if the last line has ended: the next text begins at the start of a line."""
        return self._open is None

    def arrange(self, owner: Hashable, prefix: bytes, text: bytes) -> list[bytes]:
        """Return the parts to write for `text` (lines, perhaps with a piece of a line at the end)."""
        parts: list[bytes] = []
        if owner in self._cut:
            self._cut.remove(owner)
            text = text.removeprefix(b"\n")
        if not text:
            return parts
        if self._open != owner:
            if self._open is not None:
                parts.append(b"\n")
                self._cut.add(self._open)
            parts.append(prefix)
        between = b"\n" + prefix
        if text.endswith(b"\n"):
            parts += (text[:-1].replace(b"\n", between), b"\n")
            self._open = None
        else:
            parts.append(text.replace(b"\n", between))
            self._open = owner
        return parts


def visible(text: str) -> str:
    """Escape control characters as Python does: the text may be a host's. Newlines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)


def visible_line(text: str) -> str:
    """Escape newlines and tabs as well: for a name within a line or a table."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row of a table, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
