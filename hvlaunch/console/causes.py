"""Errors in words: many hosts that fail alike are one line."""

import re
from collections import Counter
from collections.abc import Sequence

from hvlaunch.errors import Problem
from hvlaunch.hosts.fold import fold_hosts

__all__ = ["describe"]

_ANY_HOST, _ANY_ADDRESS = "HOST", "ADDRESS"
_ADDRESS = re.compile(
    r"(?<![\w.:])(?:[0-9]{1,3}(?:\.[0-9]{1,3}){3}|(?:[0-9a-f:]*::[0-9a-f:]*|(?:[0-9a-f]{1,4}:){7})[0-9a-f]+(?:%\w+)?)"
    r"(?![\w.]|:[0-9a-f])"
)


def describe(problem: Problem) -> list[str]:
    """The lines that a person reads; the first begins with `hvlaunch: `, the others are indented."""
    if not problem.errors:
        first, *more = str(problem).split("\n")
        return [f"hvlaunch: {first}", *(f"  {line}" for line in more)]
    of_hosts = [error for error in problem.errors if error.host is not None]
    others = [f"hvlaunch: {error}" for error in problem.errors if error.host is None]
    groups = _alike(of_hosts)
    if len(groups) == 1:
        return [f"hvlaunch: {groups[0]}", *others]
    return [f"hvlaunch: {len(of_hosts)} hosts failed:", *(f"  {line}" for line in groups), *others]


def _alike(problems: Sequence[Problem]) -> list[str]:
    """A line for each cause, in the order of the hosts. Texts that differ only in its name or address are alike."""
    exact = Counter((problem.cause, problem.hint) for problem in problems)
    groups: dict[tuple[str, str | None], list[Problem]] = {}
    for problem in problems:
        key = (problem.cause, problem.hint)
        if exact[key] == 1:
            key = (
                _without_name(problem.cause, problem),
                problem.hint and _without_name(problem.hint, problem),
            )
        groups.setdefault(key, []).append(problem)
    return [_line(group, *texts) for texts, group in groups.items()]


def _line(group: list[Problem], cause: str, hint: str | None) -> str:
    if len(group) == 1:
        return str(group[0])
    names = fold_hosts(str(problem.host) for problem in group)
    return f"{names}: {cause}" + (f"; try: {hint}" if hint else "")


def _without_name(text: str, problem: Problem) -> str:
    text = re.sub(rf"(?<![\w.-]){re.escape(str(problem.host))}(?![\w-])", _ANY_HOST, text)
    return _ADDRESS.sub(_ANY_ADDRESS, text)
