"""YAML, with the line of each value. Its scalars stay texts: `off` is no `False`."""

import re
from typing import Any

from hvlaunch.cli.config.tree import BadSyntax, Node
from hvlaunch.errors import BadUsage

__all__ = ["yaml_tree"]

_DEEPEST = 6
_MOST = 100_000
_NULL = "tag:yaml.org,2002:null"
_MERGE = "tag:yaml.org,2002:merge"
_SURROGATE = re.compile("[\ud800-\udfff]")
"""PyYAML takes half of a pair for a character, as an escape of a quoted text."""


def yaml_tree(text: str, source: str) -> Node:
    """The document; `source` names it where PyYAML is missing. Raises BadSyntax, BadUsage."""
    try:
        import yaml  # noqa: PLC0415 (it is an extra)
    except ImportError:
        hint = "pip install 'hvlaunch[yaml]', or the same as TOML, in a file whose name ends with .toml"
        raise BadUsage(f"{source}: PyYAML, which reads YAML, is not installed", hint=hint) from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return Node({}, 1) if root is None else _Converter().node(root, 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise BadSyntax(str(error.problem or error.context), mark.line + 1 if mark else 0) from None
    except yaml.YAMLError as error:
        raise BadSyntax(str(error).partition("\n")[0]) from None
    except RecursionError:
        raise BadSyntax("it is nested too deep") from None


class _Converter:
    """Makes the tree of PyYAML's nodes. Aliases can make a short text a large tree, so its size is bounded."""

    def __init__(self) -> None:
        self._count = 0

    def node(self, node: Any, depth: int) -> Node:
        line = node.start_mark.line + 1
        self._count += 1
        if depth > _DEEPEST:
            raise BadSyntax("it is nested too deep", line)
        if self._count > _MOST:
            raise BadSyntax(f"it has more than {_MOST} values", line)
        match node.id:
            case "mapping":
                return Node(self._table(node, depth), line)
            case "sequence":
                return Node([self.node(each, depth + 1) for each in node.value], line)
            case _:
                return Node(None if node.tag == _NULL else _text(node), line)

    def _table(self, node: Any, depth: int) -> dict[str, Node]:
        """What the table itself sets counts more than what it merges (`<<`), of which the first counts most."""
        table: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.id != "scalar":
                raise BadSyntax("a key must be a word", line)
            if key.tag == _MERGE:
                for each in value.value if value.id == "sequence" else [value]:
                    merged = self._merged(each, depth, line) | merged
                continue
            name = _text(key)
            if name in table:
                raise BadSyntax(f"{name} is set twice, first in line {table[name].line}", line)
            table[name] = self.node(value, depth + 1)._replace(line=line)
        return merged | table

    def _merged(self, node: Any, depth: int, line: int) -> dict[str, Node]:
        if node.id != "mapping":
            raise BadSyntax("<< takes a table, or a list of tables", line)
        table = self.node(node, depth).value
        return table if isinstance(table, dict) else {}


def _text(scalar: Any) -> str:
    text = str(scalar.value)
    if not text.isascii() and _SURROGATE.search(text):
        raise BadSyntax("an escape that is no character", scalar.start_mark.line + 1)
    return text
