import os
import re

import pytest

PIECES = re.compile(rb"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")
SEQUENCE_BEGUN = re.compile(rb"(.*?)((?:\x1b(?:\[[0-9;?]*)?)?)", re.DOTALL)  # at the end of what was read


class Terminal:
    """The visible text of a terminal with `width` columns, without colours."""

    def __init__(self, width=80):
        self.width = width
        self.lines = [""]
        self.row = self.column = 0
        self.wraps = True
        self.begun = b""

    def feed(self, data):
        parts = SEQUENCE_BEGUN.fullmatch(self.begun + data)
        assert parts is not None
        data, self.begun = parts.groups()
        for numbers, letter, move, text in PIECES.findall(data):
            if move == b"\r":
                self.column = 0
            elif move == b"\n":
                self.down()
            elif text:
                self.write(text.decode())
            elif letter == b"A":
                self.row -= int(numbers or 1)
                assert self.row >= 0
            elif letter == b"J":
                self.lines[self.row] = self.lines[self.row][: self.column]
                del self.lines[self.row + 1 :]
            elif numbers == b"?7":
                self.wraps = letter == b"h"
            else:
                assert letter == b"m", (numbers, letter)  # no other sequence is sent
        return self

    def down(self):
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.lines):
            self.lines.append("")

    def write(self, text):
        for char in text:
            if self.column == self.width:
                if self.wraps:
                    self.down()
                else:
                    self.column -= 1
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + char + line[self.column + 1 :]
            self.column += 1

    @property
    def shown(self):
        assert self.wraps, "left without wrapping"
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as read, os.fdopen(writer, "wb") as write:
        yield read, write


@pytest.fixture
def terminal():
    return Terminal()
