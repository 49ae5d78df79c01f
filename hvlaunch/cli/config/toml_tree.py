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
_TOKEN = re.compile(
    r'''
    """ (?:\\. | [^\\])*? "{3,5}  # a text of several lines, which may end with two quotes of its own
    | \'\'\' .*? '{3,5}
    | " (?:\\. | [^"\\])* "
    | ' [^']* '
    | \# [^\n]*
    | [][{}=\n]
    ''',
    re.DOTALL | re.VERBOSE,
)
"""What decides where a statement ends, in a document that is right: nothing within a text or a comment does."""


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
    return _node(document, (), _lines(text.replace("\r\n", "\n")), 1)


def _node(value: Any, path: _Path, lines: Mapping[_Path, int], line: int) -> Node:
    line = lines.get(path, line)
    if isinstance(value, dict):
        return Node({key: _node(each, (*path, key), lines, line) for key, each in value.items()}, line)
    if isinstance(value, list):
        return Node([_node(each, path, lines, line) for each in value], line)
    return Node(str(value).lower() if isinstance(value, bool) else str(value), line)


def _lines(text: str) -> dict[_Path, int]:
    """The first line of the statement that sets a key, for each key of a document that is right.

    Keys within a value are in the line of that value.
    """
    lines: dict[_Path, int] = {}
    table: _Path = ()
    for line, key, is_table in _keys(text):
        paths = list(_paths(tomllib.loads(key if is_table else f"{key} = 0")))
        if is_table:
            table = max(paths, key=len)
        for path in paths:
            lines.setdefault(path if is_table else (*table, *path), line)
    return lines


def _keys(text: str) -> Iterator[tuple[int, str, bool]]:
    """The line of each statement, the text of its key, and whether that is a table's, with its brackets."""
    line, start, end, depth = 1, 0, None, 0
    for token in _TOKEN.finditer(f"{text}\n"):
        mark = token[0]
        if mark == "=" and end is None:
            end = token.start()
        elif mark in ("[", "{"):
            depth += 1
        elif mark in ("]", "}"):
            depth -= 1
        elif mark == "\n" and not depth:
            statement = text[start : token.start()]
            if end is not None:
                yield line, text[start:end], False
            elif statement.lstrip().startswith("["):
                yield line, statement, True
            line, start, end = line + statement.count("\n") + 1, token.end(), None


def _paths(table: Mapping[str, Any]) -> Iterator[_Path]:
    for key, value in table.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *path) for path in _paths(value))
