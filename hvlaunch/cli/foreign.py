"""Options of other launchers: the table in foreign.json, and errors that name hvlaunch's equivalent.

Loaded only for a command line with an option unknown to hvlaunch.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from hvlaunch.cli.options.option import Option
from hvlaunch.cli.options.settings import HELP_HINT
from hvlaunch.console.masking import masked, masked_words
from hvlaunch.errors import BadUsage

__all__ = [
    "LAUNCHERS",
    "Becomes",
    "ForeignOption",
    "OtherLauncher",
    "Row",
    "key",
    "rows_of",
    "unknown_options",
]

Becomes = Literal["same", "another word", "not needed", "not here", "another meaning"]

_LIKE = 0.75
# Characters of `-x`, whose value may follow at once.
_SHORT = 2


class ForeignOption(NamedTuple):
    """An option of another launcher.

    In `here`, `{}` is its value, `{=}` its two values as NAME=VALUE, and `{option}` the option with its value.
    """

    spelled: str
    """Names and metavars: `-n, --ntasks N`."""
    becomes: Becomes
    here: str = ""
    """hvlaunch's equivalent, or the reason why hvlaunch has none."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name.split()[0] for name in self.spelled.split(", "))

    @property
    def metavars(self) -> tuple[str, ...]:
        """Names of its values; empty for a switch."""
        return tuple(self.spelled.rpartition(", ")[2].split()[1:])


class OtherLauncher(NamedTuple):
    """Another launcher: a job as typed there and here, and the launcher's options."""

    example: str
    equivalent: str
    notes: str
    """Markdown for docs/coming-from.md."""
    options: tuple[ForeignOption, ...]


class Row(NamedTuple):
    """An option with its launcher."""

    program: str
    option: ForeignOption


class _Typed(NamedTuple):
    """An option of other launchers, as it stands on the command line."""

    name: str
    value: str
    """Its values, quoted; empty if it has no value."""
    typed: str
    length: int
    """Number of words."""
    rows: tuple[Row, ...]


def _read() -> dict[str, OtherLauncher]:
    # JSON, not TOML: `-xNAME` may look these up in a line without any error. 0.2 ms against 15.
    text = Path(__file__).with_name("foreign.json").read_text(encoding="utf-8")
    launchers = {}
    for program, entry in json.loads(text).items():
        options = [ForeignOption(spelled, "same") for spelled in entry["same"]]
        for becomes in get_args(Becomes)[1:]:
            options += [
                ForeignOption(spelled, becomes, here) for spelled, here in entry.get(becomes, {}).items()
            ]
        notes = "\n".join(entry.get("notes", ()))
        launchers[program] = OtherLauncher(entry["example"], entry["equivalent"], notes, tuple(options))
    return launchers


LAUNCHERS = _read()


def key(name: str) -> str:
    """Return the name without leading dashes, with `-` for `_`: launchers often take both spellings."""
    return name.lstrip("-").replace("_", "-")


def rows_of(name: str) -> list[Row]:
    """Return options of that name, under any dash, without those that hvlaunch has too."""
    return [
        Row(program, option)
        for program, launcher in LAUNCHERS.items()
        for option in launcher.options
        if option.becomes not in ("same", "another meaning") and key(name) in map(key, option.names)
    ]


WordsOf = Callable[[Sequence[str], Mapping[str, Option], Callable[[str], bool]], int]
"""Counts the words of a known option with its values; see arguments.py."""


def unknown_options(words: Sequence[str], options: Mapping[str, Option], words_of: WordsOf) -> BadUsage:
    """Return the error for the first word, and for the options after it up to a word that no launcher has."""
    foreign: list[_Typed] = []
    remaining = tuple(words)
    while remaining and remaining[0].startswith("-") and remaining[0] not in ("-", "--"):
        count = words_of(remaining, options, lambda name: bool(rows_of(name)))
        if count == 0:
            typed = _typed(remaining)
            if typed is None:
                break
            foreign.append(typed)
            count = typed.length
        remaining = remaining[count:]
    if not foreign:
        return _unknown(words[0], options)
    return BadUsage("\n".join(_sentence(typed) for typed in _of_common_programs(foreign)))


def _typed(words: Sequence[str]) -> _Typed | None:
    name, equals, value = words[0].partition("=")
    values = [value] if equals else []
    rows = rows_of(name)
    if not rows and not name.startswith("--"):
        # `-N4`: a short name with its value.
        name, values = words[0][:_SHORT], [words[0][_SHORT:]]
        rows = [row for row in rows_of(name) if row.option.metavars]
    if not rows:
        return None
    metavars = rows[0].option.metavars
    count = 1 if values else 1 + len(metavars)
    # An error may end up in a log: it must not repeat secrets.
    shown = list(masked_words((name, *(values or words[1:count]))))[1:]
    if len(shown) > 1:
        shown[1] = masked(shown[0], shown[1])  # -genv NAME VALUE
    typed = f"{name}={shown[0]}" if equals else " ".join([name, *shown])
    return _Typed(
        name,
        " ".join(map(shlex.quote, shown)),
        typed,
        count,
        tuple(rows),
    )


def _of_common_programs(foreign: Sequence[_Typed]) -> list[_Typed]:
    """Keep only rows of launchers that have every option of the line, if there is such a launcher."""
    programs = set.intersection(*({row.program for row in typed.rows} for typed in foreign))
    if not programs:
        return list(foreign)
    return [
        typed._replace(rows=tuple(row for row in typed.rows if row.program in programs)) for typed in foreign
    ]


def _sentence(typed: _Typed) -> str:
    # Launchers that give an option the same meaning share one clause.
    owners: dict[str, list[str]] = {}
    for program, option in typed.rows:
        owner = f"{program.split()[0]}'s"
        of_meaning = owners.setdefault(_meaning(option, typed), [])
        of_meaning += [owner] if owner not in of_meaning else []
    return f"{typed.name} is " + "; or ".join(
        f"{_listed(names)}{meaning}" for meaning, names in owners.items()
    )


def _meaning(option: ForeignOption, typed: _Typed) -> str:
    # Launchers differ in whether an option of this name has a value.
    value = typed.value or " ".join(option.metavars)
    here = option.here.replace("{option}", typed.typed).replace("{=}", value.replace(" ", "=", 1))
    here = here.replace("{}", value)
    match option.becomes:
        case "another word":
            return f": here write {here}"
        case "not needed":
            return f", and not needed here: {here}"
        case _:
            return f", and hvlaunch has nothing like it: {here}"


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _unknown(word: str, options: Mapping[str, Option]) -> BadUsage:
    """Return the error for an option that no launcher has, with the options that may be meant."""
    name = word.partition("=")[0]
    flags = [flag for flag, option in options.items() if flag in option.flags]
    # `--` alone is a prefix of every long name, and says nothing about the one meant.
    longer = [flag for flag in flags if flag.startswith(name)] if len(name) > len("--") else []
    close = longer or get_close_matches(name, flags, n=1, cutoff=_LIKE)
    cause = f"unknown option {name!r}" + (", and options can't be cut short" if longer else "")
    return BadUsage(cause, hint=", ".join([*close, f"or {HELP_HINT}"]) if close else HELP_HINT)
