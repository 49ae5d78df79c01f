"""The state of an engine as plain data, for comparison."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

__all__ = ["snapshot"]


def snapshot(thing: Any) -> Any:
    """Return an object as its fields. A repeated object is a number in the order of first meetings."""
    return _Walk().of(thing)


class _Walk:
    def __init__(self) -> None:
        self._met: dict[int, int] = {}
        self._kept: list[Any] = []
        """Keeps every object alive, so that no id is used twice."""

    def of(self, thing: Any) -> Any:
        if thing is None or isinstance(thing, int | float | str | bytes | Enum):
            return thing
        if isinstance(thing, tuple):
            return type(thing).__name__, [self.of(part) for part in thing]
        if isinstance(thing, type) or callable(thing):
            return getattr(thing, "__qualname__", type(thing).__name__)
        number = self._met.get(id(thing))
        if number is not None:
            return "again", number
        self._met[id(thing)] = len(self._met)
        self._kept.append(thing)
        return type(thing).__name__, self._inside(thing)

    def _inside(self, thing: Any) -> Any:
        if isinstance(thing, Mapping):
            return [(self.of(key), self.of(value)) for key, value in thing.items()]
        if isinstance(thing, set | frozenset):
            return [self.of(part) for part in sorted(thing, key=_name)]
        # Journals leave out defaults, which then are attributes of the class alone.
        if is_dataclass(thing):
            return [(field.name, self.of(getattr(thing, field.name, None))) for field in fields(thing)]
        if hasattr(thing, "__dict__"):
            return [(name, self.of(value)) for name, value in sorted(vars(thing).items())]
        if hasattr(thing, "__slots__"):
            return [(name, self.of(getattr(thing, name, None))) for name in thing.__slots__]
        return [self.of(part) for part in thing]


def _name(member: Any) -> str:
    """Return a sort key of a set's member that does not depend on its memory address."""
    if hasattr(member, "start"):
        return f"{member.host}/{member.slot}/{member.start}"
    return str(getattr(member, "name", member))
