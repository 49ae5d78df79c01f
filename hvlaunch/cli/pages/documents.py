"""Documents made of tables: the manual page, and options.md, coming-from.md and json.md of docs/reference/.

`python -m hvlaunch.cli.pages.documents NAME` prints hvlaunch.1, options.md, coming-from.md or json.md. `make options-page` writes
the pages; setup.py puts the manual page into the wheel, with the standard library alone.
"""

import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from hvlaunch import __version__
from hvlaunch.cli.foreign import LAUNCHERS, Becomes, ForeignOption, OtherLauncher, key
from hvlaunch.cli.options import Option, OptionGroup
from hvlaunch.cli.options.general import JOB_WORDS
from hvlaunch.cli.options.parser import DESCRIPTION, EXAMPLES, EXIT_CODES, default_text, sentences
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.cli.pages.json_forms import json_page

__all__ = ["coming_from_page", "man_page", "options_page"]

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


_OPTIONS_HEAD = """\
<!-- Made of the table in hvlaunch/cli/options/table.py by `make options-page`: change that, not this. -->
# Options

```text
hvlaunch [options] COMMAND [ARG ...]
```

Options come before COMMAND. Everything after COMMAND is passed to it; `--` marks where it begins.
`--lease 5` and `--lease=5` are the same. No name can be cut short. Of an option that is given twice the last counts, unless
it may be repeated. `--no-` before the name of a switch takes it back: `--merge --no-merge`. Times are in seconds.

Each can also be set [in a file or a variable](config.md), by its long name.

`hvlaunch -h` lists the options of every day; `hvlaunch --help` and `man hvlaunch` say what is said here."""

_WIDTH = 120
_SOURCES = {
    "any": "",
    "own": " Not from a [file that was found](config.md#what-a-found-file-may-set).",
    "no file": " Not in a file.",
    "command line": " On the command line alone.",
}
"""Remarks about the sources of an option."""


def options_page(groups: Sequence[OptionGroup]) -> str:
    """Return the page for these options as Markdown."""
    # Links lead to an option by any of its names.
    names = {flag: _name(option) for group in groups for option in group.options for flag in option.flags}
    blocks = [_OPTIONS_HEAD, *_contents(groups)]
    for group in groups:
        blocks += _head(group, names)
        for option in group.options:
            blocks += _entry(option, group, names)
    return "\n\n".join(blocks) + "\n"


def _contents(groups: Sequence[OptionGroup]) -> Iterator[str]:
    rows = ["| group | options |", "|---|---|"]
    for group in groups:
        links = " ".join(f"[`{_name(option)}`](#{_name(option)})" for option in group.options)
        rows.append(f"| [{group.title}](#{group.title.lower().replace(' ', '-')}) | {links} |")
    yield "\n".join(rows)


def _head(group: OptionGroup, names: Mapping[str, str]) -> Iterator[str]:
    yield f"## {group.title[0].upper()}{group.title[1:]}"
    if group.about:
        yield _paragraph(group.about, names)
    if group.pages:
        links = [f"[{title}]({path})" for title, path in group.pages]
        yield f"More: {', '.join(links)}."


def _entry(option: Option, group: OptionGroup, names: Mapping[str, str]) -> Iterator[str]:
    yield f'<a id="{_name(option)}"></a>'
    yield f"### `{'`, `'.join(option.flags)}{_taken(option)}`"
    text = sentences(option)
    others = [f"`{_name(other)}`" for other in group.options if _excludes(option, other)]
    if option.aliases:
        text += (
            f" Other launchers' names for it work too: {', '.join(f'`{flag}`' for flag in option.aliases)}."
        )
    text += _SOURCES[option.source]
    if others:
        text += f" Not together with {' or '.join(others)}."
    yield _paragraph(text[0].upper() + text[1:], names)
    if default := default_text(option):
        yield _paragraph(f"Default: {default}." if option.default else f"Default: `{default}`.", names)
    if option.example:
        yield f"```sh\n{option.example}\n```"


def _paragraph(text: str, names: Mapping[str, str]) -> str:
    """Wrap text, and link each option to its section."""
    # Wrapped before links are made, whose targets would count as text.
    lines = "\n".join(textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False))
    return re.sub(
        r"`(-[-\w]+)`",
        lambda match: f"[{match[0]}](#{names[match[1]]})" if match[1] in names else match[0],
        lines,
    )


def _name(option: Option) -> str:
    """Return the first long name, which is also the anchor."""
    return next((flag for flag in option.flags if flag.startswith("--")), option.flags[0])


def _taken(option: Option) -> str:
    """Return the value behind an option's name: ` SECONDS`, ` {auto,always,never}`."""
    value = option.value
    if value is None:
        return ""
    return f" {' '.join(value.metavars) or '{' + ','.join(value.choices) + '}'}"


def _excludes(option: Option, other: Option) -> bool:
    return bool(option.excludes) and option.excludes == other.excludes and option is not other


_COMING_FROM_HEAD = """\
<!-- Made of hvlaunch/cli/foreign.json by `make options-page`: change that, not this. -->
# Coming from another launcher

For each launcher, this page shows a job there and the same job here, the options that are the same, and what becomes of all others.
`hvlaunch translate 'torchrun --nproc-per-node 2 train.py'` prints a whole line in hvlaunch's words, with a note about each option
that it leaves out. In a line of hvlaunch, an option that is not needed here is a warning, and the job runs; for an option with
another name the error has the whole line, ready to paste. [hvlaunch's options](options.md) come before the command. A Python
script that is not executable is run by `python`."""

_WORDS = re.compile(r"(?:(?<![A-Za-z])'[^']*'|\"[^\"]*\"|\$\(\([^)]*\)\)|\S)+")
_STARTS = re.compile(r"-{1,2}[A-Za-z].*|python|timeout|numactl|taskset|kill|nodeset|sh")
_FOLLOWS = re.compile(
    r"[A-Z_][A-Z_0-9]*(=.*)?|[A-Z]:[A-Z]|hvlaunch|all|none|openssh|paramiko|\.\.\.|[0-9]+|[a-z][:,].*|'.*'|\".*\""
)
"""Words to type: the first of a phrase, and its continuations."""

_TITLES: Mapping[Becomes, tuple[str, str]] = {
    "another word": ("Another word", "here"),
    "not needed": ("Not needed", "because"),
    "not here": ("Not there", "because"),
    "another meaning": ("The same name with another meaning", "here"),
}


def coming_from_page(launchers: Mapping[str, OtherLauncher] = LAUNCHERS) -> str:
    """Return the page as Markdown."""
    blocks = [block for name, launcher in launchers.items() for block in _launcher(name, launcher)]
    return "\n\n".join([_COMING_FROM_HEAD, *blocks]) + "\n"


def _launcher(name: str, launcher: OtherLauncher) -> Iterator[str]:
    options = launcher.options
    yield f"## {name}"
    yield f"```sh\n{launcher.example}\n{launcher.equivalent}\n```"
    if launcher.notes:
        yield launcher.notes
    same = [f"`{option.spelled}`" for option in options if option.becomes == "same"]
    yield f"The same here: {', '.join(same)}."
    for becomes, (title, column) in _TITLES.items():
        rows = [
            f"| `{option.spelled}` | {_here(option)} |" for option in options if option.becomes == becomes
        ]
        if rows:
            yield "\n".join([f"{title}:", "", f"| option | {column} |", "|---|---|", *rows])


def _here(option: ForeignOption) -> str:
    values = " ".join(metavar for metavar in option.metavars if metavar == metavar.upper())
    # Spellings of one name stand for one option; different names need the word OPTION.
    names = {key(name) for name in option.names}
    typed = f"{option.names[-1]} {values}".rstrip() if len(names) == 1 else "OPTION"
    text = (
        option.here.replace("{option}", typed).replace("{=}", values.replace(" ", "=")).replace("{}", values)
    )
    return _with_code(text).replace("|", "\\|")


def _with_code(text: str) -> str:
    """Put text to type in backquotes: an option or a program, and its arguments."""
    parts: list[str] = []
    for word in _WORDS.findall(text):
        before = "(" if word.startswith("(") else ""
        bare = word[len(before) :].rstrip(",;:)" if before or "(" not in word else ",;:")
        after = word[len(before) + len(bare) :]
        # A phrase to type continues through values: `--nnodes N:M`.
        is_in_code = bool(parts) and parts[-1].endswith("`")
        if is_in_code and (_STARTS.fullmatch(bare) or _FOLLOWS.fullmatch(bare)) and not before:
            parts[-1] = f"{parts[-1][:-1]} {bare}`{after}"
        elif _STARTS.fullmatch(bare):
            parts.append(f"{before}`{bare}`{after}")
        else:
            parts.append(word)
    return " ".join(parts)


def _document(name: str) -> str:
    match name:
        case "hvlaunch.1":
            return man_page(GROUPS)
        case "options.md":
            return options_page(GROUPS)
        case "json.md":
            return json_page()
        case _:
            return coming_from_page()


if __name__ == "__main__":
    sys.stdout.write(_document(sys.argv[1]))
