"""The error for options that hvlaunch does not have: what they are elsewhere, and what to write here."""

import shlex
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from hvlaunch.cli.foreign.foreign_option import ForeignOption
from hvlaunch.cli.foreign.table import Row, rows_of
from hvlaunch.cli.options.option import Option
from hvlaunch.cli.options.settings import HELP_HINT
from hvlaunch.cli.words import words_of
from hvlaunch.console.masking import masked, masked_words
from hvlaunch.errors import BadUsage

__all__ = ["unknown_options"]

_LIKE = 0.75
_SHORT = 2  # characters of `-x`, whose value may follow at once


class _Found(NamedTuple):
    """An option of other launchers, as it stands on the command line."""

    name: str
    value: str
    """Its values, quoted; empty where there are none."""
    typed: str
    length: int
    """How many words it is."""
    rows: tuple[Row, ...]


def unknown_options(words: Sequence[str], options: Mapping[str, Option]) -> BadUsage:
    """The error for the first of the words, and for those that follow as long as it is clear what they are."""
    found: list[_Found] = []
    rest = tuple(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        count = words_of(rest, options, lambda name: bool(rows_of(name)))
        if count == 0:
            foreign = _found(rest)
            if foreign is None:
                break
            found.append(foreign)
            count = foreign.length
        rest = rest[count:]
    if not found:
        return _unknown(words[0], options)
    return BadUsage("\n".join(_sentence(each) for each in _of_one_program(found)))


def _found(words: Sequence[str]) -> _Found | None:
    name, equals, value = words[0].partition("=")
    values = [value] if equals else []
    rows = rows_of(name)
    if not rows and not name.startswith("--"):
        name, values = words[0][:_SHORT], [words[0][_SHORT:]]
        rows = [row for row in rows_of(name) if row.option.metavars]
    if not rows:
        return None
    metavars = rows[0].option.metavars
    count = 1 if values else 1 + len(metavars)
    shown = list(masked_words((name, *(values or words[1:count]))))[1:]
    if len(shown) > 1:
        shown[1] = masked(shown[0], shown[1])  # -genv NAME VALUE
    typed = f"{name}={shown[0]}" if equals else " ".join([name, *shown])
    return _Found(
        name,
        " ".join(map(shlex.quote, shown)),
        typed,
        count,
        tuple(rows),
    )


def _of_one_program(found: Sequence[_Found]) -> list[_Found]:
    """Read as the options of those launchers that have all of them, if there is one."""
    programs = set.intersection(*({row.program for row in each.rows} for each in found))
    if not programs:
        return list(found)
    return [each._replace(rows=tuple(row for row in each.rows if row.program in programs)) for each in found]


def _sentence(found: _Found) -> str:
    owners: dict[str, list[str]] = {}
    for program, option in found.rows:
        owner = f"{program.split()[0]}'s"
        of_meaning = owners.setdefault(_meaning(option, found), [])
        of_meaning += [owner] if owner not in of_meaning else []
    return f"{found.name} is " + "; or ".join(
        f"{_listed(names)}{meaning}" for meaning, names in owners.items()
    )


def _meaning(option: ForeignOption, found: _Found) -> str:
    value = found.value or " ".join(option.metavars)  # of the same name, one launcher's may have no value
    here = option.here.replace("{option}", found.typed).replace("{=}", value.replace(" ", "=", 1))
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
    """The error for what no launcher has, with the options that were perhaps meant."""
    name = word.partition("=")[0]
    flags = [flag for flag, option in options.items() if flag in option.flags]
    longer = [flag for flag in flags if flag.startswith(name)] if len(name) > len("--") else []
    close = longer or get_close_matches(name, flags, n=1, cutoff=_LIKE)
    cause = f"unknown option {name!r}" + (", and options can't be cut short" if longer else "")
    return BadUsage(cause, hint=", ".join([*close, f"or {HELP_HINT}"]) if close else HELP_HINT)
