"""TOML, with the line of each key."""

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from hvlaunch.cli.config.tree import BadSyntax, Node

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["toml_tree"]

_Path = tuple[str, ...]
_WHERE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")
_LAST_LINES = ("]", "}", '"""', "'''")
"""One of them is in the last line of each statement that has several."""


def toml_tree(text: str) -> Node:
    """The document. Raises BadSyntax."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = _WHERE.search(str(error))
        line = int(where[1]) if where and where[1] else text.rstrip().count("\n") + 1
        cause = _WHERE.sub("", str(error))
        raise BadSyntax(cause[:1].lower() + cause[1:], line) from None
    except RecursionError:
        raise BadSyntax("it is nested too deep") from None
    return _node(document, (), _lines(text), 1)


def _node(value: Any, path: _Path, lines: Mapping[_Path, int], line: int) -> Node:
    line = lines.get(path, line)
    if isinstance(value, dict):
        return Node({key: _node(each, (*path, key), lines, line) for key, each in value.items()}, line)
    if isinstance(value, list):
        return Node([_node(each, path, lines, line) for each in value], line)
    return Node(str(value).lower() if isinstance(value, bool) else str(value), line)


def _lines(text: str) -> dict[_Path, int]:
    """The first line of the statement that sets a key, for each key of a document that is right.

    A line ends a statement where what has come since the last one is a document by itself: no part of a statement is.
    """
    lines: dict[_Path, int] = {}
    table: _Path = ()
    statement, first = "", 1
    for number, line in enumerate(text.split("\n"), 1):
        if not statement:
            first = number
        elif not any(end in line for end in _LAST_LINES):
            statement += f"{line}\n"
            continue
        statement += f"{line}\n"
        try:
            parsed = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        paths = list(_paths(parsed))
        if statement.lstrip().startswith("["):
            lines |= {path: first for path in paths if path not in lines}
            table = max(paths, key=len)
        else:
            lines |= {(*table, *path): first for path in paths if (*table, *path) not in lines}
        statement = ""
    return lines


def _paths(table: Mapping[str, Any]) -> Iterator[_Path]:
    for key, value in table.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *path) for path in _paths(value))
