"""The command line: split into options and the user's command, and read by the table of options.

argparse can't split a line: words of the command that look like options would be its own.
"""

from collections.abc import Callable, Container, Mapping, Sequence

from hvlaunch.cli.config import other_sources
from hvlaunch.cli.options import Option, OptionGroup, Typed, UnknownOption, by_name, split
from hvlaunch.cli.options.settings import HELP_HINT, Options, Setting, check_words, merged, typed_setting
from hvlaunch.cli.options.table import COMMAND, GROUPS
from hvlaunch.errors import BadUsage

__all__ = ["Answered", "options_of_word", "parse"]


class Answered(Exception):
    """The user asked a question instead of for a job; `text` is the answer."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def parse(
    argv: Sequence[str],
    groups: Sequence[OptionGroup] = GROUPS,
    *,
    environ: Mapping[str, str] | None = None,
    earlier: Sequence[Setting] = (),
    warn: Callable[[str], object] = str,
) -> Options:
    """Read the command line, without the program's name, and the other sources of options.

    Other sources count only with an environment; `warn` gets a line about each that is not used. `earlier` are weaker than
    the line. Raises BadUsage, and Answered for --help and --version.
    """
    options_by_name = by_name(groups)
    try:
        typed, command = split(argv, options_by_name, _is_foreign)
    except UnknownOption:
        from hvlaunch.cli.foreign import without_needless  # noqa: PLC0415 (most lines have none)

        argv, needless = without_needless(argv, options_by_name)
        typed, command = split(argv, options_by_name, _is_foreign)
        if not any(options_by_name[option.name].name == "quiet" for option in typed):
            for sentence in needless:
                warn(f"warning: {sentence}")
    settings = [_setting(option, options_by_name[option.name], groups) for option in typed]
    # --check-build is for bug reports: an invalid file must not stop it.
    is_report = any(setting.option.name == "check_build" for setting in settings)
    others = [] if environ is None or is_report else other_sources(settings, environ, groups, warn)
    if command:
        settings.append(Setting(COMMAND, tuple(command), list(command), "COMMAND"))
    # The word before the command tells whether the user marked its begin: `-- python`.
    is_marked = not command or list(argv[: -len(command)])[-1:] == ["--"]
    options = Options(
        merged([*(source.settings for source in others), earlier, settings]), groups, is_marked=is_marked
    )
    # After merging, since the strongest source decides the host keys.
    options.check_found()
    # `hvlaunch -v` alone is a question for the version in many programs.
    has_none = not options.command and "role" not in options.given
    if has_none and not options.check_build and not options.show_config:
        version = "hvlaunch -V for the version, " if options.given.keys() == {"verbose"} else ""
        raise BadUsage("no command to run", hint=f"{version}hvlaunch -np 2 python train.py, or {HELP_HINT}")
    return options


def options_of_word(
    word: str,
    argv: Sequence[str],
    environ: Mapping[str, str] | None,
    taken: Container[str],
    taken_if_typed: Container[str] = (),
    warn: Callable[[str], object] = str,
    groups: Sequence[OptionGroup] = GROUPS,
) -> Options:
    """Return the options behind a word. `taken` has the names of accepted options of jobs, also from other sources.

    Raises BadUsage, and Answered for a question.
    """
    hint = f"hvlaunch {word.partition(' ')[0]} --help"
    # A command makes the line complete; the word has none.
    options = parse([*argv, "--", "true"], groups, environ=environ, warn=warn)
    if options.command != ("true",):
        raise BadUsage(f"{word}: {options.command[0]!r} is not an option", hint=hint)
    kept: dict[str, Sequence[Setting]] = {}
    for name, settings in options.settings.items():
        typed = [setting for setting in settings if not setting.origin]
        if name in taken or (typed and name in taken_if_typed):
            kept[name] = settings
        elif typed:
            raise BadUsage(f"{word}: {typed[0].called} is for jobs", hint=hint)
    return Options(kept, groups, is_marked=True)


def _is_foreign(name: str) -> bool:
    from hvlaunch.cli.foreign import rows_of  # noqa: PLC0415 (most lines have nothing like it)

    return bool(rows_of(name))


def _setting(typed: Typed, option: Option, groups: Sequence[OptionGroup]) -> Setting:
    """Return the setting. Raises BadUsage, and Answered for a question."""
    check_words(option, typed.values, is_joined=typed.is_joined)
    setting = typed_setting(option, typed.values, is_off=typed.name in option.opposites)
    if option.question:
        raise Answered(_answer(setting, groups))
    return setting


def _answer(question: Setting, groups: Sequence[OptionGroup]) -> str:
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
