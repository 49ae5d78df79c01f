"""Help: everyday options for -h, and every option with examples and exit codes for --help."""

import textwrap
from collections.abc import Callable, Sequence
from functools import partial

from rich.text import Text
from rich_argparse import RichHelpFormatter

from hvlaunch.cli.options import Option, OptionGroup
from hvlaunch.cli.options.parser import EXAMPLES, EXIT_CODES, JOB_WORDS, default_text, make_parser, sentences

__all__ = ["help_text"]

_SHORT_EPILOG = """\
more:
  hvlaunch jobs                 the jobs that run here; hvlaunch stop, and more
  hvlaunch --help               all {count} options, with examples and exit codes
  man hvlaunch                  the same, as a manual page
"""


class _Formatter(RichHelpFormatter):
    help_markup = text_markup = False
    group_name_formatter = str


def help_text(groups: Sequence[OptionGroup], *, is_long: bool) -> str:
    """Return help for these options, as wide as the terminal."""
    if is_long:
        return _help(groups, _long, _epilog(), column=24)
    options = [option for group in groups for option in group.options]
    everyday = tuple(option for option in options if option.is_everyday)
    epilog = _SHORT_EPILOG.format(count=len(options))
    return _help([OptionGroup("options of every day", everyday)], _short, epilog, column=32)


def _epilog() -> str:
    codes = [f"  {code:<10}{meaning}" for code, meaning in EXIT_CODES]
    examples = [f"  {title}\n" + textwrap.indent(line, " " * 4) for title, line in EXAMPLES]
    words = [f"  hvlaunch {word.name} {word.usage}\n      {_plain(word.help)}" for word in JOB_WORDS.values()]
    jobs = ["other commands:", *words, ""]
    return "\n".join([*jobs, "exit codes:", *codes, "", "examples:", "\n\n".join(examples), ""])


def _help(
    groups: Sequence[OptionGroup], describe: Callable[[Option], str], epilog: str, *, column: int
) -> str:
    parser = make_parser(groups, describe)
    # rich_argparse colours headings and names; the texts have no markup.
    parser.formatter_class = partial(_Formatter, max_help_position=column)
    parser.epilog = Text(epilog)  # type: ignore[assignment]  # a Text, which rich prints without markup
    return parser.format_help()


def _short(option: Option) -> str:
    return _plain(option.help)


def _long(option: Option) -> str:
    text = sentences(option)
    default = default_text(option)
    return _plain((text if ". " in text else option.help) + (f" [default: {default}]" if default else ""))


def _plain(text: str) -> str:
    return text.replace("`", "")
