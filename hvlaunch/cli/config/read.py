"""From a file's tree to settings, by the table of options."""

import os
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import PurePosixPath
from typing import NamedTuple, NoReturn

from hvlaunch.cli.config.texts import texts_of
from hvlaunch.cli.config.tree import Node
from hvlaunch.cli.options import values
from hvlaunch.cli.options.option import BadValue, Group, Option
from hvlaunch.cli.options.settings import HELP_HINT, Setting, read_value
from hvlaunch.cli.options.table import COMMAND
from hvlaunch.errors import BadUsage

__all__ = ["ConfigFile", "Settings", "config_settings", "group_key", "key_of", "keys_of"]

_PROFILES = "profiles"
_CONTROLLER = "controller"
_HOROVODRUN = {
    "params": "",
    "autotune": "autotune-",
    "timeline": "timeline-",
    "stall-check": "stall-check-",
    "library-options": "",
    "logging": "log-",
}
"""The sections of horovodrun's files, and what their keys have before them as options. `enabled` is the section itself."""
_LIKE = 0.7
_FEW = 8
"""So many names fit into a hint."""


class ConfigFile(NamedTuple):
    """A file of options."""

    path: str
    """As messages have it."""
    directory: str
    """From which its relative paths count."""
    is_found: bool
    """Whether it was found from the current directory, and not named."""


class Settings(NamedTuple):
    """What a file sets."""

    always: tuple[Setting, ...]
    profiles: Mapping[str, tuple[Setting, ...]]


class _Entry(NamedTuple):
    option: Option
    key: str
    """The name by which the option is known."""
    called: str
    """Its name in the file."""
    node: Node


class _Names(NamedTuple):
    options: Mapping[str, Option]
    """By key, also by those that take a switch back."""
    groups: Mapping[str, Group]


def keys_of(option: Option) -> tuple[str, ...]:
    """The names of an option in a file and, in capitals, of its variable; the first is the usual one."""
    names = (*option.flags, *option.aliases)
    long = tuple(name[2:] for name in names if name.startswith("--"))
    return long or (option.flags[0].lstrip("-"),)


def key_of(option: Option) -> str:
    return keys_of(option)[0]


def group_key(group: Group) -> str:
    return group.title.lower().replace(" ", "-")


def config_settings(root: Node, file: ConfigFile, groups: Sequence[Group]) -> Settings:
    """What the tree sets. Raises BadUsage with the file and the line."""
    reader = _Reader(file, _names(tuple(groups)))
    table = reader.table(root, "the file")
    profiles = table.pop(_PROFILES, Node({}, 1))
    always = tuple(reader.settings(table))
    by_name = {
        name: tuple(reader.settings(reader.table(node, name), is_profile=True))
        for name, node in reader.table(profiles, _PROFILES).items()
    }
    return Settings(always, by_name)


@cache
def _names(groups: tuple[Group, ...]) -> _Names:
    options = [option for group in groups for option in group.options]
    keys = {key: option for option in options for key in keys_of(option)}
    opposites = {name[2:]: option for option in options for name in option.opposites}
    return _Names({"command": COMMAND, **opposites, **keys}, {group_key(group): group for group in groups})


class _Reader:
    """Reads the tables of one file."""

    def __init__(self, file: ConfigFile, names: _Names) -> None:
        self._file = file
        self._names = names

    def table(self, node: Node, name: str) -> dict[str, Node]:
        if node.value is None:
            return {}
        if not isinstance(node.value, dict):
            self._refuse_no_table(name, node.line)
        return dict(node.value)

    def settings(self, table: Mapping[str, Node], *, is_profile: bool = False) -> Iterator[Setting]:
        """Those of the file's top level, or of a profile."""
        lines: dict[str, int] = {}
        for called, node in table.items():
            for entry in self._entries(called, node, is_profile=is_profile):
                option, line = entry.option, entry.node.line
                if is_profile and option.name == "profile":
                    self._refuse(line, f"{entry.called} can't be set in a profile", hint="--profile NAME")
                if option.name in lines and option.constant is True:
                    self._refuse(line, f"{entry.called} is set twice, first in line {lines[option.name]}")
                lines[option.name] = line
                yield from self._of_entry(entry)

    def _entries(self, called: str, node: Node, *, is_profile: bool) -> Iterator[_Entry]:
        """The option of that name, or all of a section."""
        key = _plain(called)
        is_table = isinstance(node.value, dict) or (node.value is None and key not in self._names.options)
        if is_table and key in self._names.groups:
            for name, value in self.table(node, called).items():
                yield self._in_group(self._names.groups[key], name, value)
        elif is_table and key in _HOROVODRUN:
            for name, value in self.table(node, called).items():
                yield self._of_horovodrun(key, name, value)
        elif key == _CONTROLLER and isinstance(node.value, str):
            yield self._in_group(self._names.groups[key], node.value, node._replace(value="true"))
        elif key in self._names.options:
            yield _Entry(self._names.options[key], key, called, node)
        else:
            sections = (*self._names.groups, *_HOROVODRUN, *(() if is_profile else (_PROFILES,)))
            if key in sections:
                self._refuse_no_table(called, node.line)
            self._unknown(called, node.line, [*self._names.options, *sections])

    def _in_group(self, group: Group, name: str, node: Node) -> _Entry:
        option = self._names.options.get(_plain(name))
        if option is None:
            self._unknown(name, node.line, [key for each in group.options for key in keys_of(each)])
        if option not in group.options:
            homes = (key for key, each in self._names.groups.items() if option in each.options)
            home = next((f"in {key}" for key in homes), "outside of all groups")
            self._refuse(node.line, f"{name} is not in the group {group_key(group)}", hint=f"{name} {home}")
        return _Entry(option, _plain(name), name, node)

    def _of_horovodrun(self, section: str, name: str, node: Node) -> _Entry:
        prefix = _HOROVODRUN[section]
        key = section if name == "enabled" else prefix + _plain(name)
        option = self._names.options.get(key)
        if option is None or not option.variable:
            known = (key for key, each in self._names.options.items() if each.variable)
            names = [key.removeprefix(prefix) for key in known if key.startswith(prefix)]
            names += ["enabled"] if section in self._names.options else []
            self._unknown(name, node.line, [each.replace("-", "_") for each in names])
        return _Entry(option, key, name, node)

    def _of_entry(self, entry: _Entry) -> Iterator[Setting]:
        option, key, called, node = entry
        self._check_place(option, called, node.line)
        if node.value is None:
            return
        origin = f"{self._file.path}:{node.line}"
        try:
            for texts in texts_of(option, node):
                is_off = option.value is None and values.yes_or_no(texts[0]) is (
                    f"--{key}" in option.opposites
                )
                words = tuple(self._path(text, option) for text in texts) if option.value else ()
                value = read_value(option, words, is_off=is_off)
                yield Setting(option, words, value, called, origin, self._file.is_found)
        except BadValue as error:
            self._refuse(node.line, f"{called}: {error}", hint=_usage(option, called))

    def _path(self, text: str, option: Option) -> str:
        """The text; where it is a path, it counts from the file's directory."""
        kind = option.value.path if option.value else ""
        if not kind:
            return text
        if "\0" in text:
            raise BadValue("has a NUL byte")
        path = str(PurePosixPath(self._file.directory, os.path.expanduser(text)))  # noqa: PTH111 (a host's may be none here)
        inside = os.path.realpath(self._file.directory)
        if (
            kind == "here"
            and self._file.is_found
            and os.path.commonpath([inside, os.path.realpath(path)]) != inside
        ):
            raise BadValue(f"{text} is not below the directory of this file, which was not named but found")
        return path

    def _check_place(self, option: Option, called: str, line: int) -> None:
        flag = option.flags[-1]
        if option.source in ("command line", "no file"):
            self._refuse(line, f"{called} can't be set in a file", hint=f"{flag} on the command line")
        if option.source == "own" and self._file.is_found:
            cause = f"{called} is not taken from a file that was not named but found, since it decides what hvlaunch itself runs or trusts"
            self._refuse(line, cause, hint=f"--config-file {self._file.path}, or {flag} on the command line")

    def _unknown(self, name: str, line: int, known: Sequence[str]) -> NoReturn:
        likely = _likely(name, known) or known
        hint = f"one of {', '.join(likely)}" if len(likely) > 1 else likely[0]
        self._refuse(line, f"unknown key {name!r}", hint=hint if len(likely) <= _FEW else HELP_HINT)

    def _refuse_no_table(self, name: str, line: int) -> NoReturn:
        self._refuse(line, f"{name} must be a table of keys and values")

    def _refuse(self, line: int, cause: str, hint: str = HELP_HINT) -> NoReturn:
        raise BadUsage(f"{self._file.path}:{line}: {cause}", hint=hint)


def _usage(option: Option, called: str) -> str:
    """What is taken, in words."""
    value = option.value
    if value is None:
        return f"{called}: true or false"
    return f"{called}: {' or '.join(value.choices) or ' '.join(value.metavars)}"


def _likely(name: str, known: Sequence[str]) -> list[str]:
    """What was probably meant: the key that is spelt like it, and those that have all its words (`ssh-user` for `user`)."""
    keys = {_plain(key): key for key in reversed(known)}
    words = set(_plain(name).split("-"))
    longer = [key for key in keys if words <= set(key.split("-"))]
    close = get_close_matches(_plain(name), keys, 1, _LIKE)
    return [keys[key] for key in dict.fromkeys([*close, *(longer if len(longer) < _FEW else [])])]


def _plain(name: str) -> str:
    return name.replace("_", "-")
