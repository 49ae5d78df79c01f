"""The commands of --setup, and the short forms of --env: each has a file beside this one, with its command and the files of its key."""

import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any

from hvlaunch.errors import BadUsage
from hvlaunch.job import SetupOptions
from hvlaunch.named_tuples import NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["BadForm", "SetupForm", "form_of", "parse_form", "setup_options"]

_KEY = (
    *("*.lock", "requirements*.txt", "constraints*.txt", "pylock*.toml", "conda-lock.yml", "environment.yml"),
    *("environment.yaml", "pixi.toml", "pyproject.toml", "setup.py", "setup.cfg", ".python-version"),
)
"""Files that say what an environment has."""


class BadForm(ValueError):
    """A file that is no form. The text begins with the file's name, and the key's, if it is about one."""


class SetupForm(NamedTuple):
    """A file of this directory."""

    command: str
    """Text for the host's shell; it builds an environment at $VIRTUAL_ENV."""
    keys: tuple[str, ...]
    """Patterns of files: an environment is used again while none of them has changed."""


def setup_options(names: Sequence[str], command: str | None, key_files: Sequence[str]) -> SetupOptions | None:
    """Return the setup of a job with these forms, this command and these further files of the key. Raises BadUsage."""
    if command is None and not names:
        if key_files:
            raise BadUsage("--setup-key is for --setup and --env", hint="--setup COMMAND")
        return None
    if len(set(names)) > 1:
        raise BadUsage(f"--env {names[0]} and --env {names[1]} build two environments", hint="one of them")
    for file in key_files:
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or not file.isprintable():
            cause = f"--setup-key {file!r} is no file below the working directory"
            raise BadUsage(cause, hint="--setup-key uv.lock")
    commands = [] if command is None else [command]
    if not names:
        return SetupOptions(tuple(commands), _KEY, tuple(key_files))
    form = form_of(names[0])
    return SetupOptions((form.command, *commands), form.keys, tuple(key_files))


def form_of(name: str) -> SetupForm:
    """Return the form of this name, which the table of options permits. Raises BadForm."""
    file = f"{name}.toml"
    return parse_form(file, (files(__name__) / file).read_text(encoding="utf-8"))


def parse_form(file: str, text: str) -> SetupForm:
    """Return the form in the text of a file. Raises BadForm."""
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadForm(f"{file}: {error}") from None
    for key in table.keys() - set(SetupForm._fields):
        raise BadForm(f"{file}: {key}: unknown; a form has {', '.join(SetupForm._fields)}")
    command, keys = table.get("command"), table.get("keys")
    if not isinstance(command, str) or not command.strip():
        raise BadForm(f"{file}: command: must be a text")
    if not isinstance(keys, list) or not keys or not all(isinstance(pattern, str) for pattern in keys):
        raise BadForm(f"{file}: keys: must be a list of texts")
    return SetupForm(command.strip(), tuple(keys))
