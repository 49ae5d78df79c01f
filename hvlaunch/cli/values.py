"""What flags take: texts, checked and turned into values. All raise argparse.ArgumentTypeError."""

import argparse
import math
import re
import shlex
from collections.abc import Callable
from typing import TypeVar

from hvlaunch.hosts.parse import MAX_SLOTS, is_user

__all__ = [
    "count",
    "port",
    "port_or_any",
    "ports",
    "positive",
    "ranks",
    "seconds",
    "slots",
    "some",
    "user",
    "words",
    "workers",
]

_MOST_WORKERS = 1 << 20  # more is a slip of the finger, and would eat the memory
_LAST_PORT = 65535
_LONGEST = 1_000_000.0  # seconds; poll(2) counts milliseconds in 31 bits
_RANKS = r"([0-9]{1,9})(?:-([0-9]{1,9})(?:/([0-9]{1,9}))?)?"
_Number = TypeVar("_Number", int, float)


def workers(text: str) -> int:
    return _whole(text, most=_MOST_WORKERS)


def count(text: str) -> int:
    """From 0."""
    return _whole(text, most=_MOST_WORKERS, least=0)


def slots(text: str) -> int:
    return _whole(text, most=MAX_SLOTS)


def positive(text: str) -> int:
    return _whole(text, most=_MOST_WORKERS)


def port(text: str) -> int:
    return _whole(text, most=_LAST_PORT)


def port_or_any(text: str) -> int:
    return _whole(text, most=_LAST_PORT, least=0)


def ports(text: str) -> tuple[int, int]:
    """The lowest and the highest of a range: `29500-29599`. Raises argparse.ArgumentTypeError."""
    low, dash, high = text.partition("-")
    if not dash:
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW-HIGH")
    first, last = port(low), port(high)
    if last <= first:
        raise argparse.ArgumentTypeError(f"{text!r} has not the two ports that each host needs")
    return first, last


def _whole(text: str, *, most: int, least: int = 1) -> int:
    number = _number(text, int, "whole number")
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text} is not between {least} and {most}")
    return number


def seconds(text: str) -> float:
    number = _number(text, float, "number of seconds")
    if math.isnan(number) or number <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0 seconds")
    if number > _LONGEST:
        raise argparse.ArgumentTypeError(f"{text} is more than {_LONGEST:.0f} seconds")
    return number


def _number(text: str, kind: Callable[[str], _Number], noun: str) -> _Number:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a {noun}") from None


def some(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("an empty string won't do")
    return text


def words(text: str) -> tuple[str, ...]:
    """Several words in one, quoted as for a shell. Raises argparse.ArgumentTypeError."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {str(error).lower()}") from None


def user(text: str) -> str:
    if not is_user(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a user name")
    return text


def ranks(text: str) -> tuple[range, ...]:
    """Numbers, ranges with both ends included, and steps: `0,8-15`, `0-62/2`. Raises argparse.ArgumentTypeError."""
    return tuple(_ranks_part(part.strip()) for part in text.split(","))


def _ranks_part(text: str) -> range:
    found = re.fullmatch(_RANKS, text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a rank nor a range such as 8-15")
    first = int(found[1])
    last, step = int(found[2] or first), int(found[3] or 1)
    if last < first or step == 0:
        raise argparse.ArgumentTypeError(f"{text!r} has no rank in it")
    return range(first, last + 1, step)
