"""A driver that is wanted, as who asks has said it (outside/forked.py)."""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Request", "unpacked"]


class Request(NamedTuple):
    """A driver that is wanted: what it is to run, and what it is to have."""

    program: str
    setting: str
    argv: Sequence[str]
    """With the program's own name, as in sys.argv."""
    path: Sequence[str]
    """For sys.path."""
    environ: Mapping[str, str]
    umask: int
    limits: Mapping[int, int]
    cpus: frozenset[int]
    ignored: frozenset[int]
    """Signals."""


def unpacked(data: bytes) -> Request:
    """What was packed. Raises ValueError."""
    counts, *words = os.fsdecode(data).split("\0")
    lists: list[list[str]] = []
    for count in map(int, counts.split(",")):
        if not 0 <= count <= len(words):
            raise ValueError("more words than there are")
        lists.append(words[:count])
        words = words[count:]
    [program, about, mask], argv, path, environ, limits, cpus, ignored = lists
    if words or not argv:
        raise ValueError("the words are not a request")
    return Request(
        program,
        about,
        argv,
        path,
        dict(_pair(word) for word in environ),
        int(mask),
        {int(number): int(limit) for number, limit in map(_pair, limits)},
        frozenset(map(int, cpus)),
        frozenset(map(int, ignored)),
    )


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise ValueError("a word without =")
    return name, value
