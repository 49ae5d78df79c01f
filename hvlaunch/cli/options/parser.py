"""The argparse parser and the texts that help, completion, the manual page and docs/reference/options.md share."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from hvlaunch.cli.options import Option, OptionGroup
from hvlaunch.cli.options.settings import HELP_HINT, default_of, unknown_option
from hvlaunch.errors import BadUsage

__all__ = ["DESCRIPTION", "EXAMPLES", "EXIT_CODES", "Parser", "default_text", "make_parser", "sentences"]

_USAGE = "hvlaunch [-np N] [-H HOSTS | --hostfile FILE] [options] COMMAND [ARG ...]"
DESCRIPTION = (
    "Start COMMAND as N workers on the hosts, over ssh, with all that torch.distributed needs to find the "
    "others. Options come before COMMAND; everything after COMMAND is passed to it."
)


class Parser(argparse.ArgumentParser):
    """argparse's parser with errors as BadUsage; `hint` names a command with help."""

    def __init__(self, *, hint: str = HELP_HINT, **settings: Any) -> None:
        super().__init__(**settings)
        self._hint = hint

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words: Sequence[str] = args or ()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise BadUsage, worded as for hvlaunch's own options. argparse would print its usage and exit."""
        _, is_unknown, words = message.partition("unrecognized arguments: ")
        word, subject = words.partition(" ")[0], self.prog.removeprefix("hvlaunch ")
        if is_unknown and word.startswith("-"):
            line = [*self.prog.split(), *self._words]
            raise unknown_option(word, list(self._option_string_actions), line, self._hint)
        if is_unknown:
            raise BadUsage(f"{subject} takes no {word!r}", hint=self._hint)
        _, is_missing, names = message.partition("the following arguments are required: ")
        cause = f"{subject} needs {names}" if is_missing else message.removeprefix("argument ")
        raise BadUsage(cause, hint=self._hint)


def make_parser(groups: Sequence[OptionGroup], describe: Callable[[Option], str]) -> Parser:
    """Return a parser with these options, for help and completion. `describe` returns an option's help text."""
    parser = Parser(
        prog="hvlaunch", usage=_USAGE, description=DESCRIPTION, add_help=False, allow_abbrev=False
    )
    for group in groups:
        section = parser.add_argument_group(group.title, group.about.replace("`", "") or None)
        for option in group.options:
            # argparse substitutes %(name)s in help texts.
            text = describe(option).replace("%", "%%")
            section.add_argument(*option.flags, dest=option.name, help=text, **_settings(option))
    return parser


def _settings(option: Option) -> dict[str, Any]:
    """Return add_argument()'s arguments for an option, without its names."""
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


EXIT_CODES = (
    ("0", "all workers ended with 0"),
    ("1-125", "the first failing worker's own"),
    ("126, 127", "its command can't be executed; was not found"),
    ("128+n", "signal n ended it; 130, 143: Ctrl-C, SIGTERM ended the job"),
    ("2", "bad usage"),
    ("69", "a host can't be used, or was lost"),
    ("70", "a defect of hvlaunch"),
    ("74", "an answer could not be printed"),
    ("75", "too few workers for an elastic job"),
)
EXAMPLES = (
    ("two workers on this machine", "hvlaunch -np 2 python train.py"),
    ("eight workers on two hosts", "hvlaunch -np 8 -H gpu01:4,gpu02:4 python train.py --epochs 3"),
    (
        "one worker for each GPU of sixteen hosts, as user ml",
        "hvlaunch -H 'gpu[01-16]' --ssh-user ml python train.py",
    ),
    (
        "hosts from a file, secrets from another, NCCL's log on",
        "hvlaunch --hostfile hosts --env-file keys -x NCCL_DEBUG=INFO \\\n    python train.py",
    ),
    (
        "two to eight workers on hosts that come and go",
        "hvlaunch -np 4 --min-np 2 --max-np 8 \\\n    --host-discovery-script ./discover.sh python train.py",
    ),
    ("what would be started where", "hvlaunch --dry-run -np 8 -H gpu01:4,gpu02:4 python train.py"),
)
"""Titles and command lines."""


def default_text(option: Option) -> str:
    """Return an option's default in words: `60 s`; empty if it has none."""
    if option.default or option.value is None:
        return option.default
    value = default_of(option)
    if value in (None, (), []):
        return ""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if not option.value.choices and isinstance(value, str):
        text = f"'{text}'"
    return f"{text} {option.value.unit}".rstrip()


def sentences(option: Option) -> str:
    """Return the full help of an option, without its default."""
    repeated = "May be repeated." if option.repeats else ""
    return " ".join(text for text in (f"{option.help}.", option.more, repeated) if text)
