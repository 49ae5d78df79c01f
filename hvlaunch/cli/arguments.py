"""The command line: read by the table of options, or answered where it asks something."""

from collections.abc import Mapping, Sequence

from hvlaunch.cli.given import Options
from hvlaunch.cli.option import Group, Option
from hvlaunch.cli.options import GROUPS
from hvlaunch.cli.parser import HELP_HINT, Question, UnknownOption, make_parser
from hvlaunch.errors import BadUsage

__all__ = ["Answer", "parse"]

_NOT_NEEDED = "not needed: hvlaunch sets it"
_TORCHRUN = {
    "--nproc-per-node": "-np N for all workers together, or slots (-H a:4,b:4)",
    "--nnodes": "-H with the hosts (-H a:4,b:4)",
    "--log-dir": "--output-filename DIR",
    "--local-ranks-filter": "--ranks",
    "--module": "python -m MODULE, behind the flags",
    "-m": "python -m MODULE, behind the flags",
    "--node-rank": _NOT_NEEDED,
    "--master-addr": _NOT_NEEDED,
    "--master-port": _NOT_NEEDED,
    "--rdzv-backend": _NOT_NEEDED,
    "--rdzv-endpoint": _NOT_NEEDED,
    "--rdzv-id": _NOT_NEEDED,
    "--standalone": _NOT_NEEDED,
}
"""What to write for torchrun's flags, which its users type first."""


class Answer(Exception):
    """The user asked a question instead of for a job; `text` answers it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def parse(argv: Sequence[str], groups: Sequence[Group] = GROUPS) -> Options:
    """Read the command line, without the program's own name.

    Raises BadUsage, and Answer for --help and --version.
    """
    parser = make_parser(groups)
    try:
        flags, command = parser.split(argv)
        given = vars(parser.parse_args(flags))
    except UnknownOption as unknown:
        raise _unknown_option(unknown.words[0], parser.options) from None
    except Question as question:
        raise Answer(_answer(question, groups)) from None
    is_marked = bool(command) and list(argv[: -len(command)])[-1:] == ["--"]
    options = Options(given, command, groups, is_marked=is_marked)
    if not command and not options.check_build:
        version = "hvlaunch -V for the version, " if given.keys() == {"verbose"} else ""
        raise BadUsage("no command to run", hint=f"{version}hvlaunch -np 2 python train.py, or {HELP_HINT}")
    return options


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


def _unknown_option(word: str, options: Mapping[str, Option]) -> BadUsage:
    """The error for an option that there is not, with those that were perhaps meant."""
    from difflib import get_close_matches  # noqa: PLC0415 (1 ms, and most lines are right)

    name = word.partition("=")[0]
    if meant := _TORCHRUN.get(name.replace("_", "-")):
        return BadUsage(f"unknown option {word!r}", hint=f"{meant}, or {HELP_HINT}")
    flags = [flag for flag, option in options.items() if flag in option.flags]
    longer = [flag for flag in flags if flag.startswith(name)] if len(name) > len("--") else []
    close = longer or get_close_matches(name, flags, n=1, cutoff=0.75)
    cause = f"unknown option {word!r}" + (", and options can't be cut short" if longer else "")
    return BadUsage(cause, hint=", ".join([*close, f"or {HELP_HINT}"]) if close else HELP_HINT)
