"""The command line: read by the table of options, or answered where it asks something."""

from collections.abc import Callable, Mapping, Sequence

from hvlaunch.cli.config.sources import other_sources
from hvlaunch.cli.options.given import Options
from hvlaunch.cli.options.option import Group, Option
from hvlaunch.cli.options.settings import HELP_HINT, Setting, check_words, merged, typed_setting
from hvlaunch.cli.options.table import COMMAND, GROUPS
from hvlaunch.cli.words import Typed, UnknownOption, by_name, split
from hvlaunch.errors import BadUsage

__all__ = ["Answer", "parse"]


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

        raise unknown_options(unknown.words, options_by_name) from None
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
