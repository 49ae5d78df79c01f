"""Files of options, and variables: a check of the files' owners, TOML or YAML, then settings by the table of options.

Keys are long names, and values are those of the command line.
"""

import os
import re
import shlex
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeAlias

from hvlaunch.cli.options import BadValue, Option, OptionGroup, values
from hvlaunch.cli.options.settings import HELP_HINT, Setting, place_of, read_value
from hvlaunch.cli.options.table import COMMAND
from hvlaunch.errors import BadUsage
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.owners import other_writer, reason, writer_of_directory

__all__ = [
    "OTHERS",
    "PREFIX",
    "BadSyntax",
    "ConfigFile",
    "FileSettings",
    "NotTrusted",
    "Tree",
    "config_settings",
    "group_key",
    "key_of",
    "keys_of",
    "names_of",
    "read_config",
    "read_tree",
    "toml_tree",
    "variable_settings",
    "yaml_tree",
]

Tree: TypeAlias = str | list["Tree"] | dict[str, "Tree"] | None
"""A value of a file in either language. Scalars are text; a key without a value has None."""

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
"""Sections of horovodrun's files, and the prefix that makes option names of their keys. `enabled` is the section itself."""
_ROLES = "role"
_ROLE_KEYS = ("workers", "gpus", "hosts", "command", "policy", "for", "env")
_LIKE = 0.7
_FEW = 8
"""Most names in a hint."""

PREFIX = "HVLAUNCH_"
OTHERS = frozenset(
    f"{PREFIX}{name}"
    for name in (
        "ADDRESS", "ARRAY", "BAGGAGE", "CROSS_RANK", "CROSS_SIZE", "DRIVER", "DRIVER_CERT", "ELASTIC", "ENTRY", "HOST", "HOSTS", "JOB_ID", "JOURNAL",
        "LEASE", "LOCAL_RANK", "LOCAL_SIZE", "OWN_GPUS", "RANK", "RENDEZVOUS", "RENDEZVOUS_CERT", "ROUND", "SAVED_COMMITS", "SCRATCH", "SIZE", "SPARE", "TOKEN", "TOKEN_FILE", "TUNNEL_KEY", "WORKER",
        "WORKER_PORTS", "WORKER_TIMEOUT",
    )
)  # fmt: skip
"""Variables with another meaning, most of them for workers. Outside of workers some are also options."""
_LIKE_VARIABLE = 0.85


class ConfigFile(NamedTuple):
    """A file of options."""

    path: str
    """As shown in messages."""
    directory: str
    """Base of its relative paths."""
    is_found: bool
    """Whether hvlaunch found the file by itself."""
    table: str = ""
    """The table with its options: `tool.hvlaunch`."""


class FileSettings(NamedTuple):
    """The settings of a file."""

    always: tuple[Setting, ...]
    profiles: Mapping[str, tuple[Setting, ...]]


class _Entry(NamedTuple):
    """An option in a file."""

    option: Option
    key: str
    """The option's name in `_Names.options`."""
    called: str
    """Its name in the file."""
    table: str
    """Its table in the file."""
    value: Tree


class _Names(NamedTuple):
    """Keys of a file."""

    options: Mapping[str, Option]
    """Options by key, with names such as `no-merge` for switches."""
    groups: Mapping[str, OptionGroup]


def keys_of(option: Option) -> tuple[str, ...]:
    """Return an option's names in files and, as capitals, in variables, the usual one first."""
    names = (*option.flags, *option.aliases)
    # `-x` has no long name.
    long = tuple(name[2:] for name in names if name.startswith("--"))
    return long or (option.flags[0].lstrip("-"),)


def key_of(option: Option) -> str:
    return keys_of(option)[0]


def group_key(group: OptionGroup) -> str:
    return group.title.lower().replace(" ", "-")


def config_settings(root: Tree, file: ConfigFile, groups: Sequence[OptionGroup]) -> FileSettings:
    """Return the settings of a parsed file. Raises BadUsage with file, table and key."""
    reader = _Reader(file, _names(tuple(groups)))
    table = reader.table(root, "the file", "")
    profiles = reader.table(table.pop(_PROFILES, {}), _PROFILES, file.table)
    always = tuple(reader.settings(table, file.table))
    by_name = {}
    for name, tree in profiles.items():
        profile = reader.table(tree, name, _joined(file.table, _PROFILES))
        by_name[name] = tuple(reader.settings(profile, _joined(file.table, _PROFILES, name), is_profile=True))
    return FileSettings(always, by_name)


@cache
def _names(groups: tuple[OptionGroup, ...]) -> _Names:
    options = [option for group in groups for option in group.options]
    keys = {key: option for option in options for key in keys_of(option)}
    opposites = {name[2:]: option for option in options for name in option.opposites}
    return _Names({"command": COMMAND, **opposites, **keys}, {group_key(group): group for group in groups})


class _Reader:
    """Reads the tables of a file. `place` is always a key's table: `profiles.big`."""

    def __init__(self, file: ConfigFile, names: _Names) -> None:
        self._file = file
        self._names = names

    def table(self, tree: Tree, name: str, place: str) -> dict[str, Tree]:
        if tree is None:
            return {}
        if not isinstance(tree, dict):
            self._refuse_no_table(name, place)
        return dict(tree)

    def settings(
        self, table: Mapping[str, Tree], place: str, *, is_profile: bool = False
    ) -> Iterator[Setting]:
        """Yield the settings of the file's top level or of a profile."""
        names: dict[str, str] = {}
        for called, tree in table.items():
            for entry in self._entries(called, tree, place, is_profile=is_profile):
                option = entry.option
                # Profiles are chosen before their settings are known.
                if is_profile and option.name == "profile":
                    self._refuse(
                        entry.table, f"{entry.called} can't be set in a profile", hint="--profile NAME"
                    )
                # Alternatives of one name, `srun` and `jsrun`, are checked by merged().
                if option.name in names and option.constant is True:
                    self._refuse(entry.table, f"{entry.called} is set twice, first as {names[option.name]}")
                names[option.name] = entry.called
                yield from self._of_entry(entry)

    def _entries(self, called: str, tree: Tree, place: str, *, is_profile: bool) -> Iterator[_Entry]:
        """Yield the option of that name, or the options of that section."""
        key = _plain(called)
        inner = _joined(place, called)
        if key == _ROLES and isinstance(tree, dict):
            yield from self._roles(tree, inner)
            return
        # Both an empty section of YAML and a key without a value are None.
        is_table = isinstance(tree, dict) or (tree is None and key not in self._names.options)
        if is_table and key in self._names.groups:
            for name, value in self.table(tree, called, place).items():
                yield self._in_group(self._names.groups[key], name, value, inner)
        elif is_table and key in _HOROVODRUN:
            for name, value in self.table(tree, called, place).items():
                yield self._of_horovodrun(key, name, value, inner)
        # horovodrun's files name the controller: `controller: gloo`.
        elif key == _CONTROLLER and isinstance(tree, str):
            yield self._in_group(self._names.groups[key], tree, "true", place)
        elif key in self._names.options:
            yield _Entry(self._names.options[key], key, called, place, tree)
        else:
            sections = (*self._names.groups, *_HOROVODRUN, *(() if is_profile else (_PROFILES,)))
            if key in sections:
                self._refuse_no_table(called, place)
            self._unknown(called, place, [*self._names.options, *sections])

    def _roles(self, tables: Mapping[str, Tree], place: str) -> Iterator[_Entry]:
        """Yield the options that the tables `[role.NAME]` stand for."""
        roles: dict[str, dict[str, Tree]] = {}
        for name, tree in tables.items():
            roles[name] = self.table(tree, name, place)
            inner = _joined(place, name)
            for key, value in roles[name].items():
                if key not in _ROLE_KEYS:
                    self._unknown(key, inner, _ROLE_KEYS)
                is_right = isinstance(value, dict) if key == "env" else not isinstance(value, dict)
                values_in = (
                    value.values()
                    if isinstance(value, dict)
                    else value
                    if isinstance(value, list)
                    else [value]
                )
                if not is_right or not all(isinstance(part, str) for part in values_in):
                    self._refuse(inner, f"{key} has no such value")
            for key in ("workers", "command"):
                if key not in roles[name]:
                    self._refuse(inner, f"{key} is missing")
        for key, texts in _role_options(roles).items():
            yield _Entry(self._names.options[key], key, key, place, list(texts))

    def _in_group(self, group: OptionGroup, name: str, value: Tree, place: str) -> _Entry:
        option = self._names.options.get(_plain(name))
        if option is None:
            self._unknown(name, place, [key for option in group.options for key in keys_of(option)])
        if option not in group.options:
            homes = (key for key, other in self._names.groups.items() if option in other.options)
            home = next((f"in {key}" for key in homes), "outside of all groups")
            self._refuse(place, f"{name} is not in the group {group_key(group)}", hint=f"{name} {home}")
        return _Entry(option, _plain(name), name, place, value)

    def _of_horovodrun(self, section: str, name: str, value: Tree, place: str) -> _Entry:
        prefix = _HOROVODRUN[section]
        key = section if name == "enabled" else prefix + _plain(name)
        option = self._names.options.get(key)
        if option is None or not option.variable:
            keys = (key for key, option in self._names.options.items() if option.variable)
            names = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
            names += ["enabled"] if section in self._names.options else []
            self._unknown(name, place, [key.replace("-", "_") for key in names])
        return _Entry(option, key, name, place, value)

    def _of_entry(self, entry: _Entry) -> Iterator[Setting]:
        option, key, called, table, value = entry
        self._check_source(option, called, table)
        if value is None:
            return
        try:
            for texts in _texts(option, value):
                is_off = option.value is None and values.yes_or_no(texts[0]) is (
                    f"--{key}" in option.opposites
                )
                words = tuple(self._path(text, option) for text in texts) if option.value else ()
                yield Setting(
                    option,
                    words,
                    read_value(option, words, is_off=is_off),
                    called,
                    self._file.path,
                    self._file.is_found,
                    table,
                )
        except BadValue as error:
            self._refuse(table, f"{called}: {error}", hint=_usage(option, called))

    def _path(self, text: str, option: Option) -> str:
        """Return a path relative to the file's directory, and any other text as it is."""
        kind = option.value.path if option.value else ""
        if not kind:
            return text
        if "\0" in text:
            raise BadValue("has a NUL byte")
        # A file's relative paths must not depend on the directory in which hvlaunch starts.
        path = str(PurePosixPath(self._file.directory, os.path.expanduser(text)))  # noqa: PTH111 (a host's may be none here)
        # A repository's file must not make hvlaunch read or write files elsewhere.
        inside = os.path.realpath(self._file.directory)
        if (
            kind == "here"
            and self._file.is_found
            and os.path.commonpath([inside, os.path.realpath(path)]) != inside
        ):
            raise BadValue(f"{text} is not below the directory of this file, which hvlaunch found by itself")
        return path

    def _check_source(self, option: Option, called: str, place: str) -> None:
        flag = option.flags[-1]
        if option.source in ("command line", "no file"):
            self._refuse(place, f"{called} can't be set in a file", hint=f"{flag} on the command line")
        if option.source == "own" and self._file.is_found:
            cause = f"{called} is not allowed in a file that hvlaunch found by itself, since it decides what hvlaunch runs, shows or trusts"
            self._refuse(place, cause, hint=f"--config-file {self._file.path}, or {flag} on the command line")

    def _unknown(self, name: str, place: str, keys: Sequence[str]) -> NoReturn:
        likely = _likely(name, keys) or keys
        hint = f"one of {', '.join(likely)}" if len(likely) > 1 else likely[0]
        self._refuse(place, f"unknown key {name!r}", hint=hint if len(likely) <= _FEW else HELP_HINT)

    def _refuse_no_table(self, name: str, place: str) -> NoReturn:
        self._refuse(place, f"{name} must be a table of keys and values")

    def _refuse(self, place: str, cause: str, hint: str = HELP_HINT) -> NoReturn:
        raise BadUsage(f"{place_of(self._file.path, place)}{cause}", hint=hint)


def _role_options(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the values of the options that the tables `[role.NAME]` of a file stand for, by key."""
    texts: dict[str, list[str]] = {"role": [], "role-policy": [], "role-for": [], "role-env": []}
    for name, table in tables.items():
        command, hosts = table.get("command", ""), table.get("hosts", "")
        words = shlex.join(command) if isinstance(command, list) else command
        gpus = f"x{table['gpus']}" if "gpus" in table else ""
        at = f"@{','.join(hosts) if isinstance(hosts, list) else hosts}" if hosts else ""
        texts["role"].append(f"{name}={table.get('workers', 1)}{gpus}{at}: {words}")
        texts["role-policy"] += [f"{name}={table['policy']}"] if "policy" in table else []
        texts["role-for"] += [f"{name}={table['for']}"] if "for" in table else []
        texts["role-env"] += [f"{name}:{key}={value}" for key, value in table.get("env", {}).items()]
    return {key: values for key, values in texts.items() if values}


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)


def _usage(option: Option, called: str) -> str:
    """Describe an option's values."""
    value = option.value
    if value is None:
        return f"{called}: true or false"
    return f"{called}: {' or '.join(value.choices) or ' '.join(value.metavars)}"


def _likely(name: str, keys: Sequence[str]) -> list[str]:
    """Return likely keys: the most similar in spelling, and those with the same words (`ssh-user` for `user`)."""
    by_plain = {_plain(key): key for key in reversed(keys)}
    words = set(_plain(name).split("-"))
    longer = [key for key in by_plain if words <= set(key.split("-"))]
    close = get_close_matches(_plain(name), by_plain, 1, _LIKE)
    return [by_plain[key] for key in dict.fromkeys([*close, *(longer if len(longer) < _FEW else [])])]


def _plain(name: str) -> str:
    return name.replace("_", "-")


def _texts(option: Option, value: Tree) -> Iterator[Sequence[str]]:
    """Yield the words of each setting in a file's value; a switch has `true` or the like. Raises BadValue."""
    if isinstance(value, dict):
        if not option.value or not option.value.is_assignment:
            raise BadValue("takes no table")
        yield from ([f"{_name(name)}={_scalar(inner)}"] for name, inner in value.items())
    elif option is COMMAND:
        yield _command(
            [_scalar(inner) for inner in value] if isinstance(value, list) else values.words(_scalar(value))
        )
    elif not isinstance(value, list):
        yield _split(option, _scalar(value))
    elif option.repeats == "join":
        yield [",".join(map(_scalar, value))]
    elif option.repeats:
        yield from ([_scalar(inner)] for inner in value)
    elif _count(option) > 1:
        yield _counted([_scalar(inner) for inner in value], _count(option))
    else:
        raise BadValue("takes no list")


def _split(option: Option, text: str) -> Sequence[str]:
    count = _count(option)
    return [text] if count == 1 else _counted(values.words(text), count)


def _count(option: Option) -> int:
    return 1 if option.value is None else len(option.value.metavars) or 1


def _counted(texts: Sequence[str], count: int) -> Sequence[str]:
    if len(texts) != count:
        raise BadValue(f"takes {count} values, and not {len(texts)}")
    return texts


def _command(words: Sequence[str]) -> Sequence[str]:
    if not words:
        raise BadValue("must not be empty")
    return words


def _name(name: str) -> str:
    if not name or "=" in name:
        raise BadValue(f"{name!r} is no name")
    return name


def _scalar(value: Tree) -> str:
    if not isinstance(value, str):
        raise BadValue("has no value" if value is None else "is nested too deep")
    return value


def names_of(option: Option) -> tuple[str, ...]:
    """Return the option's variables, the usual one first; none for an option of the command line alone."""
    return () if option.source == "command line" else _variables_of(option)


def _variables_of(option: Option) -> tuple[str, ...]:
    return tuple(PREFIX + key.replace("-", "_").upper() for key in keys_of(option))


def variable_settings(
    environ: Mapping[str, str], groups: Sequence[OptionGroup], warn: Callable[[str], object]
) -> list[Setting]:
    """Return the settings of the environment; `warn` gets a line about names that look mistyped. Raises BadUsage."""
    options = {name: option for group in groups for option in group.options for name in names_of(option)}
    options[f"{PREFIX}COMMAND"] = COMMAND
    settings: list[Setting] = []
    first_names: dict[str, str] = {}
    # Sorted: errors must not depend on the order of the environment.
    for name in sorted(name for name in environ if name.startswith(PREFIX)):
        if name not in options:
            advice = _advice(name, options, groups)
            if advice and environ[name] and name not in OTHERS:
                warn(f"warning: {name} {advice}")
        elif environ[name]:
            other = first_names.setdefault(options[name].name, name)
            # HVLAUNCH_NP and HVLAUNCH_NUM_PROC would contradict each other without any order.
            if other != name and options[name].constant is True:
                raise BadUsage(f"environment: {name} and {other} are the same option", hint=f"unset {name}")
            settings += _of_variable(options[name], name, environ[name])
    return settings


def _advice(name: str, options: Collection[str], groups: Sequence[OptionGroup]) -> str | None:
    """Return what the name of a variable without effect may mean."""
    for option in (option for group in groups for option in group.options):
        if option.source == "command line" and not option.question and name in _variables_of(option):
            return f"is not read: {key_of(option)} can't be set by a variable; try: {option.flags[-1]} on the command line"
    # Stricter than for keys: variables of other programs may begin with HVLAUNCH_ too.
    close = get_close_matches(name, options, 1, _LIKE_VARIABLE)
    return f"is not an option; try: {close[0]}" if close else None


def _of_variable(option: Option, name: str, text: str) -> Iterator[Setting]:
    try:
        for texts in _variable_texts(option, text):
            is_off = option.value is None and not values.yes_or_no(texts[0])
            words = tuple(texts) if option.value else ()
            yield Setting(option, words, read_value(option, words, is_off=is_off), name, "environment")
    except BadValue as error:
        raise BadUsage(f"environment: {name}: {error}", hint=HELP_HINT) from None


def _variable_texts(option: Option, text: str) -> Iterator[Sequence[str]]:
    """Yield the words of each setting in a variable's text, split as a shell does. Raises BadValue."""
    if option is COMMAND:
        yield _command(values.words(text))
    # Options of other programs (--mpi-args) contain spaces: their text stays one value.
    elif option.repeats in ("list", "add") and option.value and not option.value.has_options:
        yield from ([word] for word in values.words(text))
    else:
        yield _split(option, text)


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
        root, ConfigFile(_file_name(path, is_found=is_found), directory, is_found, table), groups
    )


def _file_name(path: str, *, is_found: bool) -> str:
    return _shown(path) if is_found else path


def read_tree(path: str, *, is_found: bool = False) -> Tree:
    """Return the file's content. Raises BadUsage and NotTrusted, as read_config() does."""
    name = _file_name(path, is_found=is_found)
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
    # Not for variables, which are in this module too: it takes 3 ms.
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415 (as above)
    else:
        import tomli as tomllib  # noqa: PLC0415 (as above)
    try:
        return _as_texts(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        cause = str(error)
        raise BadSyntax(cause[:1].lower() + cause[1:]) from None
    except RecursionError:
        raise BadSyntax("it is nested too deep") from None


def _as_texts(value: Any) -> Tree:
    """Turn scalars into text: options read text, as they do from a command line."""
    if isinstance(value, dict):
        return {key: _as_texts(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_texts(inner) for inner in value]
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
