"""Reading files of options: a check of their owners, then TOML or YAML, then settings."""

import os
import re
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvlaunch.cli.config.read import ConfigFile, FileSettings, Tree, config_settings
from hvlaunch.cli.options import OptionGroup
from hvlaunch.errors import BadUsage
from hvlaunch.owners import other_writer, reason, writer_of_directory

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["BadSyntax", "NotTrusted", "read_config", "read_tree", "toml_tree", "yaml_tree"]

_LARGEST = 1 << 20
_PYPROJECT = "pyproject.toml"
_TABLE_OF_PYPROJECT = ("tool", "hvlaunch")
_OWN_HINT = "chmod go-w on it, or a copy of your own: it decides what runs"
_OTHER_NAME_HINT = "another name for it"

_DEEPEST = 6
_MOST_VALUES = 100_000
_YAML_NULL = "tag:yaml.org,2002:null"
_YAML_MERGE = "tag:yaml.org,2002:merge"
_SURROGATE = re.compile("[\ud800-\udfff]")


class NotTrusted(BadUsage):
    """Another user can change or replace a file of options, which decides what runs.

    Try: `chmod go-w FILE`, or a copy of your own that `--config-file` names (docs/reference/trusted-files.md).
    """


class BadSyntax(Exception):
    """The text is not TOML or YAML. `line` is 0 if the message says where, or the line is unknown."""

    def __init__(self, cause: str, line: int = 0) -> None:
        super().__init__(cause)
        self.line = line


def read_config(path: str, groups: Sequence[OptionGroup], *, is_found: bool = False) -> FileSettings:
    """Return the file's settings. Raises BadUsage, and NotTrusted if other users can change the file.

    `is_found`: no user named the file. It must then be a regular file in a directory where no other user can put a
    file or a link.
    """
    root = read_tree(path, is_found=is_found)
    table = ""
    if Path(path).name == _PYPROJECT:
        table = ".".join(_TABLE_OF_PYPROJECT)
        for key in _TABLE_OF_PYPROJECT:
            root = root.get(key, {}) if isinstance(root, dict) else root
    # Path.cwd() is asked only for relative paths: the directory may be deleted.
    file = Path(path).expanduser()
    directory = str(file.parent if file.is_absolute() else Path.cwd() / file.parent)
    return config_settings(
        root, ConfigFile(_name(path, is_found=is_found), directory, is_found, table), groups
    )


def _name(path: str, *, is_found: bool) -> str:
    return _shown(path) if is_found else path


def read_tree(path: str, *, is_found: bool = False) -> Tree:
    """Return the file's content. Raises BadUsage and NotTrusted, as read_config() does."""
    name = _name(path, is_found=is_found)
    try:
        file = Path(path).expanduser()
        data = _found_bytes(path, name) if is_found else _bytes(str(file), name)
    # ValueError: a NUL in the path. RuntimeError: no home directory for a ~.
    except (OSError, ValueError, RuntimeError) as error:
        cause = reason(error) if isinstance(error, OSError) else str(error).lower()
        raise BadUsage(f"{name}: {cause}", hint="--config-file FILE") from None
    # Larger files are no files of options, and would take memory and time to parse.
    if len(data) > _LARGEST:
        raise BadUsage(f"{name}: it is longer than {_LARGEST >> 20} MiB", hint="--config-file FILE")
    try:
        text = data.decode("utf-8-sig")
        return toml_tree(text) if _language(name) == "TOML" else yaml_tree(text, name)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadUsage(f"{name}:{line}: not UTF-8 text", hint="save it as UTF-8") from None
    except BadSyntax as error:
        place = f"{name}:{error.line}" if error.line else name
        raise BadUsage(
            f"{place}: {error}", hint=f"docs/reference/config.md has examples of {_language(name)}"
        ) from None


def _language(name: str) -> str:
    return "TOML" if name.endswith(".toml") else "YAML"


def _shown(path: str) -> str:
    """Return the path relative to the current directory, unless it leads out of this directory."""
    try:
        relative = os.path.relpath(path)
    except OSError:
        return path
    return path if relative.startswith("..") else relative


def _found_bytes(path: str, name: str) -> bytes:
    """Read a file of options that hvlaunch found by itself."""
    try:
        # Owners are checked before the file is opened: opening another user's link may block for ever.
        writer = _planter(path)
        if writer is not None:
            raise NotTrusted(f"{name}: {writer}", hint=_OWN_HINT)
        return _bytes(path, name, only_regular=True)
    except OSError as error:
        if _is_own_regular(path):
            raise
        raise NotTrusted(f"{name}: {reason(error)}", hint=_OTHER_NAME_HINT) from None


def _bytes(path: str, name: str, *, only_regular: bool = False) -> bytes:
    """Read the file, up to a byte more than the limit. Raises OSError, BadUsage."""
    with open(path, "rb", opener=_opened_at_once) as file:
        status = os.fstat(file.fileno())
        # The open file is checked, not the path, which could be replaced in between.
        writer = other_writer(status)
        if writer is not None:
            raise NotTrusted(f"{name}: {writer}", hint=_OWN_HINT)
        if only_regular and not stat.S_ISREG(status.st_mode):
            raise NotTrusted(f"{name}: it is not a regular file", hint=_OTHER_NAME_HINT)
        # A shell's `<(command)` is a pipe, possibly with a slow writer: read to the end.
        os.set_blocking(file.fileno(), True)
        data = file.read(_LARGEST + 1)
    if not data and stat.S_ISFIFO(status.st_mode):
        raise BadUsage(f"{name}: it is a pipe, and no data arrived", hint="--config-file FILE")
    return data


def _opened_at_once(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _is_own_regular(path: str) -> bool:
    try:
        status = Path(path).stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()


def _planter(path: str) -> str | None:
    """Return how another user could have put this file, or a link to it, here; None if no user could."""
    status = os.lstat(path)
    if status.st_uid not in (os.getuid(), 0):
        return other_writer(status)
    return writer_of_directory(str(Path(path).parent))


def toml_tree(text: str) -> Tree:
    """Parse TOML. Raises BadSyntax, whose text has line and column."""
    try:
        return _texts(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        cause = str(error)
        raise BadSyntax(cause[:1].lower() + cause[1:]) from None
    except RecursionError:
        raise BadSyntax("it is nested too deep") from None


def _texts(value: Any) -> Tree:
    """Turn scalars into text: options read text, as they do from a command line."""
    if isinstance(value, dict):
        return {key: _texts(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_texts(inner) for inner in value]
    return str(value).lower() if isinstance(value, bool) else str(value)


def yaml_tree(text: str, source: str) -> Tree:
    """Parse YAML; `source` names the text if PyYAML is missing. Raises BadSyntax, BadUsage.

    Scalars stay text: `off` is not `False`.
    """
    try:
        import yaml  # noqa: PLC0415 (it is an extra)
    except ImportError:
        hint = "pip install 'hvlaunch[yaml]', or the same as TOML, in a file whose name ends with .toml"
        raise BadUsage(f"{source}: PyYAML, which reads YAML, is not installed", hint=hint) from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return {} if root is None else _YamlConverter().tree(root, 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise BadSyntax(str(error.problem or error.context), mark.line + 1 if mark else 0) from None
    except yaml.YAMLError as error:
        raise BadSyntax(str(error).partition("\n")[0]) from None
    except RecursionError:
        raise BadSyntax("it is nested too deep") from None


class _YamlConverter:
    """Turn PyYAML's nodes into a tree of limited size: aliases can make a large tree of a short text."""

    def __init__(self) -> None:
        self._count = 0

    def tree(self, node: Any, depth: int) -> Tree:
        self._count += 1
        if depth > _DEEPEST:
            raise BadSyntax("it is nested too deep", _line(node))
        if self._count > _MOST_VALUES:
            raise BadSyntax(f"it has more than {_MOST_VALUES} values", _line(node))
        match node.id:
            case "mapping":
                return self._table(node, depth)
            case "sequence":
                return [self.tree(inner, depth + 1) for inner in node.value]
            case _:
                return None if node.tag == _YAML_NULL else _yaml_text(node)

    def _table(self, node: Any, depth: int) -> dict[str, Tree]:
        """Convert a table. Its own keys override merged tables (`<<`), and earlier merged tables override later ones."""
        table: dict[str, Tree] = {}
        merged: dict[str, Tree] = {}
        lines: dict[str, int] = {}
        for key, value in node.value:
            if key.id != "scalar":
                raise BadSyntax("a key must be a word", _line(key))
            if key.tag == _YAML_MERGE:
                for inner in value.value if value.id == "sequence" else [value]:
                    merged = self._merged(inner, depth, _line(key)) | merged
                continue
            name = _yaml_text(key)
            # PyYAML takes the last of two equal keys without a word.
            if name in table:
                raise BadSyntax(f"{name} is set twice, first in line {lines[name]}", _line(key))
            lines[name] = _line(key)
            table[name] = self.tree(value, depth + 1)
        return merged | table

    def _merged(self, node: Any, depth: int, line: int) -> dict[str, Tree]:
        if node.id != "mapping":
            raise BadSyntax("<< takes a table, or a list of tables", line)
        table = self.tree(node, depth)
        return table if isinstance(table, dict) else {}


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _yaml_text(scalar: Any) -> str:
    text = str(scalar.value)
    # PyYAML reads an escape of half a surrogate pair as a character, which no system call takes.
    if not text.isascii() and _SURROGATE.search(text):
        raise BadSyntax("an escape that is no character", _line(scalar))
    return text
