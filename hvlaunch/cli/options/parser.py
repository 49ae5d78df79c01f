"""What argparse makes of the table of options, for help and completion."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from hvlaunch.cli.options.option import Group, Option
from hvlaunch.cli.options.settings import HELP_HINT
from hvlaunch.errors import BadUsage

__all__ = ["DESCRIPTION", "Parser", "make_parser"]

_USAGE = "hvlaunch [-np N] [-H HOSTS | --hostfile FILE] [options] COMMAND [ARG ...]"
DESCRIPTION = (
    "Start COMMAND as N workers on the hosts, over ssh, with all that torch.distributed needs to find the "
    "others. Options come before COMMAND; whatever follows its first word belongs to it."
)


class Parser(argparse.ArgumentParser):
    """argparse, but errors are ours; `hint` is where there is help."""

    def __init__(self, *, hint: str = HELP_HINT, **settings: Any) -> None:
        super().__init__(**settings)
        self._hint = hint

    def error(self, message: str) -> NoReturn:
        raise BadUsage(message.removeprefix("argument "), hint=self._hint)


def make_parser(groups: Sequence[Group], describe: Callable[[Option], str]) -> Parser:
    """The parser of these options, for what looks at it: help and completion. `describe` is the text of an option in help."""
    parser = Parser(
        prog="hvlaunch", usage=_USAGE, description=DESCRIPTION, add_help=False, allow_abbrev=False
    )
    for group in groups:
        section = parser.add_argument_group(group.title, group.about.replace("`", "") or None)
        for option in group.options:
            text = describe(option).replace("%", "%%")  # argparse fills in %(...)s
            section.add_argument(*option.flags, dest=option.name, help=text, **_settings(option))
    return parser


def _settings(option: Option) -> dict[str, Any]:
    """What add_argument() is to know of an option, but for its names."""
    value = option.value
    if value is None:
        return {"action": "store_true"}
    settings: dict[str, Any] = {"action": "append"} if option.repeats else {}
    if value.choices:
        settings["choices"] = value.choices
    if value.metavars:
        settings["metavar"] = value.metavars if len(value.metavars) > 1 else value.metavars[0]
    if len(value.metavars) > 1:
        settings["nargs"] = len(value.metavars)
    return settings
