"""What a file says, whichever language it is in: texts, lists and tables, each with its line."""

from typing import NamedTuple

__all__ = ["BadSyntax", "Node"]


class Node(NamedTuple):
    """A value of a file."""

    value: "str | list[Node] | dict[str, Node] | None"
    """A scalar is its text; None is a key without a value."""
    line: int


class BadSyntax(Exception):
    """The text is not what it should be; `line` is where, 0 if that is not known."""

    def __init__(self, cause: str, line: int = 0) -> None:
        super().__init__(cause)
        self.line = line
