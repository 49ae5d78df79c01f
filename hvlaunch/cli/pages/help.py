"""Help: everyday options for -h, every option with examples and exit codes for --help, and the manual page, which setup.py puts into the wheel.

`python -m hvlaunch.cli.pages.help` prints the manual page, with the standard library alone. docs/options_pages.py makes options.md and
coming-from.md of docs/reference/.
"""

import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from hvlaunch import __version__
from hvlaunch.cli.options import Option, OptionGroup
from hvlaunch.cli.options.parser import (
    DESCRIPTION,
    EXAMPLES,
    EXIT_CODES,
    JOB_WORDS,
    default_text,
    make_parser,
    sentences,
)
from hvlaunch.cli.options.table import GROUPS

__all__ = ["help_text", "man_page"]

_SHORT_EPILOG = """\
more:
  hvlaunch jobs                 the jobs that run here; hvlaunch stop, and more
  hvlaunch --help               all {count} options, with examples and exit codes
  man hvlaunch                  the same, as a manual page
"""


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
    from rich.text import Text  # noqa: PLC0415 (the manual page is made without it)
    from rich_argparse import RichHelpFormatter  # noqa: PLC0415 (as above)

    class Formatter(RichHelpFormatter):
        help_markup = text_markup = False
        group_name_formatter = str

    parser = make_parser(groups, describe)
    # rich_argparse colours headings and names; the texts have no markup.
    parser.formatter_class = partial(Formatter, max_help_position=column)
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


_SYNOPSIS = """\
.B hvlaunch
.RB [ \\-np
.IR N ]
.RB [ \\-H
.IR HOSTS " |"
.B \\-\\-hostfile
.IR FILE ]
.RI [ options ]
.I COMMAND
.RI [ ARG " ...]"
"""
_OPTIONS = """\
No name can be cut short, and \\fB\\-\\-lease 5\\fR and \\fB\\-\\-lease=5\\fR are the same. Of an option that is given twice the last counts,
unless it may be repeated. \\fB\\-\\-no\\-\\fR before the name of a switch takes it back. \\fB\\-\\-\\fR before COMMAND says where it begins. Times are in seconds.
"""
_FILES = (
    (
        "ENVIRONMENT",
        (
            "`HVLAUNCH_` and an option's long name in capitals, as in `HVLAUNCH_SSH_USER`, sets the option, unless the command line does. "
            "It is not so in a worker of another job, where `HVLAUNCH_JOB_ID` is set."
        ),
    ),
    (
        "FILES",
        (
            "Options may be in files, by their long names without the dashes: in that of `--config-file`; in `hvlaunch.toml`, or `[tool.hvlaunch]` in "
            "`pyproject.toml`, of the current directory or the first above it that has one; and in `$XDG_CONFIG_HOME/hvlaunch/config.toml`. "
            "`--show-config` says which option comes from where."
        ),
    ),
)


def man_page(groups: Sequence[OptionGroup]) -> str:
    """Return the manual page for man(1)."""
    parts = [
        f'.TH HVLAUNCH 1 "" "hvlaunch {__version__}" "User Commands"\n.nh\n.ad l\n',
        ".SH NAME\nhvlaunch \\- start distributed PyTorch training on many hosts over ssh\n",
        f".SH SYNOPSIS\n{_SYNOPSIS}",
        f".SH DESCRIPTION\n{_text(DESCRIPTION)}\n",
        f".SH OPTIONS\n{_OPTIONS}",
        *(part for group in groups for part in _group(group)),
        ".SH OTHER COMMANDS\nThese words have this meaning as the first of a command line alone.\n",
        *(
            f".TP\n\\fBhvlaunch {word.name}\\fR {_text(word.usage)}\n{_text(word.help)}\n"
            for word in JOB_WORDS.values()
        ),
        ".SH EXIT STATUS\n",
        *(f".TP\n.B {_text(code)}\n{_text(meaning)}\n" for code, meaning in EXIT_CODES),
        *(f".SH {title}\n{_text(text)}\n" for title, text in _FILES),
        ".SH EXAMPLES\n",
        *(f".PP\n{_text(title)}\n.PP\n.RS\n.nf\n{_text(line)}\n.fi\n.RE\n" for title, line in EXAMPLES),
        ".SH SEE ALSO\n.BR ssh (1),\n.BR ssh_config (5),\n.BR mpirun (1),\n.BR srun (1)\n",
    ]
    return "".join(parts)


def _group(group: OptionGroup) -> Iterator[str]:
    yield f".SS {group.title[0].upper()}{group.title[1:]}\n"
    if group.about:
        yield f"{_text(group.about)}\n"
    for option in group.options:
        yield f".TP\n{_names(option)}\n{_description(option)}\n"


def _names(option: Option) -> str:
    names = ", ".join(rf"\fB{_text(flag)}\fR" for flag in option.flags)
    value = option.value
    if value is None:
        return names
    if value.choices:
        return f"{names} {{{'|'.join(map(_text, value.choices))}}}"
    metavars = " ".join(rf"\fI{_text(metavar)}\fR" for metavar in value.metavars)
    return f"{names} {metavars}"


def _description(option: Option) -> str:
    text = sentences(option)
    if option.aliases:
        text += f" Other launchers' names for it work too: {', '.join(option.aliases)}."
    if default := default_text(option):
        text += f" Default: {default}."
    return _text(text[0].upper() + text[1:])


def _text(text: str) -> str:
    """Escape text for roff; `code` becomes bold."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    escaped = re.sub(r"`([^`]*)`", r"\\fB\1\\fR", escaped)
    # A leading dot or quote would be a roff request.
    return re.sub(r"^([.'])", r"\\&\1", escaped, flags=re.MULTILINE)


if __name__ == "__main__":
    sys.stdout.write(man_page(GROUPS))
