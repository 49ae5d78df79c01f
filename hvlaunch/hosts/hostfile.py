"""Hostfiles: the dialects of Open MPI, Horovod, DeepSpeed and MPICH, told apart line by line, and our own fields.

A line is a host as in `-H`, then fields: `gpu[01-04] slots=8 port=2222  # comment`. Sources: Open MPI's
hostfile lexer (the fields' spellings, lower case only, spaces around `=`, `#` anywhere begins a comment),
MPICH's Hydra (`host:4 user=name`), DeepSpeed and horovodrun (`host slots=4`).
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
from hvlaunch.owners import other_writer

__all__ = ["MAX_TEXT", "parse_hostfile", "read_hostfile"]

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
_OWN_FIELDS = ("identity", "python")
"""What names files of this machine, and programs that may run here."""
_MAX_PORT = 65_535

_MAX_LINE = 1 << 14

MAX_TEXT = 4 << 20
"""Bytes of a hostfile, or of what a script prints: more hosts than there may be."""


def read_hostfile(path: Path, warn: Callable[[str], object] = str, *, is_named: bool = True) -> list[Host]:
    """The hosts of a file, each once, in the order of first mention.

    A file that other users can change may choose the hosts, since their keys are checked, and `warn` is told; but
    not what runs or which key is used; nor may one that nobody named. One that every user can change is not used at all.

    Raises BadHost where a line is wrong, BadUsage where the file can't be read or has no host in it.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(MAX_TEXT + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        cause = error.strerror if isinstance(error, OSError) else error
        raise BadUsage(f"hostfile {path}: {cause}") from None
    writer = other_writer(status)
    if writer is not None:
        if stat.S_ISREG(status.st_mode) and status.st_mode & stat.S_IWOTH:
            raise BadUsage(f"hostfile {path}: {writer}", hint=f"chmod o-w {path}")
        warn(f"hostfile {path}: {writer}; whoever can change it chooses the hosts of this job")
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
    """The hosts of a hostfile's text, which may be none. `source` names it in errors.

    What is not the user's own text may not name files of this machine: no python=, no identity=. Raises BadHost.
    """
    lines = enumerate(text.split("\n"), 1)
    return merge(
        mention for number, line in lines for mention in _mentions(line, source, number, is_own=is_own)
    )


def _mentions(line: str, source: str, number: int, *, is_own: bool) -> Iterator[Mention]:
    if len(line) > _MAX_LINE:  # to take it apart takes time that grows with the square of its length
        raise BadHost(f"a line of more than {_MAX_LINE} characters", word=line, source=source, line=number)
    try:
        tokens = _tokens(line)
    except ValueError:
        raise BadHost("a quote is not closed", word=line.strip(), source=source, line=number) from None
    if not tokens:
        return
    word, *rest = tokens
    if rest and rest[0].startswith("="):
        raise BadHost("a line must begin with a host", word=word, source=source, line=number)
    hosts = parse_host(word, source=source, line=number)
    fields = _read_words(rest, source, number)
    for field in fields.keys() & _OWN_FIELDS:
        if not is_own:
            cause = f"{field}= is taken only from a hostfile that you named and nobody else can change"
            raise BadHost(cause, word=word, source=source, line=number)
    slots, most = fields.get("slots", hosts[0].slots), fields.pop("max_slots", None)
    for field in ("slots", "user"):
        if field in fields and getattr(hosts[0], field) is not None:
            raise BadHost(
                f"{field} given twice, here and later in the line", word=word, source=source, line=number
            )
    if most is not None and slots is not None and most < slots:
        raise BadHost(f"slots={slots} is more than max_slots={most}", word=word, source=source, line=number)
    if "address" in fields and len(hosts) > 1:
        raise BadHost(
            f"one address can't be used for {len(hosts)} hosts", word=word, source=source, line=number
        )
    for host in hosts:
        yield Mention(replace(host, **fields), word, source, number)


def _tokens(line: str) -> list[str]:
    """Words, values, and the `=` between them. Raises ValueError where a quote is not closed."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="=")
    lexer.whitespace_split = True
    lexer.escape = ""  # DOMAIN\user
    return list(lexer)


def _read_words(tokens: list[str], source: str, number: int) -> dict[str, Any]:
    """The fields of Host, and max_slots, that `word = value` triples say."""
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
    """Raises ValueError with the cause."""
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
