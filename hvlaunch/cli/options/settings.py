"""Settings: options with their values, merged from all sources, `Options`, which adds the defaults, and the directory of a user's own files."""

import dataclasses
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hvlaunch.cli.options import BadValue, Option, OptionGroup, UnknownOption, split
from hvlaunch.cli.options.table import COMMAND
from hvlaunch.errors import BadUsage
from hvlaunch.job import ConsoleOptions, ElasticOptions, JobSpec, LeaseOptions, MPIOptions, SSHOptions
from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "HELP_HINT",
    "Options",
    "Setting",
    "check_words",
    "config_directory",
    "default_of",
    "is_options",
    "merged",
    "paste",
    "place_of",
    "read_value",
    "typed_setting",
    "unknown_option",
    "value_of",
]

HELP_HINT = "hvlaunch --help"

_LIKE = 0.75
"""Similarity of an option that may be meant."""
_NUMBER = re.compile(r"-[0-9]*\.?[0-9]+")


# The value of a switch taken back that is an alternative to others of its name: as if not set.
NOT_SET = object()


class Setting(NamedTuple):
    """An option with its value, as set by one source."""

    option: Option
    texts: tuple[str, ...]
    """The value as words of a command line; empty for a switch."""
    value: Any
    called: str
    """The option's name in the source."""
    origin: str = ""
    """The source: `job.yaml`, `environment`; empty for the command line."""
    is_found: bool = False
    """Whether hvlaunch found the file, and no user named it."""
    table: str = ""
    """The table of the file: `profiles.big`."""


def config_directory(environ: Mapping[str, str]) -> str | None:
    """Return the directory of the user's own files; None without a home."""
    directory = environ.get("XDG_CONFIG_HOME", "")
    if not directory.startswith("/"):
        home = environ.get("HOME", "")
        if not home.startswith("/"):
            return None
        directory = f"{home}/.config"
    return f"{directory}/hvlaunch"


def unknown_option(
    word: str, flags: Sequence[str], line: Sequence[str], help_hint: str = HELP_HINT
) -> BadUsage:
    """Return the error for an unknown option of a line, with similar or longer options."""
    from difflib import get_close_matches  # noqa: PLC0415 (for errors alone)

    name = word.partition("=")[0]
    # `--` alone is a prefix of every long name, and says nothing about the one meant.
    longer = [flag for flag in flags if flag.startswith(name)] if len(name) > len("--") else []
    close = longer or get_close_matches(name, flags, n=1, cutoff=_LIKE)
    cause = f"unknown option {name!r}" + (", and options can't be cut short" if longer else "")
    if len(close) != 1:
        return BadUsage(cause, hint=", ".join([*close, f"or {help_hint}"]) if close else help_hint)
    from hvlaunch.console.masking import masked_words  # noqa: PLC0415 (its expressions take 1 ms; for errors alone)

    words = [close[0] + other[len(name) :] if other == word else other for other in masked_words(line)]
    return BadUsage(cause, hint=f"{shlex.join(words)}, or {help_hint}")


def place_of(origin: str, table: str) -> str:
    """Return the beginning of a message about a key: `job.yaml: [ssh] `; empty for the command line."""
    return (f"{origin}: " if origin else "") + (f"[{table}] " if table else "")


def typed_setting(option: Option, texts: Sequence[str], *, is_off: bool) -> Setting:
    """Return an option of the command line with its value. Raises BadUsage."""
    try:
        return Setting(option, tuple(texts), read_value(option, texts, is_off=is_off), option.flag)
    except BadValue as error:
        raise BadUsage(f"{option.flag}: {error}", hint=error.hint or HELP_HINT) from None


def read_value(option: Option, texts: Sequence[str], *, is_off: bool = False) -> Any:
    """Convert the words of an option's value; `is_off` takes a switch back. Raises BadValue."""
    if option.value is None:
        if is_off:
            return False if option.constant is True else NOT_SET
        return option.constant
    choices = option.value.choices
    values = [option.value.read(text) for text in texts]
    for text in texts:
        if choices and text not in choices:
            raise BadValue(f"invalid choice: {text!r} (choose from {', '.join(choices)})")
    return values if len(option.value.metavars) > 1 else values[0]


def check_words(option: Option, texts: Sequence[str], *, is_joined: bool) -> None:
    """Check the number of arguments; a word that looks like an option counts as missing.

    `is_joined`: the first argument is in one word with the option's name. Raises BadUsage.
    """
    value = option.value
    if value is None:
        if texts:
            raise BadUsage(f"{option.flag}: ignored explicit argument {texts[0]!r}", hint=HELP_HINT)
        return
    count = len(value.metavars) or 1
    is_forgotten = not is_joined and not value.has_options and any(map(_is_like_an_option, texts))
    if len(texts) != count or is_forgotten:
        raise BadUsage(
            f"{option.flag}: expected {'one argument' if count == 1 else f'{count} arguments'}",
            hint=HELP_HINT,
        )


def _is_like_an_option(text: str) -> bool:
    # `-` alone is a file name, and negative numbers and quoted sentences are values.
    return text.startswith("-") and text != "-" and " " not in text and not _NUMBER.fullmatch(text)


def merged(sources: Iterable[Sequence[Setting]]) -> dict[str, list[Setting]]:
    """Merge settings of several sources by option name; later sources override earlier ones.

    Raises BadUsage if a source sets two options that exclude each other.
    """
    merged_settings: dict[str, list[Setting]] = {}
    for settings in sources:
        of_source = _of_one_source(settings)
        for name, group in tuple(of_source.items()):
            # A switch that is taken back removes an earlier source's setting of the same alternative.
            if group[-1].value is NOT_SET:
                del of_source[name]
                if merged_settings.get(name, group)[-1].option == group[-1].option:
                    merged_settings.pop(name, None)
        # `-H` and `--hostfile` exclude each other: a later source's replaces an earlier source's.
        decided = {group[0].option.excludes for group in of_source.values()} - {""}
        merged_settings = {
            name: group for name, group in merged_settings.items() if group[0].option.excludes not in decided
        }
        for name, group in of_source.items():
            merged_settings[name] = (
                merged_settings.get(name, []) + group if group[0].option.repeats == "add" else group
            )
    return merged_settings


def _of_one_source(settings: Sequence[Setting]) -> dict[str, list[Setting]]:
    by_name: dict[str, list[Setting]] = {}
    exclusive: dict[str, Setting] = {}
    for setting in settings:
        word = setting.option.excludes
        other = exclusive.setdefault(word, setting) if word else setting
        if other.option != setting.option:
            place = place_of(setting.origin, setting.table)
            raise BadUsage(f"{place}{setting.called}: not allowed with {other.called}", hint=HELP_HINT)
        by_name.setdefault(setting.option.name, []).append(setting)
    return by_name


def value_of(settings: Sequence[Setting]) -> Any:
    """Return the value of an option from its settings that count."""
    values = [setting.value for setting in settings]
    match settings[0].option.repeats:
        case "list" | "add":
            return values
        case "join":
            return ",".join(values)
        case _:
            return values[-1]


_NOT_REPEATED = frozenset(
    [
        COMMAND.name,
        # The command has it already.
        *("module", "cwd"),
        # The variables that result from them are recorded, without secrets.
        *("x", "env", "env_file"),
        # The options of the files are recorded.
        *("config_file", "profile", "isolated"),
        *("dry_run", "show_config", "show_secrets", "check_build"),
    ]
)
_NO_COMMAND = Setting(COMMAND, (), (), "")
# Classes with the defaults of fields, by the first part of `Option.field`.
_PARTS = {
    "": JobSpec,
    "console": ConsoleOptions,
    "elastic": ElasticOptions,
    "mpi": MPIOptions,
    "ssh": SSHOptions,
}


class Options:
    """Options by name: `options.grace` is its value, or its default.

    `settings` has the given options and the command, `given` the options' values, and `command` the user's command.
    `is_marked`: `--` stands before the command.
    """

    def __init__(
        self, settings: Mapping[str, Sequence[Setting]], groups: Sequence[OptionGroup], *, is_marked: bool
    ) -> None:
        self.settings = settings
        self.given = {name: value_of(group) for name, group in settings.items() if name != COMMAND.name}
        self.command: tuple[str, ...] = tuple(value_of(settings.get(COMMAND.name) or [_NO_COMMAND]))
        self.is_marked = is_marked
        self._options = {option.name: option for group in groups for option in group.options}

    def __getattr__(self, name: str) -> Any:
        # `options.np` reads like a field, though options come from a table.
        if name in self.given:
            return self.given[name]
        if name not in self._options:
            raise AttributeError(name)
        return default_of(self._options[name])

    def words(self) -> Iterator[tuple[str, ...]]:
        """Yield the words of each given option for another job, with whole paths."""
        for name, settings in self.settings.items():
            for setting in settings if name not in _NOT_REPEATED else ():
                option, value = setting.option, setting.option.value
                flags = option.opposites if value is None and setting.value is False else option.flags
                is_path = value is not None and value.completion in ("file", "directory")
                texts = map(_whole, setting.texts) if is_path else setting.texts
                yield (next((flag for flag in flags if flag.startswith("--")), flags[0]), *texts)

    def found(self) -> dict[str, list[str]]:
        """Return the names set by files that no user named, by file."""
        names: dict[str, list[str]] = {}
        for settings in self.settings.values():
            for file, called in dict.fromkeys(
                (setting.origin, setting.called) for setting in settings if setting.is_found
            ):
                names.setdefault(file, []).append(called)
        return names

    @property
    def names_hostfile(self) -> bool:
        """Whether the user chose the hostfile, and not a file of options that hvlaunch found."""
        return not any(setting.is_found for setting in self.settings.get("hostfile", ()))

    def found_notes(self) -> list[str]:
        """Return a line about each file that no user named; no lines with `quiet`."""
        if self.quiet:
            return []
        return [f"options of {file}: {', '.join(names)}" for file, names in self.found().items()]

    def check_found(self) -> None:
        """Refuse weaker host keys for hosts of a file that no user named. Raises BadUsage."""
        hosts = [
            setting
            for name in ("hosts", "hostfile")
            for setting in self.settings.get(name, ())
            if setting.is_found
        ]
        # Such a file may come with a repository: the command line or a named file must accept unknown host keys.
        for keys in self.settings.get("host_keys", ())[-1:]:
            if hosts and keys.origin and keys.value != "strict":
                raise BadUsage(
                    f"{hosts[0].origin} has hosts, and was not named but found: their keys must be known, "
                    f"and {keys.origin} says {keys.called} = {keys.value}",
                    hint=f"--host-keys {keys.value}, or --config-file {hosts[0].origin}",
                )

    def given_in(self, part: str) -> list[Option]:
        """Return the given options that set a field of this part of JobSpec: `ssh`; empty for JobSpec itself."""
        return [
            option
            for name, option in self._options.items()
            if option.field and option.part == part and name in self.given
        ]

    def fields(self, part: str = "") -> dict[str, Any]:
        """Return the given values of a part of JobSpec, by field. Raises BadUsage."""
        return {option.field.rpartition(".")[2]: self._converted(option) for option in self.given_in(part)}

    def variables(self) -> dict[str, str]:
        """Return the variables for workers that options set. Raises BadUsage."""
        return {
            option.variable: self._converted(option)
            for name, option in self._options.items()
            if option.variable and name in self.given
        }

    def _converted(self, option: Option) -> Any:
        value = self.given[option.name]
        if option.convert is None:
            return value
        try:
            return option.convert(value)
        except BadValue as error:
            raise BadUsage(f"{option.flag} {error}", hint=error.hint) from None


def default_of(option: Option) -> Any:
    """Return an option's default; None if other options decide it."""
    if option.repeats in ("list", "add"):
        return []
    # Options without a field are evaluated in spec.py, which knows their defaults.
    if not option.field:
        return False if option.value is None and option.constant is True else None
    name = option.field.rpartition(".")[2]
    if option.part == "leases":  # a named tuple, which costs less at each start
        return LeaseOptions._field_defaults[name]
    (field,) = (field for field in dataclasses.fields(_PARTS[option.part]) if field.name == name)
    return None if field.default is dataclasses.MISSING else field.default


def _whole(path: str) -> str:
    # Where `~` has a meaning, it has it for another job too.
    return path if path in ("", "-") or path.startswith("~") else os.path.abspath(path)  # noqa: PTH100 (quick)


def is_options(words: Sequence[str], options: Mapping[str, Option]) -> bool:
    """Return whether the words are only options of hvlaunch with their values."""
    try:
        typed, command = split(words, options, lambda _: False)
        for option in typed:
            check_words(options[option.name], option.values, is_joined=option.is_joined)
    except (UnknownOption, BadUsage):
        return False
    return bool(typed) and not command


def paste(words: Sequence[str]) -> str:
    """Return a line of hvlaunch for a shell, with probable secrets masked."""
    from hvlaunch.console.masking import masked_words  # noqa: PLC0415 (for errors alone)

    return shlex.join(["hvlaunch", *masked_words(words)])
