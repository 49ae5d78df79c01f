"""docs/options.md, made of the table of options: `make options-page`."""

import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from hvlaunch.cli.options.option import Group, Option
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.cli.options.texts import default_text, sentences

__all__ = ["page"]

_HEAD = """\
<!-- Made of the table in hvlaunch/cli/options/table.py by `make options-page`: change that, not this. -->
# Options

```text
hvlaunch [options] COMMAND [ARG ...]
```

Options come before COMMAND; whatever follows its first word belongs to it, and `--` before it says where it begins.
`--lease 5` and `--lease=5` are the same. No name can be cut short. Of an option that is given twice the last counts, unless
it may be repeated. `--no-` before the name of a switch takes it back: `--merge --no-merge`. Times are in seconds.

Each can also be set [in a file or a variable](config.md), by its long name.

`hvlaunch -h` lists the options of every day; `hvlaunch --help` and `man hvlaunch` say what is said here."""

_WIDTH = 120
_SOURCES = {
    "any": "",
    "own": " Not from a [file that was found](config.md#what-a-file-may-set-that-nobody-named).",
    "no file": " Not in a file.",
    "command line": " On the command line alone.",
}
"""What there is to say of where an option may be set."""


def page(groups: Sequence[Group]) -> str:
    """The page for these options, as Markdown."""
    names = {flag: _name(option) for group in groups for option in group.options for flag in option.flags}
    blocks = [_HEAD, *_contents(groups)]
    for group in groups:
        blocks += _head(group, names)
        for option in group.options:
            blocks += _entry(option, group, names)
    return "\n\n".join(blocks) + "\n"


def _contents(groups: Sequence[Group]) -> Iterator[str]:
    rows = ["| group | options |", "|---|---|"]
    for group in groups:
        links = " ".join(f"[`{_name(option)}`](#{_name(option)})" for option in group.options)
        rows.append(f"| [{group.title}](#{group.title.lower().replace(' ', '-')}) | {links} |")
    yield "\n".join(rows)


def _head(group: Group, names: Mapping[str, str]) -> Iterator[str]:
    yield f"## {group.title[0].upper()}{group.title[1:]}"
    if group.about:
        yield _paragraph(group.about, names)
    if group.pages:
        links = [f"[{title}]({path})" for title, path in group.pages]
        yield f"More: {', '.join(links)}."


def _entry(option: Option, group: Group, names: Mapping[str, str]) -> Iterator[str]:
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
    """The text in lines, in which each option leads to its place."""
    lines = "\n".join(textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False))
    return re.sub(
        r"`(-[-\w]+)`",
        lambda found: f"[{found[0]}](#{names[found[1]]})" if found[1] in names else found[0],
        lines,
    )


def _name(option: Option) -> str:
    """Its first long name; anchors are called so too."""
    return next((flag for flag in option.flags if flag.startswith("--")), option.flags[0])


def _taken(option: Option) -> str:
    """What stands behind its name: ` SECONDS`, ` {auto,always,never}`."""
    value = option.value
    if value is None:
        return ""
    return f" {' '.join(value.metavars) or '{' + ','.join(value.choices) + '}'}"


def _excludes(option: Option, other: Option) -> bool:
    return bool(option.excludes) and option.excludes == other.excludes and option is not other


if __name__ == "__main__":
    sys.stdout.write(page(GROUPS))
