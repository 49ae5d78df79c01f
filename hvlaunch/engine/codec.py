"""Encode events, actions and job specifications for JSON, and decode them, by the types of their fields; the entries of a journal.

A named tuple or dataclass becomes an object with all of its fields; if it may be one of several classes, `is` has the
class. Tuples and ranges become arrays; paths and numbers that JSON lacks become strings. Decoding returns an equal
value. Both directions refuse everything else.

A journal begins with the engine's arguments (Begin). Each further entry is an event with the resulting actions. Nothing else
needs to be kept: an engine that gets the same events is in the same state, in another process too. The entries contain neither
random words nor keys of the job, which the engine never sees.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, cached_property
from itertools import zip_longest
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from hvlaunch.engine.actions import Action
from hvlaunch.engine.events import Event
from hvlaunch.job import JobSpec
from hvlaunch.named_tuples import NamedTuple

if TYPE_CHECKING:
    from hvlaunch.engine.engine import Engine

__all__ = [
    "FORMAT",
    "BadData",
    "Begin",
    "DecidedTurn",
    "Diverged",
    "Entry",
    "begin_entry",
    "begin_of",
    "decode",
    "encode",
    "prepare",
    "replay",
    "turn_entry",
]

_TAG = "is"


class BadData(ValueError):
    """A value outside of the format. `path` is its path from the outside: `event.facts.cpus`."""

    def __init__(self, cause: str, path: str = "") -> None:
        super().__init__(f"{path}: {cause}" if path else cause)
        self.cause = cause
        self.path = path

    def within(self, name: str) -> "BadData":
        """Return the same error, seen from the enclosing value's field `name`."""
        return BadData(self.cause, f"{name}.{self.path}" if self.path else name)


def encode(kind: Any, value: object) -> Any:
    """Encode the value, of a type or a union of types, for JSON. Raises BadData."""
    return _coder(kind).encode(value)


def decode(kind: Any, data: object) -> Any:
    """Decode the result of encode(). Raises BadData."""
    return _coder(kind).decode(data)


def prepare(kind: Any) -> None:
    """Inspect a type's nested types now, instead of at their first values."""
    kinds, seen = [kind], set()
    while kinds:
        current = kinds.pop()
        if current in seen:
            continue
        seen.add(current)
        kinds += get_args(current)
        if _has_fields(current):
            kinds += _object(current).kinds.values()
            _object(current).coders  # noqa: B018 (they are kept there)


class _Coder(NamedTuple):
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


@cache
def _coder(kind: Any) -> _Coder:
    origin, args = get_origin(kind), get_args(kind)
    # Before the classes: str and bool are classes, too.
    if kind in _SCALARS:
        return _SCALARS[kind]
    if origin is Literal:
        return _literal(args)
    if origin in (Union, UnionType):
        return _union(args)
    if origin is tuple:
        return _many(_coder(args[0])) if args[1:] == (...,) else _some([_coder(arg) for arg in args])
    if origin is Mapping:
        return _mapping(_coder(args[1]))
    if _has_fields(kind):
        return _Coder(_object(kind).encode, _object(kind).decode)
    raise TypeError(f"nothing is known of {kind}")


# Single values


def _is(value: object, kind: type) -> bool:
    """True if the value is of that kind; a bool is not a number."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _plain(kind: type) -> _Coder:
    def check(value: object) -> object:
        # The common case first; isinstance() below is slower.
        if value.__class__ is kind:
            return value
        if kind is not NoneType and _is(value, kind):
            return kind(value)  # an enum's number, say
        raise BadData(f"{value!r} is no {kind.__name__}")

    return _Coder(check, check)


def _encode_float(value: object) -> float | str:
    if not (_is(value, float) or _is(value, int)):
        raise BadData(f"{value!r} is no float")
    number = float(value)  # type: ignore[arg-type]
    # JSON has no infinity, which a cool-down for good is.
    return number if math.isfinite(number) else str(number)


def _decode_float(data: object) -> float:
    if _is(data, float) or _is(data, int) or data in ("inf", "-inf", "nan"):
        return float(data)  # type: ignore[arg-type]
    raise BadData(f"{data!r} is no float")


def _encode_path(value: object) -> str:
    if not isinstance(value, Path):
        raise BadData(f"{value!r} is no Path")
    return str(value)


def _decode_path(data: object) -> Path:
    if not isinstance(data, str):
        raise BadData(f"{data!r} is no Path")
    return Path(data)


def _encode_range(value: object) -> list[int]:
    if not isinstance(value, range):
        raise BadData(f"{value!r} is no range")
    return [value.start, value.stop, value.step]


def _decode_range(data: object) -> range:
    start, stop, step = _THREE_NUMBERS.decode(data)
    if not step:
        raise BadData(f"{data!r} is no range")
    return range(start, stop, step)


def _literal(choices: tuple[object, ...]) -> _Coder:
    def check(value: object) -> object:
        if not isinstance(value, str) or value not in choices:
            raise BadData(f"{value!r} is none of {choices}")
        return value

    return _Coder(check, check)


# Several in one


def _array(data: object, kind: type, size: int | None = None) -> Iterable[Any]:
    if not isinstance(data, kind) or (size is not None and len(data) != size):  # type: ignore[arg-type]
        raise BadData(f"{data!r} is no {kind.__name__}" + ("" if size is None else f" of {size}"))
    return data  # type: ignore[return-value]


def _many(item: _Coder) -> _Coder:
    """Code a tuple of any length."""
    return _Coder(
        lambda value: [item.encode(element) for element in _array(value, tuple)],
        lambda data: tuple(item.decode(element) for element in _array(data, list)),
    )


def _some(items: list[_Coder]) -> _Coder:
    """Code a tuple with a type for each element."""
    size = len(items)
    return _Coder(
        lambda value: [
            item.encode(element) for item, element in zip(items, _array(value, tuple, size), strict=True)
        ],
        lambda data: tuple(
            item.decode(element) for item, element in zip(items, _array(data, list, size), strict=True)
        ),
    )


def _mapping(item: _Coder) -> _Coder:
    def through(code: Callable[[Any], Any], value: object) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise BadData(f"{value!r} is no mapping of names")
        return {name: code(item_value) for name, item_value in value.items()}

    return _Coder(lambda value: through(item.encode, value), lambda data: through(item.decode, data))


def _union(kinds: tuple[Any, ...]) -> _Coder:
    """Code an optional type, or one of several classes told apart by name."""
    some = [kind for kind in kinds if kind is not NoneType]
    code = _coder(some[0]) if len(some) == 1 else _tagged(some)
    if len(some) == len(kinds):
        return code
    return _Coder(
        lambda value: None if value is None else code.encode(value),
        lambda data: None if data is None else code.decode(data),
    )


def _tagged(kinds: list[type]) -> _Coder:
    coders = {kind: (kind.__name__, _coder(kind)) for kind in kinds}
    by_name = dict(coders.values())

    def encode(value: object) -> dict[str, Any]:
        if value.__class__ not in coders:
            raise BadData(f"{value!r} is none of {', '.join(by_name)}")
        name, coder = coders[value.__class__]
        return {_TAG: name, **coder.encode(value)}

    def decode(data: object) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get(_TAG), str) or data[_TAG] not in by_name:
            raise BadData(f"{data!r} is none of {', '.join(by_name)}")
        return by_name[data[_TAG]].decode(
            {name: field_value for name, field_value in data.items() if name != _TAG}
        )

    return _Coder(encode, decode)


class _Object:
    """Codes a named tuple or dataclass. Its field types are inspected on first use: they may refer to it."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    @cached_property
    def kinds(self) -> dict[str, Any]:
        """Types of its fields."""
        # Not in the constructor: types may refer to each other.
        hints = get_type_hints(self._kind)
        names = (
            [field.name for field in fields(self._kind)] if is_dataclass(self._kind) else self._kind._fields  # type: ignore[attr-defined]
        )
        return {name: hints[name] for name in names}

    @cached_property
    def coders(self) -> dict[str, _Coder]:
        return {name: _coder(kind) for name, kind in self.kinds.items()}

    def encode(self, value: object) -> dict[str, Any]:
        if value.__class__ is not self._kind:
            raise BadData(f"{value!r} is no {self._kind.__name__}")
        data, name = {}, ""
        try:
            for name, coder in self.coders.items():
                data[name] = coder.encode(getattr(value, name))
        except BadData as error:
            raise error.within(name) from None
        return data

    def decode(self, data: object) -> Any:
        if not isinstance(data, dict) or data.keys() != self.coders.keys():
            raise BadData(f"{data!r} has not the fields of {self._kind.__name__}")
        values, name = {}, ""
        try:
            for name, coder in self.coders.items():
                values[name] = coder.decode(data[name])
        except BadData as error:
            raise error.within(name) from None
        return self._kind(**values)


@cache
def _object(kind: type) -> _Object:
    return _Object(kind)


def _has_fields(kind: Any) -> bool:
    return isinstance(kind, type) and (hasattr(kind, "_fields") or is_dataclass(kind))


_SCALARS: dict[Any, _Coder] = {kind: _plain(kind) for kind in (str, bool, int, NoneType)}
_SCALARS |= {
    float: _Coder(_encode_float, _decode_float),
    Path: _Coder(_encode_path, _decode_path),
    range: _Coder(_encode_range, _decode_range),
}
_THREE_NUMBERS = _some([_SCALARS[int]] * 3)


FORMAT = 1
"""Version of the format; other versions are refused."""

Entry = Mapping[str, Any]


class Begin(NamedTuple):
    """The engine's arguments, and the owner of the journal."""

    format: int
    version: str
    """Version of hvlaunch; the engine of another version may decide differently."""
    job_id: str
    spec: JobSpec
    rendezvous_port: int
    cwd: str = ""
    """The driver's working directory."""


def begin_entry(version: str, job_id: str, spec: JobSpec, rendezvous_port: int, cwd: str = "") -> Entry:
    """Make the first entry. Raises BadData."""
    entry: Entry = encode(Begin, Begin(FORMAT, version, job_id, spec, rendezvous_port, cwd))
    return entry


def begin_of(entry: Entry | None) -> Begin:
    """Return the arguments of begin_entry(). Raises BadData."""
    if entry is None:
        raise BadData("a journal without entries")
    if entry.get("format") != FORMAT:
        raise BadData(f"format {entry.get('format')!r} of a journal; {FORMAT} is known")
    begin: Begin = decode(Begin, entry)
    return begin


class DecidedTurn(NamedTuple):
    """One event, its time (seconds of the driver's clock), and the engine's actions."""

    at: float
    event: Event
    actions: tuple[Action, ...]


class Diverged(Exception):
    """The engine's actions differ from the journal's. `number` counts turns from 0."""

    def __init__(self, number: int, turn: DecidedTurn, actions: Sequence[Action]) -> None:
        pairs = zip_longest(turn.actions, actions)
        before, now = next(pair for pair in pairs if not _are_equal(*pair))
        super().__init__(
            f"turn {number}, at {turn.at:.3f}, {turn.event}: the journal has {before}, and now it is {now}"
        )
        self.number = number
        self.turn = turn
        self.actions = tuple(actions)


def turn_entry(event: Event, actions: Sequence[Action], now: float) -> Entry:
    """Make a further entry. Raises BadData."""
    entry: Entry = encode(DecidedTurn, DecidedTurn(now, event, tuple(actions)))
    return entry


def replay(entries: Iterable[Entry]) -> "Engine":
    """Return the engine after these entries: it gets each event again, and must return the same actions.

    Raises Diverged if it does not, and BadData if an entry is malformed.
    """
    from hvlaunch.engine.engine import Engine  # noqa: PLC0415 (no encoding needs it)

    remaining = iter(entries)
    begin = begin_of(next(remaining, None))
    engine = Engine(begin.spec, begin.rendezvous_port)
    # Times come from the journal: the engine has no clock.
    for number, entry in enumerate(remaining):
        turn: DecidedTurn = decode(DecidedTurn, entry)
        actions = engine.handle_or_end(turn.event, turn.at)
        if not all(_are_equal(*pair) for pair in zip_longest(turn.actions, actions)):
            raise Diverged(number, turn, actions)
    return engine


def _are_equal(first: Action | None, second: Action | None) -> bool:
    """Compare actions as data: named tuples of different classes may be equal."""
    return bool(encode(Action | None, first) == encode(Action | None, second))
