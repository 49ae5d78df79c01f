"""Reading a file of options: whose it is, which language it is in, and what it sets."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from hvlaunch.cli.config.find import PYPROJECT
from hvlaunch.cli.config.read import ConfigFile, Settings, config_settings
from hvlaunch.cli.config.toml_tree import toml_tree
from hvlaunch.cli.config.tree import BadSyntax, Node
from hvlaunch.cli.options.option import Group
from hvlaunch.errors import BadUsage
from hvlaunch.owners import other_writer, reason, writer_of_directory

__all__ = ["NotTrusted", "read_config"]

_LARGEST = 1 << 20
_OWN_HINT = "chmod go-w on it, or a copy of your own: it decides what runs"
_OTHER_NAME_HINT = "another name for it"


class NotTrusted(BadUsage):
    """Another user can change the file, which decides what runs, or may have put something else in its place."""


def read_config(path: str, groups: Sequence[Group], *, is_found: bool = False) -> Settings:
    """What the file sets. Raises BadUsage, as NotTrusted where others can change it.

    `is_found` is whether nobody named it: then others must not be able to put a file or a link in its place either,
    and it is a regular file, or not trusted.
    """
    name = _shown(path) if is_found else path
    try:
        file = Path(path).expanduser()
        data = _found_bytes(path, name) if is_found else _bytes(str(file), name)
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the path; no home directory for a ~
        cause = reason(error) if isinstance(error, OSError) else str(error).lower()
        raise BadUsage(f"{name}: {cause}", hint="--config-file FILE") from None
    if len(data) > _LARGEST:
        raise BadUsage(f"{name}: it is longer than {_LARGEST >> 20} MiB", hint="--config-file FILE")
    try:
        root = _tree(data.decode("utf-8-sig"), name)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadUsage(f"{name}:{line}: not UTF-8 text", hint="save it as UTF-8") from None
    except BadSyntax as error:
        where = f"{name}:{error.line}" if error.line else name
        raise BadUsage(
            f"{where}: {error}", hint=f"docs/config.md has examples of {_language(name)}"
        ) from None
    directory = str(file.parent if file.is_absolute() else Path.cwd() / file.parent)
    return config_settings(root, ConfigFile(name, directory, is_found), groups)


def _found_bytes(path: str, name: str) -> bytes:
    """Of a file that nobody named. Who it belongs to is looked at first: to open another user's link may take forever."""
    try:
        writer = _planter(path)
        if writer is not None:
            raise NotTrusted(f"{name}: {writer}", hint=_OWN_HINT)
        return _bytes(path, name, only_regular=True)
    except OSError as error:
        if _is_own_regular(path):
            raise
        raise NotTrusted(f"{name}: {reason(error)}", hint=_OTHER_NAME_HINT) from None


def _bytes(path: str, name: str, *, only_regular: bool = False) -> bytes:
    """What is in the file; one byte more than it may have tells that it is too long. Raises OSError, BadUsage.

    A pipe is read as long as somebody writes to it: a shell makes one of `<(command)`.
    """
    with open(path, "rb", opener=_opened_at_once) as file:
        status = os.fstat(file.fileno())
        writer = other_writer(status)
        if writer is not None:
            raise NotTrusted(f"{name}: {writer}", hint=_OWN_HINT)
        if only_regular and not stat.S_ISREG(status.st_mode):
            raise NotTrusted(f"{name}: it is no regular file", hint=_OTHER_NAME_HINT)
        os.set_blocking(file.fileno(), True)
        data = file.read(_LARGEST + 1)
    if not data and stat.S_ISFIFO(status.st_mode):
        raise BadUsage(f"{name}: it is a pipe, and nothing came out of it", hint="--config-file FILE")
    return data


def _opened_at_once(path: str, flags: int) -> int:
    """A pipe to which nobody writes is opened too."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _is_own_regular(path: str) -> bool:
    try:
        status = Path(path).stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()


def _tree(text: str, name: str) -> Node:
    if _language(name) == "TOML":
        root = toml_tree(text)
        return _tool_hvlaunch(root) if Path(name).name == PYPROJECT else root
    from hvlaunch.cli.config.yaml_tree import yaml_tree  # noqa: PLC0415 (most files are TOML)

    return yaml_tree(text, name)


def _tool_hvlaunch(root: Node) -> Node:
    for key in ("tool", "hvlaunch"):
        root = root.value.get(key, Node({}, 1)) if isinstance(root.value, dict) else root
    return root


def _language(name: str) -> str:
    return "TOML" if name.endswith(".toml") else "YAML"


def _planter(path: str) -> str | None:
    """Who else could have put this file, or a link to it, there."""
    status = os.lstat(path)
    if status.st_uid not in (os.getuid(), 0):
        return other_writer(status)
    return writer_of_directory(str(Path(path).parent))


def _shown(path: str) -> str:
    """The path as seen from here, where it is below."""
    try:
        relative = os.path.relpath(path)
    except OSError:
        return path
    return path if relative.startswith("..") else relative
