"""Whole lines out of byte chunks, and their place on a screen that many streams share."""

import re
from collections.abc import Hashable
from typing import Literal

__all__ = ["LONGEST", "LineSplitter", "Screen", "Stream"]

Stream = Literal["stdout", "stderr"]

LONGEST = 1 << 20
"""Bytes of an unfinished line that are kept; a longer line is passed on in pieces."""

_EMPTY_RETURNS = re.compile(rb"(?<=\n)\r+(?![\r\n])")
_RETURNS = re.compile(rb"\r+\n?")


class LineSplitter:
    r"""One stream's bytes, cut into whole lines that end with `\n`.

    `\n`, `\r\n` and a lone `\r` (progress bars) end a line. Several `\r` in a row count as one, and a lone
    `\r` at the start of a line, where many progress bars put it, ends nothing. Everything else passes
    unchanged, whether UTF-8 or not. However the bytes are cut into chunks, the lines are the same.
    """

    __slots__ = ("_inside", "_returned", "_waiting")

    def __init__(self) -> None:
        self._waiting = bytearray()
        self._inside = False  # of a long line, whose beginning was passed on
        self._returned = False  # by a \r that ended the last chunk: a \n may follow

    def feed(self, data: bytes) -> bytes:
        """The lines that `data` completes; after LONGEST bytes without an end also an unfinished piece."""
        if self._returned or b"\r" in data:
            data = self._without_returns(data)
        cut = data.rfind(b"\n") + 1
        ready = data[:cut]
        if cut:
            if self._waiting:
                ready = bytes(self._waiting) + ready
                self._waiting.clear()
            self._inside = False
        self._waiting += data[cut:]
        if len(self._waiting) >= LONGEST:
            ready += self._waiting
            self._waiting.clear()
            self._inside = True
        return ready

    def end(self) -> bytes:
        """The unfinished last line, now ended; b"" where there is none. What is fed next is a new stream."""
        ready = bytes(self._waiting) + b"\n" if self._waiting or self._inside else b""
        self._waiting.clear()
        self._inside = self._returned = False
        return ready

    def _without_returns(self, data: bytes) -> bytes:
        if self._returned:
            data = b"\r" + data
        known = data.rstrip(b"\r")
        self._returned = len(known) < len(data)
        known = known.replace(b"\r\n", b"\n")
        if b"\r" not in known:
            return known
        if self._waiting or self._inside:
            return _RETURNS.sub(b"\n", _EMPTY_RETURNS.sub(b"", known))
        return _RETURNS.sub(b"\n", _EMPTY_RETURNS.sub(b"", b"\n" + known))[1:]


class Screen:
    """What many owners write to one terminal or file: each line has its prefix, and none lands inside another."""

    def __init__(self) -> None:
        self._open: Hashable = None  # whose unfinished line is the last thing on the screen
        self._cut: set[Hashable] = set()  # whose unfinished line was ended for them

    def place(self, owner: Hashable, prefix: bytes, text: bytes) -> list[bytes]:
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
