"""The command line: read by the table of options, or answered where it asks something."""

from collections.abc import Sequence

from hvlaunch.cli.given import Options
from hvlaunch.cli.option import Group
from hvlaunch.cli.options import GROUPS
from hvlaunch.cli.parser import HELP_HINT, Question, make_parser
from hvlaunch.cli.words import UnknownOption, by_name, split
from hvlaunch.errors import BadUsage

__all__ = ["Answer", "parse"]


class Answer(Exception):
    """The user asked a question instead of for a job; `text` answers it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def parse(argv: Sequence[str], groups: Sequence[Group] = GROUPS) -> Options:
    """Read the command line, without the program's own name.

    Raises BadUsage, and Answer for --help and --version.
    """
    options_by_name = by_name(groups)
    try:
        flags, command = split(argv, options_by_name, _is_foreign)
        given = vars(make_parser(groups).parse_args(flags))
    except UnknownOption as unknown:
        from hvlaunch.cli.foreign.unknown_options import unknown_options  # noqa: PLC0415 (most lines have none)

        raise unknown_options(unknown.words, options_by_name) from None
    except Question as question:
        raise Answer(_answer(question, groups)) from None
    is_marked = bool(command) and list(argv[: -len(command)])[-1:] == ["--"]
    options = Options(given, command, groups, is_marked=is_marked)
    if not command and not options.check_build:
        version = "hvlaunch -V for the version, " if given.keys() == {"verbose"} else ""
        raise BadUsage("no command to run", hint=f"{version}hvlaunch -np 2 python train.py, or {HELP_HINT}")
    return options


def _is_foreign(name: str) -> bool:
    from hvlaunch.cli.foreign.table import rows_of  # noqa: PLC0415 (most lines have nothing like it)

    return bool(rows_of(name))


def _answer(question: Question, groups: Sequence[Group]) -> str:
    match question.option.question:
        case "version":
            from hvlaunch import __version__  # noqa: PLC0415 (as below: no job needs it)

            return f"hvlaunch {__version__}\n"
        case "completion":
            from hvlaunch.cli.completion import completion  # noqa: PLC0415 (as above)

            return completion(groups, str(question.value))
        case asked:
            from hvlaunch.cli.help import help_text  # noqa: PLC0415 (as above)

            return help_text(groups, is_long=asked == "help")
