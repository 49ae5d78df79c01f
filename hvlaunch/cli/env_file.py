"""Files of variables for --env-file, with a line `NAME=VALUE` for each; docs/reference/environment.md has the rules."""

import codecs
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hvlaunch.errors import BadUsage
from hvlaunch.owners import other_writer, path_hint, reason

__all__ = ["EnvLine", "parse_env_file", "read_env_file"]

_REST_OF_LINE = re.compile(r"[^\n]*\n?")
_NOTHING = re.compile(r"[ \t\r]*(?:#[^\n]*)?(?:\n|\Z)")
_NAME = re.compile(r"[ \t]*(?:export[ \t]+)?(?P<name>[^\s='\"]+)(?P<equals>=)?")
_QUOTED = re.compile(r"""[ \t]*(?:'(?P<single>[^']*)'|"(?P<double>[^"\\]*(?:\\.[^"\\]*)*)")""", re.DOTALL)
_OPEN_QUOTE = re.compile(r"[ \t]*['\"]")
_COMMENT = re.compile(r"[ \t]+#.*")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "$": "$", "`": "`", "\n": ""}


@dataclass(frozen=True, slots=True)
class EnvLine:
    """A variable. `number` is its line, from 1; a bare `NAME` has the value None, and takes the one here."""

    number: int
    name: str
    value: str | None


def read_env_file(path: Path) -> list[EnvLine]:
    """Read a file of variables, decoded as os.environ is: bytes are passed on unchanged.

    Raises BadUsage, also if another user can change the file: a variable such as LD_PRELOAD runs a program.
    """
    try:
        with path.open("rb") as file:
            # fstat of the open file: the path could be replaced between check and reading.
            writer = other_writer(os.fstat(file.fileno()))
            text = os.fsdecode(file.read().removeprefix(codecs.BOM_UTF8))
    except OSError as error:
        raise BadUsage(f"--env-file {path}: {reason(error)}", hint=path_hint(path)) from None
    if writer is not None:
        hint = "chmod go-w on it, or a copy of your own: variables can make workers run other programs"
        raise BadUsage(f"--env-file {path}: {writer}", hint=hint)
    return parse_env_file(text, source=str(path))


def parse_env_file(text: str, *, source: str) -> list[EnvLine]:
    r"""Return the variables of a text, in order. Raises BadUsage with `source` and line.

    The rules are a POSIX shell's without expansion: `#` begins a comment at the start of a word, 'single quotes' keep
    everything, "double quotes" know \n \t \r \\ \" \$ \` and may span lines, as single quotes may.
    """
    lines: list[EnvLine] = []
    position, number = 0, 1
    while position < len(text):
        start = position
        if blank := _NOTHING.match(text, position):
            position = blank.end()
        else:
            line, position = _variable(text, position, f"{source}:{number}", number)
            lines.append(line)
        number += text.count("\n", start, position)
    return lines


def _variable(text: str, position: int, place: str, number: int) -> tuple[EnvLine, int]:
    head = _NAME.match(text, position)
    if head is None:
        raise BadUsage(f"{place}: not NAME=VALUE")
    position = head.end()
    value: str | None = None
    if head["equals"] and _OPEN_QUOTE.match(text, position):
        value, position = _quoted(text, position, place)
    elif head["equals"]:
        raw = _REST_OF_LINE.match(text, position)
        assert raw is not None  # noqa: S101 (the pattern matches anything, the empty text too)
        # Unquoted values end at ` #`, or at the end of the line.
        return EnvLine(number, head["name"], _COMMENT.sub("", raw[0]).strip()), raw.end()
    line_end = _NOTHING.match(text, position)
    if line_end is None:
        cause = "text after the closing quote" if head["equals"] else "not NAME=VALUE (no spaces before '=')"
        raise BadUsage(f"{place}: {cause}")
    return EnvLine(number, head["name"], value), line_end.end()


def _quoted(text: str, position: int, place: str) -> tuple[str, int]:
    quoted = _QUOTED.match(text, position)
    if quoted is None:
        raise BadUsage(f"{place}: no closing quote")
    if quoted["single"] is not None:
        return quoted["single"], quoted.end()
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[0]), quoted["double"]), quoted.end()
