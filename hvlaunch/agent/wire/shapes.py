"""What values may be: each shape is a function that tells whether a value, as JSON gives it, fits; a form is a frame's.

Both sides check every frame that they get against a table of forms: agent/wire/orders.py has the driver's, and
driver/links/reports.py the agents'. What is not in a table is not taken.
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
    """An integer, which true and false are not."""
    return lambda value: type(value) is int and least <= value <= most


PORT = whole(1, 65535)


def number(least: float, most: float) -> Shape:
    """Whole or not, and finite."""
    return lambda value: type(value) in (int, float) and least <= value <= most


def text(most: int, *, raw: bool = False) -> Shape:
    """At most so many characters; none of them controls a terminal, unless it may be `raw`."""
    return lambda value: type(value) is str and len(value) <= most and (raw or value.isprintable())


def flag(value: Any) -> bool:
    return type(value) is bool


def address(value: Any) -> bool:
    """An IPv4 or IPv6 address, without a zone."""
    if type(value) is not str or not value.isascii() or "\0" in value:
        return False
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in value else socket.AF_INET, value)
    except OSError:
        return False
    return True


def of(*values: str) -> Shape:
    """One of these words."""
    return lambda value: type(value) is str and value in values


def or_null(shape: Shape) -> Shape:
    return lambda value: value is None or shape(value)


def several(shape: Shape, most: int) -> Shape:
    """A list."""
    return lambda value: type(value) is list and len(value) <= most and all(map(shape, value))


def pair(first: Shape, second: Shape) -> Shape:
    """A list of two."""
    return lambda value: (
        type(value) is list and len(value) == len((first, second)) and first(value[0]) and second(value[1])
    )


def exactly(shape: Shape, count: int) -> Shape:
    """A list of so many."""
    return lambda value: type(value) is list and len(value) == count and all(map(shape, value))


def mapping(name: Shape, shape: Shape, most: int) -> Shape:
    """An object with any names that fit."""
    return lambda value: (
        type(value) is dict and len(value) <= most and all(name(key) and shape(value[key]) for key in value)
    )


def record(shapes: Mapping[str, Shape], optional: Sequence[str] = ()) -> Shape:
    """An object with these names, perhaps without the `optional`, and no other."""
    return lambda value: type(value) is dict and _misfit(shapes, optional, value) is None


def _misfit(shapes: Mapping[str, Shape], optional: Sequence[str], value: Dict[str, Any]) -> Optional[str]:
    for name, shape in shapes.items():
        if name not in value:
            if name not in optional:
                return "no " + name
        elif not shape(value[name]):
            return "a wrong " + name
    if len(value) > len(shapes) or not value.keys() <= shapes.keys():
        return "more than it may have"
    return None


class Form:
    """A frame's: the fields of its header, besides what names its form, and how many bytes its body has."""

    def __init__(
        self, body: int = 0, least: int = 0, fields: Optional[Mapping[str, Shape]] = None, **more: Shape
    ) -> None:
        """At most `body` bytes, and not less than `least`; the fields are `fields` and `more`."""
        self.fields: Dict[str, Shape] = {"type": _any, **(fields or {}), **more}
        self.most = body
        self.least = least

    def misfit(self, header: Dict[str, Any], body: bytes) -> Optional[str]:
        """Why the frame is not of this form; None where it is."""
        found = _misfit(self.fields, (), header)
        if found is None and not self.least <= len(body) <= self.most:
            return "a body of %d bytes" % len(body)
        return found


class Choice:
    """A frame that has one of several forms: the field `name` says which."""

    def __init__(self, name: str, **forms: Form) -> None:
        self._name = name
        self.forms = forms
        for form in forms.values():
            form.fields[name] = _any

    def misfit(self, header: Dict[str, Any], body: bytes) -> Optional[str]:
        """As Form.misfit()."""
        chosen = header.get(self._name)
        form = self.forms.get(chosen) if type(chosen) is str else None
        return "a wrong " + self._name if form is None else form.misfit(header, body)


def _any(value: Any) -> bool:  # noqa: ARG001 (a shape like the others)
    return True


def misfit(table: Mapping[str, Union[Form, Choice]], header: Dict[str, Any], body: bytes) -> Optional[str]:
    """Why the frame is none of the table's, in one line; None where it is."""
    kind = header["type"]
    form = table.get(kind)
    if form is None:
        return "a frame of the unknown type %s" % plain(kind, _QUOTED)
    found = form.misfit(header, body)
    return None if found is None else "a frame of type %s with %s" % (kind, found)


def plain(words: str, most: int) -> str:
    """As text(most) may be: what would control a terminal is escaped as in Python, and what is too long is cut."""
    if not words.isprintable():
        words = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in words[:most])
    return words if len(words) <= most else words[: most - 3] + "..."
