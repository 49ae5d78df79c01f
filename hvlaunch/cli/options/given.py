"""What the command line says: the options that it has, what holds for all others, and the user's command."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hvlaunch.cli.options.option import BadValue, Group, Option
from hvlaunch.cli.options.settings import Setting, value_of
from hvlaunch.cli.options.table import COMMAND
from hvlaunch.errors import BadUsage
from hvlaunch.job import ConsoleOptions, ElasticOptions, JobSpec, MPIOptions, SSHOptions

__all__ = ["Options", "default_of"]

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
