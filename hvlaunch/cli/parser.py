"""The parser: what argparse makes of the table of options."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from hvlaunch.cli.option import BadValue, Group, Option
from hvlaunch.errors import BadUsage

__all__ = ["DESCRIPTION", "HELP_HINT", "Parser", "Question", "make_parser"]

HELP_HINT = "hvlaunch --help"

_USAGE = "hvlaunch [-np N] [-H HOSTS | --hostfile FILE] [options] COMMAND [ARG ...]"
DESCRIPTION = (
    "Start COMMAND as N workers on the hosts, over ssh, with all that torch.distributed needs to find the "
    "others. Options come before COMMAND; whatever follows its first word belongs to it."
)


class Question(Exception):
    """The user asks something, in place of a job: `option` has what, `value` belongs to it."""

    def __init__(self, option: Option, value: object) -> None:
        super().__init__(option.question)
        self.option = option
        self.value = value


class Parser(argparse.ArgumentParser):
    """argparse, but errors are ours; `hint` is where there is help."""

    def __init__(self, *, hint: str = HELP_HINT, **settings: Any) -> None:
        super().__init__(**settings)
        self._hint = hint

    def error(self, message: str) -> NoReturn:
        raise BadUsage(message.removeprefix("argument "), hint=self._hint)


def make_parser(groups: Sequence[Group], describe: Callable[[Option], str] | None = None) -> Parser:
    """The parser of these options. It leaves out of its namespace what is not given.

    `describe` is the text of an option in help; None is for a parser that nobody asks for help.
    """
    parser = Parser(
        prog="hvlaunch",
        usage=_USAGE,
        description=DESCRIPTION,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for group in groups:
        section = parser.add_argument_group(group.title, group.about.replace("`", "") or None)
        exclusive: dict[str, argparse._MutuallyExclusiveGroup] = {}
        for option in group.options:
            if option.excludes and option.excludes not in exclusive:
                exclusive[option.excludes] = section.add_mutually_exclusive_group()
            place = exclusive.get(option.excludes, section)
            names = option.flags if describe else (*option.flags, *option.aliases)
            action = place.add_argument(*names, dest=option.name, **_settings(option))
            action.option_strings = list(option.flags)  # what messages call it
            action.help = describe and describe(option).replace("%", "%%")  # argparse fills in %(...)s
    return parser


def _settings(option: Option) -> dict[str, Any]:
    """What add_argument() is to know of an option, but for its names."""
    value = option.value
    settings: dict[str, Any] = {}
    if value is None:
        settings = {"action": "store_const", "const": option.constant}
    else:
        if value.read is not str:
            settings["type"] = _checked(value.read)
        if value.choices:
            settings["choices"] = value.choices
        if value.metavars:
            settings["metavar"] = value.metavars if len(value.metavars) > 1 else value.metavars[0]
        if len(value.metavars) > 1:
            settings["nargs"] = len(value.metavars)
        if option.repeats:
            settings["action"] = "append" if option.repeats == "list" else _Join
    if option.question:
        settings |= {"action": _Ask, "const": option}
        settings.setdefault("nargs", 0 if value is None else None)
    return settings


def _checked(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def read_text(text: str) -> Any:
        try:
            return read(text)
        except BadValue as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_text


class _Ask(argparse.Action):
    """Raises Question with its option, which is `const`."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        _namespace: argparse.Namespace,
        values: object,
        _flag: str | None = None,
    ) -> NoReturn:
        raise Question(self.const, values)


class _Join(argparse.Action):
    """Adds each value to the last one, with a comma: `-H a -H b`, as with mpirun."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        _flag: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, str(values) if before is None else f"{before},{values}")
