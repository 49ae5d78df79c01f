"""Reading a file of options: whose it is, which language it is in, and what it sets."""

import os
from collections.abc import Sequence
from pathlib import Path

from hvlaunch.cli.config.find import PYPROJECT
from hvlaunch.cli.config.read import ConfigFile, Settings, config_settings
from hvlaunch.cli.config.toml_tree import toml_tree
from hvlaunch.cli.config.tree import BadSyntax, Node
from hvlaunch.cli.option import Group
from hvlaunch.errors import BadUsage
from hvlaunch.owners import other_writer, writer_of_directory

__all__ = ["NotTrusted", "read_config"]

_LARGEST = 1 << 20


class NotTrusted(BadUsage):
    """Another user can change the file, which decides what runs."""


def read_config(path: str, groups: Sequence[Group], *, is_found: bool = False) -> Settings:
    """What the file sets. Raises BadUsage, as NotTrusted where others can change it.

    `is_found` is whether nobody named it: then others must not be able to put a file or a link in its place either.
    """
    name = _shown(path) if is_found else path
    try:
        file = Path(path).expanduser()
        with file.open("rb") as opened:
            writer = other_writer(os.fstat(opened.fileno())) or (_planter(path) if is_found else None)
            if writer is not None:
                raise NotTrusted(
                    f"{name}: {writer}", hint="chmod go-w on it, or a copy of your own: it decides what runs"
                )
            data = opened.read(_LARGEST + 1)
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the path; no home directory for a ~
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadUsage(f"{name}: {cause.lower()}", hint="--config-file FILE") from None
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
