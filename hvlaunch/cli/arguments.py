"""The command line: split into options and the user's command, and read by the table of options.

argparse can't split it: it takes words of the command that look like options for its own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hvlaunch.cli.config.sources import other_sources
from hvlaunch.cli.options.option import Group, Option
from hvlaunch.cli.options.settings import HELP_HINT, Options, Setting, check_words, merged, typed_setting
from hvlaunch.cli.options.table import COMMAND, GROUPS
from hvlaunch.errors import BadUsage

__all__ = ["Answer", "Typed", "UnknownOption", "by_name", "parse", "split", "words_of"]


class Typed(NamedTuple):
    """An option as it stands on the command line."""

    name: str
    values: Sequence[str]
    is_joined: bool = False
    """Whether name and value are one word."""


class UnknownOption(Exception):
    """There is no such option as the first of these words, which are all that is left of the line."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(words[0])
        self.words = words


def by_name(groups: Sequence[Group]) -> dict[str, Option]:
    """The options by all their names."""
    return {
        flag: option
        for group in groups
        for option in group.options
        for flag in (*option.flags, *option.aliases, *option.opposites)
    }


def split(
    argv: Sequence[str], options: Mapping[str, Option], is_foreign: Callable[[str], bool]
) -> tuple[list[Typed], Sequence[str]]:
    """The options, and the user's command.

    It begins at the first word that is no option and no option's value. `is_foreign` is whether another launcher has an
    option of that name. Raises UnknownOption.
    """
    typed: list[Typed] = []
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "--":
            return typed, argv[index + 1 :]
        if not word.startswith("-") or word == "-":
            return typed, argv[index:]
        words = argv[index : index + words_of(argv[index:], options, is_foreign)]
        if not words:
            raise UnknownOption(argv[index:])
        typed.append(_typed(words, options))
        index += len(words)
    return typed, ()


def words_of(words: Sequence[str], options: Mapping[str, Option], is_foreign: Callable[[str], bool]) -> int:
    """How many of the words, from the first on, are one of the options with its values; 0 if it is none."""
    word = words[0]
    if word in options:
        value = options[word].value
        return 1 + (0 if value is None else len(value.metavars) or 1)
    if word.partition("=")[0] in options:
        return 1
    option = options.get(word[:2])
    if option is None or option.value is None:
        return 0
    return 0 if _is_like_a_name(word) and is_foreign(word) else 1


def _is_like_a_name(word: str) -> bool:
    """Whether what seems to be a short name with its value, `-p2222`, may be another launcher's option: `-ppn`."""
    return all(part.isalpha() for part in word[1:].split("-"))


def _typed(words: Sequence[str], options: Mapping[str, Option]) -> Typed:
    name, *values = words
    if name in options:
        return Typed(name, values)
    long, equals, value = name.partition("=")
    if equals and long in options:
        return Typed(long, [value], is_joined=True)
    return Typed(name[:2], [name[2:]], is_joined=True)


class Answer(Exception):
    """The user asked a question instead of for a job; `text` answers it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def parse(
    argv: Sequence[str],
    groups: Sequence[Group] = GROUPS,
    *,
    environ: Mapping[str, str] | None = None,
    warn: Callable[[str], object] = str,
) -> Options:
    """Read the command line, without the program's own name, and all other sources of options.

    There are others only with an environment; `warn` is told of those that are not used.
    Raises BadUsage, and Answer for --help and --version.
    """
    options_by_name = by_name(groups)
    try:
        typed, command = split(argv, options_by_name, _is_foreign)
    except UnknownOption as unknown:
        from hvlaunch.cli.foreign import unknown_options  # noqa: PLC0415 (most lines have none)

        raise unknown_options(unknown.words, options_by_name, words_of) from None
    settings = [_setting(each, options_by_name[each.name], groups) for each in typed]
    is_report = any(
        each.option.name == "check_build" for each in settings
    )  # which a wrong file must not stop
    others = [] if environ is None or is_report else other_sources(settings, environ, groups, warn)
    if command:
        settings.append(Setting(COMMAND, tuple(command), list(command), "COMMAND"))
    is_marked = not command or list(argv[: -len(command)])[-1:] == ["--"]
    options = Options(
        merged([*(source.settings for source in others), settings]), groups, is_marked=is_marked
    )
    options.check_found()
    if not options.command and not options.check_build and not options.show_config:
        version = "hvlaunch -V for the version, " if options.given.keys() == {"verbose"} else ""
        raise BadUsage("no command to run", hint=f"{version}hvlaunch -np 2 python train.py, or {HELP_HINT}")
    return options


def _is_foreign(name: str) -> bool:
    from hvlaunch.cli.foreign import rows_of  # noqa: PLC0415 (most lines have nothing like it)

    return bool(rows_of(name))


def _setting(typed: Typed, option: Option, groups: Sequence[Group]) -> Setting:
    """As it was typed. Raises Answer where it is a question, and BadUsage."""
    check_words(option, typed.values, is_joined=typed.is_joined)
    setting = typed_setting(option, typed.values, is_off=typed.name in option.opposites)
    if option.question:
        raise Answer(_answer(setting, groups))
    return setting


def _answer(question: Setting, groups: Sequence[Group]) -> str:
    match question.option.question:
        case "version":
            from hvlaunch import __version__  # noqa: PLC0415 (as below: no job needs it)

            return f"hvlaunch {__version__}\n"
        case "completion":
            from hvlaunch.cli.pages.completion import completion  # noqa: PLC0415 (as above)

            return completion(groups, str(question.value))
        case asked:
            from hvlaunch.cli.pages.help import help_text  # noqa: PLC0415 (as above)

            return help_text(groups, is_long=asked == "help")
