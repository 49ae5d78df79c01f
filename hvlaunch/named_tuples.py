"""Named tuples that cost a start little: `typing.NamedTuple` compiles a constructor for each class, which most jobs never call.

A start makes 180 such classes. This one takes 8 us for each, typing's 50 to 70.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

__all__ = ["NamedTuple"]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from inspect import Signature
    from typing import Any, NamedTuple

    from typing_extensions import Self
else:
    try:
        from _collections import _tuplegetter
    except ImportError:  # another Python than CPython

        def _tuplegetter(index: int, doc: str | None) -> property:
            return property(itemgetter(index), doc=doc)

    def _constructor(cls: type) -> Callable[..., Any]:
        """Return the constructor of a class, which is compiled the first time."""
        owner = next(base for base in cls.__mro__ if "_fields" in base.__dict__)
        if owner.__new__ is _compile_and_call:
            words = "".join(f"{field}, " for field in owner._fields)
            text = f"lambda cls, {words}: new(cls, ({words}))"
            # eval() of a text would make Python forget that an interrupt ended the program: no death by SIGINT, but code 1.
            code = compile(text, f"<{owner.__name__}>", "eval")
            new = eval(code, {"new": tuple.__new__, "__builtins__": {}})  # noqa: S307 (made of the names of fields)
            new.__name__ = "__new__"
            new.__defaults__ = tuple(owner._field_defaults.values()) or None
            new.__annotations__ = owner.__annotations__
            owner.__new__ = new
        return owner.__new__

    def _compile_and_call(cls: type, /, *values: Any, **named: Any) -> tuple[Any, ...]:
        return _constructor(cls)(cls, *values, **named)

    class _Signature:
        """The fields of a class, for `help()` and other programs that inspect it."""

        def __get__(self, instance: object, owner: type) -> Signature:
            from inspect import signature  # noqa: PLC0415 (5 ms)

            shown = signature(_constructor(owner))
            return shown.replace(parameters=[*shown.parameters.values()][1:])

    class _Tuple(tuple):
        """What all classes have in common."""

        __slots__ = ()
        __signature__ = _Signature()

        @classmethod
        def _make(cls, values: Iterable[Any]) -> Self:
            """Return an instance with these values, in order. Raises TypeError."""
            return cls(*values)

        def _replace(self, /, **changes: Any) -> Self:
            """Return a copy with other values. Raises ValueError for unknown fields."""
            copy = self._make(map(changes.pop, self._fields, self))
            if changes:
                raise ValueError(f"Got unexpected field names: {list(changes)!r}")
            return copy

        __replace__ = _replace

        def _asdict(self) -> dict[str, Any]:
            return dict(zip(self._fields, self, strict=True))

        def __repr__(self) -> str:
            values = ", ".join(f"{field}={value!r}" for field, value in zip(self._fields, self, strict=True))
            return f"{type(self).__name__}({values})"

        def __getnewargs__(self) -> tuple[Any, ...]:
            return tuple(self)

    class _Maker(type):
        """Makes the classes, whose own type is `type`: Python compares with such classes faster."""

        def __new__(cls, name: str, _bases: tuple[type, ...], space: dict[str, Any]) -> type:
            # Since Python 3.14 a function has the annotations; 1 asks for their values.
            annotate = space.get("__annotate_func__") or space.get("__annotate__")
            fields = tuple(annotate(1) if annotate else space.get("__annotations__", ()))
            more = {
                "_fields": fields,
                "_field_defaults": {field: space[field] for field in fields if field in space},
                "__match_args__": fields,
                "__slots__": (),
                "__new__": _compile_and_call,
                **{field: _tuplegetter(index, None) for index, field in enumerate(fields)},
            }
            return type(name, (_Tuple,), {**space, **more})

    NamedTuple = type.__new__(
        _Maker,
        "NamedTuple",
        (),
        {"__doc__": "As `typing.NamedTuple`: the annotations of a class are the fields."},
    )
