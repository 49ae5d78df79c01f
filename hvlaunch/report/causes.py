"""Errors in words: many hosts that fail alike are one line."""

import re
from collections import Counter
from collections.abc import Sequence

from hvlaunch.errors import Problem
from hvlaunch.hosts.parse import fold_hosts

__all__ = ["describe"]

_ANY_HOST, _ANY_ADDRESS = "HOST", "ADDRESS"
_ADDRESS = re.compile(
    r"(?<![\w.:])(?:[0-9]{1,3}(?:\.[0-9]{1,3}){3}|(?:[0-9a-f:]*::[0-9a-f:]*|(?:[0-9a-f]{1,4}:){7})[0-9a-f]+(?:%\w+)?)"
    r"(?![\w.]|:[0-9a-f])"
)


def describe(problem: Problem) -> list[str]:
    """The lines that a person reads; the first begins with `hvlaunch: `, the others are indented.

    What to try stands on a line of its own.
    """
    if not problem.errors:
        return _first(_lines([problem], problem.cause, problem.hint))
    of_hosts = [error for error in problem.errors if error.host is not None]
    blocks = [_lines(group, *texts) for texts, group in _alike(of_hosts).items()]
    others = [
        _first(_lines([error], error.cause, error.hint)) for error in problem.errors if error.host is None
    ]
    if len(blocks) == 1:
        lines = _first(blocks[0])
    else:
        lines = [
            f"hvlaunch: {len(of_hosts)} hosts failed:",
            *(f"  {line}" for block in blocks for line in block),
        ]
    return [*lines, *(line for block in others for line in block)]


def _first(lines: Sequence[str]) -> list[str]:
    """The lines of the only cause, or of one that is of no host."""
    return [f"hvlaunch: {lines[0]}", *lines[1:]]


def _alike(problems: Sequence[Problem]) -> dict[tuple[str, str | None], list[Problem]]:
    """By cause and hint, in the order of the hosts. Texts that differ only in its name, address or key are alike."""
    exact = Counter((problem.cause, problem.hint) for problem in problems)
    groups: dict[tuple[str, str | None], list[Problem]] = {}
    for problem in problems:
        key = (problem.cause, problem.hint)
        if exact[key] == 1:
            key = (
                _without_name(_without_key(problem), problem),
                problem.hint and _without_name(problem.hint, problem),
            )
        groups.setdefault(key, []).append(problem)
    return groups


def _lines(group: Sequence[Problem], cause: str, hint: str | None) -> list[str]:
    """The cause, the hosts' keys where it is about them, and what to try."""
    keys: list[str] = []
    if len(group) == 1:
        cause, hint = group[0].cause, group[0].hint
    elif all(problem.host_key for problem in group):
        cause = cause.replace("its host key is", "their host keys are", 1)
        keys = _table([(problem.host or "", *(problem.host_key or ())) for problem in group])
    names = [problem.host for problem in group if problem.host is not None]
    where = f"{fold_hosts(names)}: " if names else ""
    first, *more = f"{where}{cause}".split("\n")
    return [first, *(f"  {line}" for line in [*more, *keys]), *([f"  Try: {hint}"] if hint else [])]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _without_key(problem: Problem) -> str:
    key = " ".join(problem.host_key or ())
    return problem.cause.replace(f": {key}", "", 1) if key else problem.cause


def _without_name(text: str, problem: Problem) -> str:
    text = re.sub(rf"(?<![\w.-]){re.escape(str(problem.host))}(?![\w-])", _ANY_HOST, text)
    return _ADDRESS.sub(_ANY_ADDRESS, text)
