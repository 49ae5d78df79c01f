"""Write a page made of tables: python docs/options_pages.py options.md > docs/reference/options.md, or make options-page.

options.md is made of the table of options, coming-from.md of that of other launchers' options, and json.md of that of the forms.
"""

import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from hvlaunch.cli.foreign import LAUNCHERS, Becomes, ForeignOption, OtherLauncher, key
from hvlaunch.cli.options import Option, OptionGroup
from hvlaunch.cli.options.parser import default_text, sentences
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.cli.pages.json_forms import FORMS, KIND

__all__ = ["coming_from_page", "json_page", "options_page"]

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

_REFUSED = """\
## Not from a file that was found

A [project's file](config.md#what-a-found-file-may-set) that was found, not named, may not set these:"""
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
    refused = (_name(option) for group in groups for option in group.options if option.source == "own")
    blocks += [_REFUSED, _paragraph(", ".join(f"`{name}`" for name in refused) + ".", names)]
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


_JSON_HEAD = """\
# JSON output

Commands print these with `--json`. A field keeps its name and meaning; new fields may come. Sizes are in bytes and times in seconds.
[Events](../interfaces/events.md) and [metrics](../interfaces/metrics.md) have pages of their own.
`python -m hvlaunch.cli.pages.json_forms` prints all of it as JSON Schema.

This page is generated.
"""


def json_page() -> str:
    """Return docs/reference/json.md."""
    return _JSON_HEAD + "".join(f"\n{section}" for section in _forms())


def _forms() -> Iterator[str]:
    for name, form in FORMS.items():
        title = f"## {name}\n\n" if form.command else f"### {name}\n\n"
        command = f" (`{form.command}`)" if form.command else ""
        rows = "".join(
            f"| `{field.rstrip('?')}` | {_field(field, text)} |\n" for field, text in form.fields.items()
        )
        yield f"{title}{form.about}{command}.\n\n| field | kind | meaning |\n|---|---|---|\n{rows}"


def _field(field: str, text: str) -> str:
    kind, _, about = text.partition(" ")
    match = KIND.fullmatch(kind)
    words = kind
    if match is not None:
        words = f"[{match[2]}](#{match[2]})" if match[1] else match[2].replace("any", "any value")
        for sign in filter(None, match.groups()[2:4]):
            words = f"list of {words}" if sign == "[]" else f"{words} by name"
        words += " or null" if match[5] else ""
    return f"{words}{', may be missing' if field.endswith('?') else ''} | {about}"


if __name__ == "__main__":
    match sys.argv[1]:
        case "options.md":
            sys.stdout.write(options_page(GROUPS))
        case "json.md":
            sys.stdout.write(json_page())
        case _:
            sys.stdout.write(coming_from_page())
