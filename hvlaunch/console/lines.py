"""Whole lines out of byte chunks, their place on a screen that many streams share, and text made safe for a terminal."""

import re
from collections.abc import Hashable
from typing import Literal

__all__ = ["LONGEST", "Key", "LineSplitter", "Screen", "Stream", "visible"]

Stream = Literal["stdout", "stderr"]

Key = tuple[int, Stream]
"""A rank, and one of its streams."""

LONGEST = 1 << 20
"""Bytes of an unfinished line that are kept; a longer line is passed on in pieces."""

_EMPTY_RETURNS = rb"(?<=\n)\r+(?![\r\n])"
_RETURNED_ENDS = rb"\r+\n"
_REPEATED = rb"\r\r+"
_FIRST_END = rb"[\r\n]"


class LineSplitter:
    r"""One stream's bytes, cut into whole lines.

    A line that stays ends with `\n`; `\r\n` is made `\n`. One that ends with a lone `\r` is a state of a progress
    bar, which the next line takes the place of. Several `\r` in a row count as one, and a lone `\r` at the start of
    a line, where many progress bars put it, ends nothing. Everything else passes unchanged, whether UTF-8 or not.
    However the bytes are cut into chunks, the lines are the same.
    """

    __slots__ = ("_drawing", "_inside", "_returned", "_waiting", "has_states")

    def __init__(self) -> None:
        self.has_states = False
        """Whether what feed() gave last has a state of a progress bar, or the unfinished line is one."""
        self._waiting = bytearray()
        self._inside = False  # of a long line, whose beginning was passed on
        self._returned = False  # by a \r that ended the last chunk: a \n may follow
        self._drawing = False  # a \r, and no \n since

    @property
    def state(self) -> bytes | None:
        """The unfinished line, where it is a progress bar's: what a terminal would show now. Else None."""
        return bytes(self._waiting) if self._drawing or self._returned else None

    @property
    def unfinished(self) -> bytes:
        """The unfinished line, where it is neither a progress bar's nor one that is passed on in pieces."""
        return b"" if self._inside or self.state is not None else bytes(self._waiting)

    @property
    def waiting(self) -> int:
        """Bytes of the unfinished line, whatever it is."""
        return len(self._waiting)

    def forget(self) -> None:
        """The unfinished line has been ended elsewhere: what comes next begins a line."""
        self._waiting.clear()

    def feed(self, data: bytes) -> bytes:
        """The lines that `data` completes; after LONGEST bytes without an end also an unfinished piece."""
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
        if len(self._waiting) >= LONGEST:
            ready += self._waiting
            self._waiting.clear()
            self._inside = True
            self._drawing = False
        self.has_states = self._drawing or self._returned or (returns and b"\r" in ready)
        return ready

    def finish(self) -> bytes:
        """The unfinished last line, now ended; b"" where there is none. What is fed next is a new stream."""
        ready = bytes(self._waiting) + b"\n" if self._waiting or self._inside else b""
        self._waiting.clear()
        self._inside = self._returned = self._drawing = False
        return ready

    def _without_returns(self, data: bytes) -> bytes:
        r"""`data` without `\r\n`, repeated and meaningless `\r`, and without those at the end, which wait."""
        if self._returned:
            data = b"\r" + data
        known = data.rstrip(b"\r")
        self._returned = len(known) < len(data)
        known = known.replace(b"\r\n", b"\n")
        if b"\r" not in known:
            self._drawing = self._drawing and b"\n" not in known
            return known
        self._drawing = known.rfind(b"\r") > known.rfind(b"\n") or (self._drawing and b"\n" not in known)
        if self._waiting or self._inside:
            known = re.sub(_EMPTY_RETURNS, b"", known)
        else:
            known = re.sub(_EMPTY_RETURNS, b"", b"\n" + known)[1:]
        known = re.sub(_REPEATED, b"\r", re.sub(_RETURNED_ENDS, b"\n", known))
        if self._inside and (end := re.search(_FIRST_END, known)):
            known = (
                known[: end.start()] + b"\n" + known[end.end() :]
            )  # its beginning was passed on, and stays
        return known


class Screen:
    """What many owners write to one terminal or file: each line has its prefix, and none lands inside another."""

    def __init__(self) -> None:
        self._open: Hashable = None  # whose unfinished line is the last thing on the screen
        self._cut: set[Hashable] = set()  # whose unfinished line was ended for them

    @property
    def is_whole(self) -> bool:
        """Whether the last line is ended: what comes next stands at the start of a line."""
        return self._open is None

    def arrange(self, owner: Hashable, prefix: bytes, text: bytes) -> list[bytes]:
        """What to write, as parts to join, so that `text` (lines, perhaps with a piece at the end) stands right."""
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
    r"""`text` with control characters, which may be a host's, escaped as in Python; newlines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)
