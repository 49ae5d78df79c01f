"""Settings: options with their values, merged from all sources, and `Options`, which adds the defaults."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hvlaunch.cli.options.option import BadValue, Group, Option
from hvlaunch.cli.options.table import COMMAND
from hvlaunch.errors import BadUsage
from hvlaunch.job import ConsoleOptions, ElasticOptions, JobSpec, MPIOptions, SSHOptions

__all__ = [
    "HELP_HINT",
    "Options",
    "Setting",
    "check_words",
    "default_of",
    "merged",
    "place_of",
    "read_value",
    "typed_setting",
    "value_of",
]

HELP_HINT = "hvlaunch --help"

_NUMBER = re.compile(r"-[0-9]*\.?[0-9]+")


NOT_SET = object()
"""The value of a switch that is taken back, where it is one of several of the same name: as if it had not been set."""


class Setting(NamedTuple):
    """An option that was set once, and its value."""

    option: Option
    texts: tuple[str, ...]
    """Its value in words, as on the command line; a switch has none."""
    value: Any
    called: str
    """Its name where it was set."""
    origin: str = ""
    """Where it was set: `job.yaml`, `environment`; empty is the command line."""
    is_found: bool = False
    """Whether that is a file that nobody named, but that was found from the current directory."""
    table: str = ""
    """The table of the file that sets it: `profiles.big`."""


def place_of(origin: str, table: str) -> str:
    """Return what a message about a key begins with: `job.yaml: [ssh] `; empty for the command line."""
    return (f"{origin}: " if origin else "") + (f"[{table}] " if table else "")


def typed_setting(option: Option, texts: Sequence[str], *, is_off: bool) -> Setting:
    """As it stands on the command line. Raises BadUsage."""
    try:
        return Setting(option, tuple(texts), read_value(option, texts, is_off=is_off), option.flag)
    except BadValue as error:
        raise BadUsage(f"{option.flag}: {error}", hint=HELP_HINT) from None


def read_value(option: Option, texts: Sequence[str], *, is_off: bool = False) -> Any:
    """The option's value of the words; `is_off` is whether it is a switch that is taken back. Raises BadValue."""
    if option.value is None:
        if is_off:
            return False if option.constant is True else NOT_SET
        return option.constant
    choices = option.value.choices
    for text in texts:
        if choices and text not in choices:
            raise BadValue(f"invalid choice: {text!r} (choose from {', '.join(choices)})")
    values = [option.value.read(text) for text in texts]
    return values if len(option.value.metavars) > 1 else values[0]


def check_words(option: Option, texts: Sequence[str], *, is_joined: bool) -> None:
    """Whether an option of the command line has the words that it needs: one that looks like an option is none of them.

    `is_joined` is whether the first is in one word with its name. Raises BadUsage.
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
    return text.startswith("-") and text != "-" and " " not in text and not _NUMBER.fullmatch(text)


def merged(sources: Iterable[Sequence[Setting]]) -> dict[str, list[Setting]]:
    """What counts of the settings of all sources, of which a later one wins, by the options' names.

    Raises BadUsage where a source sets two options of which at most one can be set.
    """
    found: dict[str, list[Setting]] = {}
    for settings in sources:
        own = _of_one_source(settings)
        for name, each in tuple(own.items()):
            if each[-1].value is NOT_SET:
                del own[name]
                if found.get(name, each)[-1].option == each[-1].option:
                    found.pop(name, None)
        decided = {each[0].option.excludes for each in own.values()} - {""}
        found = {name: each for name, each in found.items() if each[0].option.excludes not in decided}
        for name, each in own.items():
            found[name] = found.get(name, []) + each if each[0].option.repeats == "add" else each
    return found


def _of_one_source(settings: Sequence[Setting]) -> dict[str, list[Setting]]:
    own: dict[str, list[Setting]] = {}
    exclusive: dict[str, Setting] = {}
    for each in settings:
        word = each.option.excludes
        other = exclusive.setdefault(word, each) if word else each
        if other.option != each.option:
            place = place_of(each.origin, each.table)
            raise BadUsage(f"{place}{each.called}: not allowed with {other.called}", hint=HELP_HINT)
        own.setdefault(each.option.name, []).append(each)
    return own


def value_of(settings: Sequence[Setting]) -> Any:
    """The value of an option, of all its settings that count."""
    values = [each.value for each in settings]
    match settings[0].option.repeats:
        case "list" | "add":
            return values
        case "join":
            return ",".join(values)
        case _:
            return values[-1]


_NO_COMMAND = Setting(COMMAND, (), (), "")
_PARTS = {
    "": JobSpec,
    "console": ConsoleOptions,
    "elastic": ElasticOptions,
    "mpi": MPIOptions,
    "ssh": SSHOptions,
}


class Options:
    """The options by name: `options.grace` is what was given, else its default.

    `settings` has the given ones and the command, `given` the options' values, `command` is the user's own, untouched; `is_marked` is whether `--` stands before it.
    """

    def __init__(
        self, settings: Mapping[str, Sequence[Setting]], groups: Sequence[Group], *, is_marked: bool
    ) -> None:
        self.settings = settings
        self.given = {name: value_of(each) for name, each in settings.items() if name != COMMAND.name}
        self.command: tuple[str, ...] = tuple(value_of(settings.get(COMMAND.name) or [_NO_COMMAND]))
        self.is_marked = is_marked
        self._options = {option.name: option for group in groups for option in group.options}

    def __getattr__(self, name: str) -> Any:
        if name in self.given:
            return self.given[name]
        if name not in self._options:
            raise AttributeError(name)
        return default_of(self._options[name])

    def found(self) -> dict[str, list[str]]:
        """The names of what files set that nobody named, by file."""
        names: dict[str, list[str]] = {}
        for settings in self.settings.values():
            for file, called in dict.fromkeys(
                (each.origin, each.called) for each in settings if each.is_found
            ):
                names.setdefault(file, []).append(called)
        return names

    @property
    def names_hostfile(self) -> bool:
        """Whether the hostfile, if there is one, is the user's choice, and not that of a file that nobody named."""
        return not any(each.is_found for each in self.settings.get("hostfile", ()))

    def found_notes(self) -> list[str]:
        """What the user is told of files that nobody named: a line for each, none with `quiet`."""
        if self.quiet:
            return []
        return [f"options of {file}: {', '.join(names)}" for file, names in self.found().items()]

    def check_found(self) -> None:
        """Where a file that nobody named has the hosts, only one who named it may lower the guard. Raises BadUsage."""
        hosts = [
            each for name in ("hosts", "hostfile") for each in self.settings.get(name, ()) if each.is_found
        ]
        for keys in self.settings.get("host_keys", ())[-1:]:
            if hosts and keys.origin and keys.value != "strict":
                raise BadUsage(
                    f"{hosts[0].origin} has hosts, and was not named but found: their keys must be known, "
                    f"and {keys.origin} says {keys.called} = {keys.value}",
                    hint=f"--host-keys {keys.value}, or --config-file {hosts[0].origin}",
                )

    def given_in(self, part: str) -> list[Option]:
        """The given ones that set a field in this part of a JobSpec: `ssh`; the empty part is the JobSpec itself."""
        return [
            option
            for name, option in self._options.items()
            if option.field and option.part == part and name in self.given
        ]

    def fields(self, part: str = "") -> dict[str, Any]:
        """What they set there, by field. Raises BadUsage."""
        return {option.field.rpartition(".")[2]: self._converted(option) for option in self.given_in(part)}

    def variables(self) -> dict[str, str]:
        """The variables that they set for the workers. Raises BadUsage."""
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
            raise BadUsage(f"{option.flag} {error}") from None


def default_of(option: Option) -> Any:
    """The value that holds where the option is not given; None where something else decides."""
    if option.repeats in ("list", "add"):
        return []
    if not option.field:
        return False if option.value is None and option.constant is True else None
    name = option.field.rpartition(".")[2]
    (field,) = (field for field in dataclasses.fields(_PARTS[option.part]) if field.name == name)
    return None if field.default is dataclasses.MISSING else field.default
