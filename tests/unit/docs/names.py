"""What a program of the documents takes from hvlaunch, looked for there."""

import ast
import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from hvlaunch.api.options import GivenOptions

__all__ = ["unknown_names"]

_KNOWN_AS = {
    "hvlaunch": "hvlaunch",
    "hvd": "hvlaunch.torch",
    "hvt": "hvlaunch.torch",
    "elastic": "hvlaunch.torch.elastic",
}
"""What a block means that goes on with another one's imports."""


def unknown_names(program: str) -> list[str]:
    """Names and keywords that hvlaunch does not have. Raises SyntaxError."""
    tree = ast.parse(program)
    objects: dict[str, Any] = {}
    unknown: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "hvlaunch":
                    objects[alias.asname or "hvlaunch"] = import_module(
                        alias.name if alias.asname else "hvlaunch"
                    )
                    import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "hvlaunch":
            for alias in node.names:
                found = _member(import_module(node.module or ""), alias.name)
                objects[alias.asname or alias.name] = found
                unknown += [f"{node.module}.{alias.name}"] if found is None else []
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for name in (used & _KNOWN_AS.keys()) - objects.keys():
        objects[name] = import_module(_KNOWN_AS[name])
    return unknown + list(_unknown_in(tree, objects))


def _unknown_in(tree: ast.AST, objects: dict[str, Any]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = _value(node.value, objects)
            if isinstance(owner, (ModuleType, type)) and _member(owner, node.attr) is None:
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and callable(called := _value(node.func, objects)):
            keywords = [keyword.arg for keyword in node.keywords if keyword.arg]
            yield from (f"{ast.unparse(node.func)}({name}=)" for name in keywords if not _takes(called, name))


def _value(node: ast.expr, objects: dict[str, Any]) -> Any:
    """What of hvlaunch's an expression is; None where that is not known."""
    if isinstance(node, ast.Name):
        return objects.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(
        owner := _value(node.value, objects), (ModuleType, type)
    ):
        return _member(owner, node.attr)
    return None


def _member(owner: Any, name: str) -> Any:
    if isinstance(owner, ModuleType) and name in {
        one.name for one in pkgutil.iter_modules(getattr(owner, "__path__", ()))
    }:
        return import_module(f"{owner.__name__}.{name}")
    return getattr(owner, name, None)


def _takes(called: Any, keyword: str) -> bool:
    parameters = inspect.signature(called).parameters
    others = next((name for name, one in parameters.items() if one.kind is one.VAR_KEYWORD), None)
    if others == "options":  # a job's, which have types
        return keyword in parameters or keyword in GivenOptions.__annotations__
    return keyword in parameters or others is not None
