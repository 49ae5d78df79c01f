"""Options of other launchers: the table in foreign.json, and errors that name hvlaunch's equivalent.

Loaded only for a command line with an option unknown to hvlaunch.
"""

import json
import re
import shlex
from collections.abc import Container, Mapping, Sequence
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Literal, get_args

from hvlaunch.cli.options import Option, by_name, split, words_of
from hvlaunch.cli.options.settings import is_options, paste, unknown_option
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.console.masking import masked, masked_words
from hvlaunch.errors import BadUsage
from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "LAUNCHERS",
    "Becomes",
    "ForeignOption",
    "OtherLauncher",
    "Row",
    "Translation",
    "key",
    "rows_of",
    "translate",
    "translate_line",
    "without_needless",
]

Becomes = Literal["same", "another word", "not needed", "not here", "another meaning"]

_EXAMPLE = "hvlaunch translate 'torchrun --nproc-per-node 2 train.py'"
# Characters of `-x`, whose value may follow at once.
_SHORT = 2
_CLAUSE = re.compile(r"""(?:[^,;'"]|'[^']*'|"[^"]*")+""")
"""The beginning of an answer, up to a comma or semicolon outside quotes."""


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
    """Markdown for docs/reference/coming-from.md."""
    options: tuple[ForeignOption, ...]
    runs_python: bool = False
    """Whether it runs its command by python."""
    adds: str = ""
    """An option of hvlaunch for all of its jobs."""


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
        launchers[program] = OtherLauncher(
            entry["example"],
            entry["equivalent"],
            notes,
            tuple(options),
            runs_python=entry.get("runs python", False),
            adds=entry.get("adds", ""),
        )
    return launchers


LAUNCHERS = _read()


def key(name: str) -> str:
    """Return the name without leading dashes, with `-` for `_`: launchers often take both spellings."""
    return name.lstrip("-").replace("_", "-")


def rows_of(name: str, programs: Container[str] | None = None) -> list[Row]:
    """Return options of that name, under any dash, without those that hvlaunch has too.

    With `programs` (the launchers whose line it is) an option of another meaning here is one of them.
    """
    ours = ("same",) if programs else ("same", "another meaning")
    return [
        Row(program, option)
        for program, launcher in LAUNCHERS.items()
        if programs is None or program in programs
        for option in launcher.options
        if option.becomes not in ours and key(name) in map(key, option.names)
    ]


class Translation(NamedTuple):
    """A line of another launcher in hvlaunch's words."""

    words: tuple[str, ...]
    """The line, without the program's name and without omitted options."""
    foreign: tuple[tuple[Literal["changed", "dropped", "unclear"], "_Typed"], ...] = ()
    """Options with another name here, options without need here, and options for the user to decide about."""
    unknown: str = ""
    """An option without a launcher."""

    def of_sort(self, *sorts: str) -> list["_Typed"]:
        """Return the options of these sorts, as typed."""
        return [typed for sort, typed in self.foreign if sort in sorts]

    def notes(self) -> list[str]:
        """Return sentences about omitted options, a sentence for each reason."""
        reasons: dict[str, dict[str, None]] = {}
        for typed in self.of_sort("dropped", "unclear"):
            reasons.setdefault(_about(typed), {})[typed.name] = None
        return [
            f"{_listed(list(names))} {'is' if len(names) == 1 else 'are'} {about}"
            for about, names in reasons.items()
        ]

    def error(self) -> BadUsage:
        """Return the error for such a line given to hvlaunch, with the translated line."""
        others = self.of_sort("changed", "unclear")
        hint = None if self.unknown else paste(self.words)
        owners = {row.program.split()[0] for typed in others for row in typed.rows}
        if len(others) > 1 and not self.of_sort("unclear") and len(owners) == 1:
            names = _listed([typed.name for typed in others])
            return BadUsage(f"{names} are {owners.pop()}'s, and have other names here", hint=hint)
        return BadUsage("\n".join(map(_sentence, others)), hint=hint)


def translate(
    words: Sequence[str], options: Mapping[str, Option], programs: Container[str] | None = None
) -> Translation:
    """Translate options of other launchers up to the command.

    `programs` are the launchers whose line it is; None for a line of hvlaunch with options of some launcher.
    """
    parts: list[_Typed | Sequence[str]] = []
    remaining, unknown = tuple(words), ""
    while remaining and remaining[0].startswith("-") and remaining[0] not in ("-", "--"):
        # A launcher's own options come first in its own line: pdsh's -x is another one than hvlaunch's.
        name = remaining[0].partition("=")[0]
        is_theirs = bool(programs and key(name) not in _same(programs) and rows_of(name, programs))
        count = 0 if is_theirs else words_of(remaining, options, lambda name: bool(rows_of(name)))
        typed = None
        if count == 0:
            typed = _typed(remaining, programs)
            if typed is None:
                unknown = remaining[0]
                break
            count = typed.length
        parts.append(typed or remaining[:count])
        remaining = remaining[count:]
    foreign = iter(_of_common_programs([part for part in parts if isinstance(part, _Typed)]))
    line: list[str] = []
    sorted_options: list[tuple[Literal["changed", "dropped", "unclear"], _Typed]] = []
    for part in parts:
        if not isinstance(part, _Typed):
            line += part
            continue
        typed = next(foreign)
        here = _words_here(typed, options)
        sorted_options.append(("unclear" if here is None else "changed" if here else "dropped", typed))
        line += here or ()
    return Translation((*line, *remaining), tuple(sorted_options), unknown)


_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_MODULES = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun"}
_SAME_PROGRAM = {"mpiexec": "mpirun", "orterun": "mpirun", "prterun": "mpirun"}
_AS_IT_IS = frozenset(["--no-python", "--no_python", "-m", "--module"])
_ELASTIC = frozenset(["--min-np", "--min-num-proc", "--max-np", "--max-num-proc", "--host-discovery-script"])
"""Options of jobs that --horovod is not for."""


def translate_line(words: Sequence[str]) -> tuple[str, list[str]]:
    """Translate a whole line, as a single word or several; return hvlaunch's line, and notes about omitted options.

    Raises BadUsage for a line of an unknown launcher.
    """
    try:
        words = shlex.split(words[0], comments=True) if len(words) == 1 else list(words)
    except ValueError as error:
        raise BadUsage(f"the line can't be read: {error}", hint=_EXAMPLE) from None
    variables = list(takewhile(_ASSIGNMENT.match, words))
    name, programs, words = _program(words[len(variables) :])
    options = by_name(GROUPS)
    translation = translate(words, options, programs)
    if translation.unknown:
        raise BadUsage(
            f"{translation.unknown} is an option of neither {name} nor hvlaunch", hint=f"{name} --help"
        )
    typed, command = split(translation.words, options, lambda _: False)
    names = [option.name for option in typed]
    launcher = LAUNCHERS[programs[0]]
    before = list(translation.words[: len(translation.words) - len(command)])
    if launcher.adds and _ELASTIC.isdisjoint(names):
        before = [launcher.adds, *before]
    if launcher.runs_python and command and _AS_IT_IS.isdisjoint(names):
        command = ("python", *command)
    notes = translation.notes()
    if "--nnodes" in names and {"-H", "--hosts", "--hostfile"}.isdisjoint(names):
        notes.append("the line names no hosts; add them: -H HOST,HOST")
    assigned = [word for variable in variables for word in ("-x", variable)]
    return paste([*assigned, *before, *command]), notes


def _program(words: Sequence[str]) -> tuple[str, list[str], Sequence[str]]:
    """Return a launcher's name, its entries in the table, and the words behind it. Raises BadUsage."""
    name, behind = (Path(words[0]).name, words[1:]) if words else ("", ())
    if name.startswith("python") and behind[:1] == ["-m"] and behind[1:2]:
        name, behind = _MODULES.get(behind[1], behind[1]), behind[2:]
    name = _SAME_PROGRAM.get(name.partition(".")[0], name)
    programs = [program for program in LAUNCHERS if program.split()[0] == name]
    if name == "accelerate":
        if behind[:1] != ["launch"]:
            programs = []
        behind = behind[1:]
    if not programs:
        raise BadUsage(
            f"{name!r} is none of {', '.join(sorted({program.split()[0] for program in LAUNCHERS}))}",
            hint=_EXAMPLE,
        )
    return name, programs, behind


def without_needless(argv: Sequence[str], options: Mapping[str, Option]) -> tuple[tuple[str, ...], list[str]]:
    """Return the line without needless options of other launchers, and sentences about them.

    Raises BadUsage for a line with any other foreign option.
    """
    translation = translate(argv, options)
    if translation.of_sort("changed", "unclear"):
        raise translation.error()
    if translation.unknown:
        flags = [flag for flag, option in options.items() if flag in option.flags]
        raise unknown_option(translation.unknown, flags, ["hvlaunch", *argv])
    return translation.words, translation.notes()


def _same(programs: Container[str]) -> set[str]:
    """Return the keys of these launchers' options with the same meaning here. Two launchers are named mpirun."""
    return {
        key(name)
        for program, launcher in LAUNCHERS.items()
        if program in programs
        for option in launcher.options
        if option.becomes == "same"
        for name in option.names
    }


def _words_here(typed: "_Typed", options: Mapping[str, Option]) -> tuple[str, ...] | None:
    """Return hvlaunch's words for an option: empty for a needless option, None if unclear."""
    if {row.option.becomes for row in typed.rows} == {"not needed"}:
        return ()
    lines = {_first_clause(row.option, typed) for row in typed.rows}
    words = lines.pop()
    return words if not lines and words and is_options(words, options) else None


def _first_clause(option: ForeignOption, typed: "_Typed") -> tuple[str, ...]:
    # `--nnodes {}, or a job of salloc`: what follows the comma is for a reader.
    clause = _CLAUSE.match(option.here)
    takes_value = not option.metavars or "{" in option.here
    if (
        option.becomes != "another word"
        or clause is None
        or not takes_value
        or not (typed.value or not option.metavars)
    ):
        return ()
    return tuple(shlex.split(_filled(clause[0], typed.value, typed.typed)))


def _typed(words: Sequence[str], programs: Container[str] | None = None) -> _Typed | None:
    name, equals, value = words[0].partition("=")
    values = [value] if equals else []
    rows = rows_of(name, programs)
    if not rows and not name.startswith("--"):
        # `-N4`: a short name with its value.
        name, values = words[0][:_SHORT], [words[0][_SHORT:]]
        rows = [row for row in rows_of(name, programs) if row.option.metavars]
    rows = _of_values(rows, values or words[1:])
    if not rows:
        return None
    metavars = rows[0].option.metavars
    count = 1 if values else 1 + len(metavars)
    # An error may end up in a log: it must not repeat secrets.
    shown = list(masked_words((name, *(values or words[1:count]))))[1:]
    if len(shown) > 1:
        shown[1] = masked(shown[0], shown[1])  # -genv NAME VALUE
    typed = f"{name}={shown[0]}" if equals else " ".join([name, *shown])
    chosen = [
        word for word, metavar in zip_longest(shown, metavars) if word and not _is_literal(metavar or "")
    ]
    return _Typed(
        name,
        " ".join(map(shlex.quote, chosen)),
        typed,
        count,
        tuple(rows),
    )


def _of_values(rows: Sequence[Row], values: Sequence[str]) -> list[Row]:
    """Keep the rows for just these values; without any, the rows for all values."""
    exact, general = [], []
    for row in rows:
        literals = [
            (word, value)
            for word, value in zip(row.option.metavars, values, strict=False)
            if _is_literal(word)
        ]
        if not any(map(_is_literal, row.option.metavars)):
            general.append(row)
        elif all(word == value for word, value in literals) and literals:
            exact.append(row)
    return exact or general


def _is_literal(metavar: str) -> bool:
    """Return whether the word stands for itself: `none` in `--bind-to none`."""
    return metavar != metavar.upper()


def _of_common_programs(foreign: Sequence[_Typed]) -> list[_Typed]:
    """Keep only rows of launchers that have every option of the line, if there is such a launcher."""
    programs = (
        set.intersection(*({row.program for row in typed.rows} for typed in foreign)) if foreign else set()
    )
    if not programs:
        return list(foreign)
    return [
        typed._replace(rows=tuple(row for row in typed.rows if row.program in programs)) for typed in foreign
    ]


def _sentence(typed: _Typed) -> str:
    return f"{typed.name} is {_about(typed)}"


def _about(typed: _Typed) -> str:
    # Launchers that give an option the same meaning share one clause.
    owners: dict[str, list[str]] = {}
    for program, option in typed.rows:
        owner = f"{program.split()[0]}'s"
        of_meaning = owners.setdefault(_meaning(option, typed), [])
        of_meaning += [owner] if owner not in of_meaning else []
    return "; or ".join(f"{_listed(names)}{meaning}" for meaning, names in owners.items())


def _meaning(option: ForeignOption, typed: _Typed) -> str:
    # Launchers differ in whether an option of this name has a value.
    here = _filled(option.here, typed.value or " ".join(option.metavars), typed.typed)
    match option.becomes:
        case "another word":
            return f": here write {here}"
        case "not needed":
            return f", and not needed here: {here}"
        case "another meaning":
            return f", and means something else here: {here}"
        case _:
            return f", and hvlaunch has nothing like it: {here}"


def _filled(text: str, value: str, typed: str) -> str:
    return text.replace("{option}", typed).replace("{=}", value.replace(" ", "=", 1)).replace("{}", value)


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
