"""Hostfiles: dialects of Open MPI, Horovod, DeepSpeed and MPICH, told apart line by line, and hvlaunch's own fields.

A line is a host as in `-H`, then fields: `gpu[01-04] slots=8 port=2222  # comment`. References: Open MPI's hostfile lexer
(spellings of fields in lower case, spaces around `=`, `#` begins a comment anywhere), MPICH's Hydra (`host:4 user=name`),
DeepSpeed and horovodrun (`host slots=4`).
"""

import os
import shlex
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hvlaunch.errors import BadHost, BadUsage
from hvlaunch.hosts.parse import MAX_SLOTS, Mention, integer, is_address, is_user, merge, parse_host
from hvlaunch.job import Host
from hvlaunch.owners import other_writer, path_hint, reason

__all__ = ["MAX_TEXT", "hostfile_line", "parse_hostfile", "read_hostfile"]

_SPELLINGS = {
    "slots": ("slots", "count", "cpu"),
    "max_slots": ("max_slots", "max-slots", "slots_max", "slots-max"),
    "user": ("user", "username", "user_name", "user-name"),
    "port": ("port",),
    "identity": ("identity",),
    "python": ("python",),
    "address": ("address",),
}
_FIELDS = {spelling: field for field, spellings in _SPELLINGS.items() for spelling in spellings}
# These name files of this machine, and programs to run: only the user's own hostfile may have them.
_OWN_FIELDS = ("identity", "python")
_MAX_PORT = 65_535

_MAX_LINE = 1 << 14

MAX_TEXT = 4 << 20
"""Bytes of a hostfile, or of a script's output: enough for the most hosts of a job."""


def read_hostfile(path: Path, warn: Callable[[str], object] = str, *, is_named: bool = True) -> list[Host]:
    """Return a file's hosts, each once, in the order of first mention.

    A file that another user can change may choose hosts, whose keys are checked, and `warn` gets a line; it may not choose
    programs or keys to log in with, nor may a file that the user did not name. A file that every user can change is refused.

    Raises BadHost for a wrong line, BadUsage if the file is unreadable or has no host.
    """
    try:
        with path.open("rb") as file:
            # fstat of the open file: the path could be replaced between check and reading.
            status = os.fstat(file.fileno())
            data = file.read(MAX_TEXT + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        cause = reason(error) if isinstance(error, OSError) else error
        raise BadUsage(f"hostfile {path}: {cause}", hint=path_hint(path)) from None
    writer = other_writer(status)
    if writer is not None:
        if stat.S_ISREG(status.st_mode) and status.st_mode & stat.S_IWOTH:
            raise BadUsage(f"hostfile {path}: {writer}", hint=f"chmod o-w {shlex.quote(str(path))}")
        warn(f"hostfile {path}: {writer}; anyone who can change it chooses the hosts of this job")
    if len(data) > MAX_TEXT:
        raise BadUsage(f"hostfile {path}: it is longer than {MAX_TEXT >> 20} MiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadUsage(f"hostfile {path}: line {line} is not UTF-8 text") from None
    hosts = parse_hostfile(text, str(path), is_own=writer is None and is_named)
    if not hosts:
        raise BadUsage(f"hostfile {path}: it has no hosts", hint="a line such as: host slots=4")
    return hosts


def parse_hostfile(text: str, source: str, *, is_own: bool = True) -> list[Host]:
    """Return the hosts of a text, possibly none. `source` names it in errors.

    `is_own`: the text is the user's, and may have python= and identity=. Raises BadHost.
    """
    lines = enumerate(text.split("\n"), 1)
    return merge(
        mention for number, line in lines for mention in _mentions(line, source, number, is_own=is_own)
    )


def hostfile_line(host: Host, **others: object) -> str:
    """Return the line of a hostfile that gives this host; `others` are values in place of the host's."""
    values = {name: others.get(name, getattr(host, name)) for name in _SPELLINGS if hasattr(host, name)}
    words = [f"{name}={_quoted(str(value))}" for name, value in values.items() if value is not None]
    return " ".join([f"[{host.name}]" if ":" in host.name else host.name, *words])


def _quoted(text: str) -> str:
    quote = "'" if '"' in text else '"'
    return f"{quote}{text}{quote}" if any(char in text for char in " #='\"") else text


def _mentions(line: str, source: str, number: int, *, is_own: bool) -> Iterator[Mention]:
    # Splitting a line takes quadratic time.
    if len(line) > _MAX_LINE:
        raise BadHost(f"a line of more than {_MAX_LINE} characters", word=line, source=source, line=number)
    try:
        tokens = _tokens(line)
    except ValueError:
        raise BadHost("a quote is not closed", word=line.strip(), source=source, line=number) from None
    if not tokens:
        return
    word, *field_words = tokens
    if field_words and field_words[0].startswith("="):
        raise BadHost("a line must begin with a host", word=word, source=source, line=number)
    hosts = parse_host(word, source=source, line=number)
    fields = _read_words(field_words, source, number)
    for field in fields.keys() & _OWN_FIELDS:
        if not is_own:
            cause = f"{field}= is allowed only in a hostfile that you named and that only you can change"
            raise BadHost(cause, word=word, source=source, line=number)
    slots, most = fields.get("slots", hosts[0].slots), fields.pop("max_slots", None)
    for field in ("slots", "user"):
        if field in fields and getattr(hosts[0], field) is not None:
            raise BadHost(
                f"{field} given twice, here and later in the line", word=word, source=source, line=number
            )
    if most is not None and slots is not None and most < slots:
        raise BadHost(f"slots={slots} is more than max_slots={most}", word=word, source=source, line=number)
    # A range with one address would start all of its workers on one machine.
    if "address" in fields and len(hosts) > 1:
        raise BadHost(
            f"one address can't be used for {len(hosts)} hosts", word=word, source=source, line=number
        )
    for host in hosts:
        yield Mention(replace(host, **fields), word, source, number)


def _tokens(line: str) -> list[str]:
    """Split a line into words, values, and the `=` between them. Raises ValueError for an unclosed quote."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="=")
    lexer.whitespace_split = True
    # A backslash is part of a name: DOMAIN\user.
    lexer.escape = ""
    return list(lexer)


def _read_words(tokens: list[str], source: str, number: int) -> dict[str, Any]:
    """Return the fields of Host, and max_slots, in `word = value` triples."""
    fields: dict[str, Any] = {}
    for start in range(0, len(tokens), 3):
        word, equals, value = (*tokens[start : start + 3], "", "")[:3]
        bad = partial(
            BadHost, word=f"{word}{equals}{value}" if equals == "=" else word, source=source, line=number
        )
        field = _FIELDS.get(word)
        if field is None:
            raise bad(
                f"unknown field; after the host a line may have {', '.join(f'{name}=' for name in _SPELLINGS)}"
            )
        if equals != "=" or not value:
            raise bad(f"no value; write {word}=VALUE")
        if field in fields:
            raise bad(f"{field} given twice")
        try:
            fields[field] = _read_value(field, value)
        except ValueError as error:
            raise bad(str(error)) from None
    return fields


def _read_value(field: str, text: str) -> str | int:
    """Convert a field's text. Raises ValueError with the cause."""
    if not text.isprintable():
        raise ValueError("it has a character that can't be printed")
    if field in ("slots", "max_slots", "port"):
        most = _MAX_PORT if field == "port" else MAX_SLOTS
        number = integer(text, most)
        if number is None:
            raise ValueError(f"{field} must be a whole number from 1 to {most}")
        return number
    if field == "user" and not is_user(text):
        raise ValueError("not a user name")
    if field == "address":
        bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        if not is_address(bare):
            raise ValueError("not an address or a host name")
        return bare
    if field == "identity":
        try:
            return str(Path(text).expanduser())
        except RuntimeError:
            raise ValueError("no home directory for the ~") from None
    return text
