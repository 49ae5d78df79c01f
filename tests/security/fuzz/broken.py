"""Frames with something about them changed."""

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from hvlaunch.agent.quick import dumps, loads
from hvlaunch.agent.wire.frames import OUTPUT_CHUNK, RELAY_CHUNK, encode

__all__ = ["VALUES", "Valid", "broken_bytes", "broken_frame", "changed_bytes", "changed_value", "piece_of"]

Valid = tuple[dict[str, Any], bytes]
"""A frame as it should be."""

VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2,
        4,
        64,
        65,
        127,
        255,
        256,
        4711,
        65535,
        65536,
        1 << 18,
        2**31,
        2**53 + 1,
    ),
    *(2**64, 10**400, -0.5, 0.5, 1e308, 5e-324),
    *("", "0", "a", "b", "stdout", "stderr", "../../.bashrc", "/etc/passwd", "data", "open", "close", "end"),
    *("10.0.0.1", "10.0.0.2", "6.6.6.6", "::1", "127.0.0.1", "1.2.3.4%eth0", "0x7f.1", "\u00e9", "a" * 64),
    *("\n", "x\nhvlaunch: all is well", "\x1b]0;x\x07", "\x00", "\ud800", "\u202e", "x" * 300, "x" * 5000),
    *("output", "exited", "relay", "hello", "credit", "KeyError: 1"),
    *([], {}, [[]], {"": None}, [0], [[9, 0.0]], [None] * 300, ["10.0.0.1"] * 300, {"eth0": ["10.0.0.1"]}),
    *([[[[[[]]]]]], [["10.0.0.100", 4711]], [["\u00e9", 1]], ["\u00e9"]),
]
_NAMES = ("more", "slot", "type", "id", "bytes", "x" * 300)
_PIECE_WORDS = (
    b"\x00\xfehvl\xfe\x00\x01",
    b"\x00\xfehvl",
    b"\x02\xfdhv",
    b"noise\n",
    b"\xff" * 18,
    b"\n",
    b"\x1c",
)


def changed_value(chance: random.Random, value: Any) -> Any:
    """One that is like it: a number near it, a part of a text; or anything."""
    how = chance.random()
    if type(value) is int and how < 0.4:
        return chance.choice(
            (value + 1, value - 1, -value, value << 20, value + 0.5 if abs(value) < 1 << 53 else 0.5)
        )
    if type(value) is str and how < 0.2:
        return chance.choice((value[:-1], value + "x", value * 2, value.upper(), value + "\n"))
    return _any_value(chance)


def _any_value(chance: random.Random) -> Any:
    value = chance.choice(VALUES)
    return deepcopy(value) if isinstance(value, list | dict) else value  # it may be changed again


def broken_frame(chance: random.Random, header: dict[str, Any], body: bytes) -> Valid:
    """The frame with one thing about it changed, or two."""
    changed: dict[str, Any] = loads(dumps(header))
    for _ in range(1 if chance.random() < 0.8 else 2):
        place: Any = changed
        while chance.random() < 0.5 and (inner := [one for one in _inside(place) if one]):
            place = chance.choice(inner)
        body = _break_one(chance, place, body)
    return changed, body


def _inside(place: Any) -> list[Any]:
    values = place.values() if isinstance(place, dict) else place
    return [one for one in values if isinstance(one, dict | list)]


def _break_one(chance: random.Random, place: Any, body: bytes) -> bytes:
    """What is in `place` is changed, or the body, which it gives."""
    names = [*place] if isinstance(place, dict) else [*range(len(place))]
    how = chance.randrange(7)
    if how == 0 or not names:
        sizes = (0, 1, 5000, RELAY_CHUNK + 1, OUTPUT_CHUNK, OUTPUT_CHUNK + 1)
        return chance.choice((body * 2, body[:-1], changed_bytes(chance, body), bytes(chance.choice(sizes))))
    name = chance.choice(names)
    if how == 1:
        del place[name]
    elif how == 2 and isinstance(place, dict):
        place[chance.choice(_NAMES)] = _any_value(chance)
    elif how == 2:
        place.append(_any_value(chance))
    else:
        place[name] = changed_value(chance, place[name])
    return body


def changed_bytes(chance: random.Random, data: bytes) -> bytes:
    """Some of them others, more, or fewer."""
    if not data:
        return chance.choice((b"\0", b"x", b"{}"))
    at = chance.randrange(len(data))
    end = min(len(data), at + chance.choice((0, 1, 1, 1, 2, 8, 100)))
    more = chance.choice(
        (b"", b"\0", b"\xff", b"0", chance.randbytes(1), chance.randbytes(4), data[at:end] * 2)
    )
    return data[:at] + more + data[end:]


def broken_bytes(chance: random.Random, frames: Sequence[Valid], likely: Valid) -> bytes:
    """A frame on the wire that is none of the valid ones: `likely`, or another of `frames`, with a change."""
    while True:
        header, body = likely if chance.random() < 0.5 else chance.choice(frames)
        valid = encode(header, body)
        try:
            how = chance.random()
            data = encode(*broken_frame(chance, header, body)) if how < 0.85 else valid
            if how > 0.98:
                data = encode(_any_value(chance), body)  # a header that is no object
        except (TypeError, ValueError, OverflowError):  # no JSON, in some Pythons
            continue
        if data is valid or chance.random() < 0.03:
            data = changed_bytes(chance, data)
        if data != valid:
            return data


def piece_of(chance: random.Random, cut: Callable[[bytes], bytes], data: bytes) -> bytes:
    """The frame in pieces, as `cut` makes them, one of which may be broken as well."""
    pieces = cut(data)
    if chance.random() < 0.9:
        return pieces
    if chance.random() < 0.5:
        return changed_bytes(chance, pieces)
    at = chance.randrange(len(pieces) + 1)
    return pieces[:at] + chance.choice(_PIECE_WORDS) + pieces[at:]
