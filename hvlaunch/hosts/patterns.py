"""Patterns for names of variables, as for file names: `*`, `?`, `[...]`. Pure."""

import fnmatch
import functools
from collections.abc import Callable

__all__ = ["is_pattern", "matcher"]


def is_pattern(text: str) -> bool:
    return any(mark in text for mark in "*?[")


@functools.cache
def matcher(*patterns: str) -> Callable[[str], bool]:
    """Whether a name is one of these, or matches one of them.

    Most patterns are names, or beginnings with a `*`: a regular expression for all of them takes 1 ms to make.
    """
    names = frozenset(pattern for pattern in patterns if not is_pattern(pattern))
    beginnings = tuple(
        pattern[:-1] for pattern in patterns if pattern[-1:] == "*" and not is_pattern(pattern[:-1])
    )
    others = [pattern for pattern in patterns if is_pattern(pattern) and pattern[:-1] not in beginnings]

    def matches(name: str) -> bool:
        if name in names or name.startswith(beginnings):
            return True
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in others)

    return matches
