"""Lines to paste: the user's line with other options, and answers to a command without a program."""

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from hvlaunch.cli.options import Typed, UnknownOption, by_name, split
from hvlaunch.cli.options.settings import Options, is_options, paste
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.parse import parse_hosts

__all__ = ["check_program", "whole_line", "with_python", "with_whole_lines"]

_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*(?:[:=,.]+[A-Z.]*)*|.*…")
"""Placeholders in advice: FILE, N:M, NAME=VALUE."""
_CLAUSE = re.compile(r"""(?:[^,;'"]|'[^']*'|"[^"]*"|[,;](?! ))*""")
"""The beginning of advice, up to a comma or semicolon before a blank, outside quotes."""
_ADVICE = re.compile(r"(; try: |^ +Try: )(.*)", re.MULTILINE)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_SHORTEST = 3
_NEEDLESS = frozenset(["exec", "launch", "run", "start", "submit"])
_MEANT = {
    "cancel": "stop",
    "dashboard": "top --web",
    "diagnose": "doctor",
    "list": "jobs",
    "monitor": "top",
    "output": "logs",
    "ps": "jobs",
    "resume": "attach",
    "show": "jobs",
    "status": "jobs",
    "ui": "top --web",
}
"""Words of other programs' command lines, and hvlaunch's."""


def whole_line(hint: str, argv: Sequence[str]) -> str:
    """Return the hint as a whole line to paste, if it begins with options for the user's line, or with another command.

    An option of the line is replaced. Another command is the user's, with python or ./ before it. Text behind the first
    clause becomes a comment.
    """
    options = by_name(GROUPS)
    clause = _CLAUSE.match(hint)
    advice = clause[0] if clause is not None else ""
    try:
        words = shlex.split(advice)
        typed, command = split(argv, options, lambda _: False)
    except (UnknownOption, ValueError):
        return hint
    new: Sequence[Typed] = ()
    is_marked = argv[: len(argv) - len(command)][-1:] == ["--"]
    # A host may have sent the hint: it can't put another command into a line that will be pasted.
    if command and words in (["python", command[0]], [f"./{command[0]}"]):
        command = (*words, *command[1:])
    elif is_options(words, options) and not any(map(_PLACEHOLDER.fullmatch, words)):
        new, _ = split(words, options, lambda _: False)
    else:
        return hint
    replaced = {options[option.name].name for option in new if options[option.name].repeats != "add"}
    kept = [option for option in typed if options[option.name].name not in replaced]
    line = [word for option in (*kept, *new) for word in _words(option)]
    # As a comment of the shell, the text behind the line can be pasted with it.
    behind = hint[len(advice) :].lstrip(",; ")
    return f"{paste([*line, *(['--'] if is_marked else ()), *command])}{f'  # {behind}' if behind else ''}"


def with_whole_lines(text: str, argv: Sequence[str]) -> str:
    """Return a message or a report with each advice as a whole line."""
    return _ADVICE.sub(lambda advice: f"{advice[1]}{whole_line(advice[2], argv)}", text)


def _words(option: Typed) -> tuple[str, ...]:
    if option.is_joined and option.name.startswith("--"):
        return (f"{option.name}={option.values[0]}",)
    return (option.name, *option.values)


def with_python(command: tuple[str, ...], cwd: str) -> tuple[str, ...]:
    """Return the command, with python before a script without an execute bit, as torchrun has it.

    Hosts may lack the script, therefore only the working directory on this machine counts.
    """
    script = Path(cwd, command[0])
    is_program = os.access(script, os.X_OK) if "/" in command[0] else shutil.which(command[0])
    return command if is_program or not script.is_file() else ("python", *command)


def check_program(options: Options, argv: Sequence[str], job_words: Sequence[str]) -> None:
    """Check a command without a program on this machine. Raises BadUsage if its first word is meant for hvlaunch, such as one of `job_words`."""
    word, *behind = options.command
    before = argv[: len(argv) - len(options.command)]
    if Path(word).is_file():
        return
    if _ASSIGNMENT.fullmatch(word):
        cause = f"{word.partition('=')[0]}=… is no program: a variable has an option of its own"
        raise BadUsage(cause, hint=paste([*before, "-x", word, *behind]))
    if (first := _first_word(word)) and shutil.which(first) is not None:
        cause = f"{word!r} is one word, in quotes, and no program; the command has words of its own"
        raise BadUsage(cause, hint=paste([*before, *shlex.split(word), *behind]))
    of_hosts = f", or {paste([*before, '--', word, *behind])} for a program of the hosts"
    if options.hosts is not None and _are_hosts(word, behind):
        all_hosts = whole_line(shlex.join(["-H", f"{options.hosts},{word}"]), [*before, *behind])
        other = "" if ":" in word else of_hosts
        raise BadUsage(f"{word} is no program: hosts are separated by commas", hint=f"{all_hosts}{other}")
    if word in _NEEDLESS:
        line = [*before, *behind] if behind else ["-np", "2", "python", "train.py"]
        raise BadUsage(f"hvlaunch needs no {word!r} before the command", hint=paste(line))
    meant = _MEANT.get(word) or next((name for name in job_words if _is_near(word, name)), None)
    if meant is None:
        return
    elsewhere = options.given.keys() & {"hosts", "hostfile", "host_discovery_script", "pool"}
    other = of_hosts if elsewhere else ""
    arguments = [] if word in _MEANT else behind
    raise BadUsage(
        f"{word} is neither a program on this machine nor a word of hvlaunch"
        if word not in job_words
        else f"{word!r} takes no options of a job",
        hint=f"{paste([*meant.split(), *arguments])}{other}",
    )


def _first_word(word: str) -> str:
    """Return the first word of a command that was quoted as a whole; empty for any other word."""
    try:
        words = shlex.split(word)
    except ValueError:
        return ""
    return words[0] if len(words) > 1 else ""


def _are_hosts(word: str, behind: Sequence[str]) -> bool:
    """Return whether a word behind `-H HOSTS` is a host too: a word with slots, or before a program."""
    try:
        parse_hosts(word)
    except BadUsage:
        return False
    return ":" in word or bool(behind and shutil.which(behind[0]))


def _is_near(word: str, name: str) -> bool:
    """Return whether the words differ in one letter at most: added, left out, replaced, or swapped with the next."""
    if len(word) < _SHORTEST:
        return False
    start = next(
        (index for index, (a, b) in enumerate(zip(word, name, strict=False)) if a != b),
        min(len(word), len(name)),
    )
    a, b = word[start:], name[start:]
    is_swapped = a[:2] == b[1::-1] and a[2:] == b[2:]
    return is_swapped or b in (a[1:], a) or b[1:] in (a, a[1:])
