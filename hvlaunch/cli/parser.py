"""The parser: what argparse makes of the table of options, and where the user's command begins."""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from hvlaunch.cli.option import BadValue, Group, Option
from hvlaunch.errors import BadUsage

__all__ = ["HELP_HINT", "Parser", "Question", "UnknownOption", "make_parser"]

HELP_HINT = "hvlaunch --help"

_USAGE = "hvlaunch [-np N] [-H HOSTS | -hostfile FILE] [options] COMMAND [ARG ...]"
_DESCRIPTION = (
    "Start COMMAND as N workers on the hosts, over ssh, with all that torch.distributed needs to find the "
    "others. Options come before COMMAND; whatever follows its first word belongs to it."
)
_ATTACHED = re.compile(r"-[A-Za-z][^-].*", re.DOTALL)
"""A short name with its value in one word: `-p2222`."""


class Question(Exception):
    """The user asks something, in place of a job: `option` has what, `value` belongs to it."""

    def __init__(self, option: Option, value: object) -> None:
        super().__init__(option.question)
        self.option = option
        self.value = value


class UnknownOption(Exception):
    """There is no such option as the first of these words, which are all that is left of the line."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(words[0])
        self.words = words


class Parser(argparse.ArgumentParser):
    """argparse, but: errors are ours, options are not abbreviated, and the command is split off first.

    argparse's own REMAINDER lets words of the command that look like abbreviated flags be ambiguous.
    """

    options: Mapping[str, Option]
    """By all their names."""

    def error(self, message: str) -> NoReturn:
        raise BadUsage(message.removeprefix("argument "), hint=HELP_HINT)

    def split(self, argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
        """Our options, in words that argparse can't misread, and the user's command.

        It begins at the first word that is no option and no option's value. Raises UnknownOption.
        """
        flags: list[str] = []
        index = 0
        while index < len(argv):
            word = argv[index]
            if word == "--":
                return flags, argv[index + 1 :]
            if not word.startswith("-") or word == "-":
                return flags, argv[index:]
            option = self.options.get(word)
            if option is None:
                flags.append(self._with_value(argv[index:]))
                index += 1
                continue
            count = 0 if option.value is None else len(option.value.metavars) or 1
            values = argv[index + 1 : index + 1 + count]
            has_options = option.value is not None and option.value.has_options
            flags += [f"{word}={values[0]}"] if has_options and values else [word, *values]
            index += 1 + count
        return flags, ()

    def _with_value(self, words: Sequence[str]) -> str:
        """The first word, which has an option and its value: `--np=2`, `-p2222`."""
        word = words[0]
        if word.partition("=")[0] in self.options:
            return word
        option = self.options.get(word[:2])
        if option is None or option.value is None or not _ATTACHED.fullmatch(word):
            raise UnknownOption(words)
        return f"{word[:2]}={word[2:]}"


def make_parser(groups: Sequence[Group], describe: Callable[[Option], str] | None = None) -> Parser:
    """The parser of these options. It leaves out of its namespace what is not given.

    `describe` is the text of an option in help; None is for a parser that nobody asks for help.
    """
    parser = Parser(
        prog="hvlaunch",
        usage=_USAGE,
        description=_DESCRIPTION,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.options = {
        flag: option
        for group in groups
        for option in group.options
        for flag in (*option.flags, *option.aliases)
    }
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
