"""Shapes of JSON values, and forms of frames. A shape is a function from a value to True or False.

Driver and agent check each received frame against a table of forms: agent/wire/channel.py has the driver's frames, and
driver/links/reports.py the agents'. A frame without a form is an error.
"""

from __future__ import annotations

from hvlaunch.agent.quick import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Union

    Shape = Callable[[Any], bool]

__all__ = [
    "PORT",
    "Choice",
    "Form",
    "address",
    "exactly",
    "flag",
    "mapping",
    "misfit",
    "number",
    "of",
    "or_null",
    "pair",
    "plain",
    "record",
    "several",
    "text",
    "whole",
]

_QUOTED = 40


def whole(least: int, most: int) -> Shape:
    """An integer within these bounds; true and false are no integers."""
    # type() and not isinstance(): for Python, True is an int.
    return lambda value: type(value) is int and least <= value <= most


PORT = whole(1, 65535)


def number(least: float, most: float) -> Shape:
    """A finite number, whole or not."""
    return lambda value: type(value) in (int, float) and least <= value <= most


def text(most: int, *, raw: bool = False) -> Shape:
    """A text of at most so many characters; unless `raw`, without control characters for a terminal."""
    return lambda value: type(value) is str and len(value) <= most and (raw or value.isprintable())


def flag(value: Any) -> bool:
    return type(value) is bool


def address(value: Any) -> bool:
    """An IPv4 or IPv6 address, without a zone."""
    # inet_pton would stop at a null byte, and accept the text before it.
    if type(value) is not str or not value.isascii() or "\0" in value:
        return False
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in value else socket.AF_INET, value)
    except OSError:
        return False
    return True


def of(*values: str) -> Shape:
    """Any of these words."""
    return lambda value: type(value) is str and value in values


def or_null(shape: Shape) -> Shape:
    return lambda value: value is None or shape(value)


def several(shape: Shape, most: int) -> Shape:
    """A list of at most so many values."""
    return lambda value: type(value) is list and len(value) <= most and all(map(shape, value))


def pair(first: Shape, second: Shape) -> Shape:
    """A list of two values."""
    return lambda value: (
        type(value) is list and len(value) == len((first, second)) and first(value[0]) and second(value[1])
    )


def exactly(shape: Shape, count: int) -> Shape:
    """A list of exactly so many values."""
    return lambda value: type(value) is list and len(value) == count and all(map(shape, value))


def mapping(name: Shape, shape: Shape, most: int) -> Shape:
    """An object with at most so many entries; names and values have these shapes."""
    return lambda value: (
        type(value) is dict and len(value) <= most and all(name(key) and shape(value[key]) for key in value)
    )


def record(shapes: Mapping[str, Shape], optional: Sequence[str] = ()) -> Shape:
    """An object with exactly these names; the `optional` ones may be missing."""
    return lambda value: type(value) is dict and _misfit(shapes, optional, value) is None


def _misfit(shapes: Mapping[str, Shape], optional: Sequence[str], value: Dict[str, Any]) -> Optional[str]:
    for name, shape in shapes.items():
        if name not in value:
            if name not in optional:
                return "no " + name
        elif not shape(value[name]):
            return "a wrong " + name
    # Unknown names are errors: a driver or agent of the same version sends none.
    if len(value) > len(shapes) or not value.keys() <= shapes.keys():
        return "more than it may have"
    return None


class Form:
    """The form of a frame: the fields of its header, and the size of its body."""

    def __init__(
        self,
        body: int = 0,
        least: int = 0,
        fields: Optional[Mapping[str, Shape]] = None,
        optional: Sequence[str] = (),
        **more: Shape,
    ) -> None:
        """The body has `least` to `body` bytes; the header has the fields in `fields` and `more`.

        Fields in `optional` may be missing.
        """
        self._optional = optional
        self.fields: Dict[str, Shape] = {"type": _any, **(fields or {}), **more}
        self.most = body
        self.least = least

    def misfit(self, header: Dict[str, Any], body: bytes) -> Optional[str]:
        """Return why the frame does not have this form; None for a match."""
        cause = _misfit(self.fields, self._optional, header)
        if cause is None and not self.least <= len(body) <= self.most:
            return "a body of %d bytes" % len(body)
        return cause


class Choice:
    """A frame with several forms; the field `name` chooses the form."""

    def __init__(self, name: str, **forms: Form) -> None:
        self._name = name
        self.forms = forms
        # The field itself is part of each form, or misfit() would call it unknown.
        for form in forms.values():
            form.fields[name] = _any

    def misfit(self, header: Dict[str, Any], body: bytes) -> Optional[str]:
        """Return why the frame has no form; None for a match."""
        # The value may be of any type, and an unhashable one would raise TypeError in get().
        chosen = header.get(self._name)
        form = self.forms.get(chosen) if type(chosen) is str else None
        return "a wrong " + self._name if form is None else form.misfit(header, body)


def _any(value: Any) -> bool:  # noqa: ARG001 (a shape like the others)
    return True


def misfit(table: Mapping[str, Union[Form, Choice]], header: Dict[str, Any], body: bytes) -> Optional[str]:
    """Return in a line why the frame matches no form in the table; None for a match."""
    kind = header["type"]
    form = table.get(kind)
    if form is None:
        return "a frame of the unknown type %s" % plain(kind, _QUOTED)
    cause = form.misfit(header, body)
    return None if cause is None else "a frame of type %s with %s" % (kind, cause)


def plain(words: str, most: int) -> str:
    """Return a text for text(most): control characters escaped as in Python, and too long a text cut."""
    if not words.isprintable():
        words = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in words[:most])
    return words if len(words) <= most else words[: most - 3] + "..."
