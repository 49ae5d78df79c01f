"""Errors in words: many hosts that fail alike are one line."""

import re
from collections import Counter

from hvlaunch.errors import HostError, HostsFailed, HvlaunchError
from hvlaunch.hosts.fold import fold_hosts

__all__ = ["describe"]

_ANY_HOST, _ANY_ADDRESS = "HOST", "ADDRESS"
_ADDRESS = re.compile(
    r"(?<![\w.:])(?:[0-9]{1,3}(?:\.[0-9]{1,3}){3}|(?:[0-9a-f:]*::[0-9a-f:]*|(?:[0-9a-f]{1,4}:){7})[0-9a-f]+(?:%\w+)?)"
    r"(?![\w.]|:[0-9a-f])"
)


def describe(error: HvlaunchError) -> list[str]:
    """The lines that a person reads; the first begins with `hvlaunch: `, the others are indented."""
    if not isinstance(error, HostsFailed):
        first, *more = str(error).split("\n")
        return [f"hvlaunch: {first}", *(f"  {line}" for line in more)]
    groups = _alike(error)
    if len(groups) == 1:
        return [f"hvlaunch: {groups[0]}"]
    return [f"hvlaunch: {len(error.errors)} hosts failed:", *(f"  {line}" for line in groups)]


def _alike(failed: HostsFailed) -> list[str]:
    """A line for each cause, in the order of the hosts. Texts that differ only in its name or address are alike."""
    exact = Counter((error.cause, error.hint) for error in failed.errors)
    groups: dict[tuple[str, str | None], list[HostError]] = {}
    for error in failed.errors:
        key = (error.cause, error.hint)
        if exact[key] == 1:
            key = (_without_name(error.cause, error), error.hint and _without_name(error.hint, error))
        groups.setdefault(key, []).append(error)
    return [_line(group, *texts) for texts, group in groups.items()]


def _line(group: list[HostError], cause: str, hint: str | None) -> str:
    if len(group) == 1:
        return str(group[0])
    names = fold_hosts(str(error.host) for error in group)
    return f"{names}: {cause}" + (f"; try: {hint}" if hint else "")


def _without_name(text: str, error: HostError) -> str:
    text = re.sub(rf"(?<![\w.-]){re.escape(str(error.host))}(?![\w-])", _ANY_HOST, text)
    return _ADDRESS.sub(_ANY_ADDRESS, text)
