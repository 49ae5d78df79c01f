"""What an option is, as data: nothing here knows how a command line, a help text or a page is made of it."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

__all__ = ["BadValue", "Group", "Option", "Value"]


class BadValue(ValueError):
    """A value that an option does not take; the text says why, without the option's name."""


class Value(NamedTuple):
    """What an option takes: a text, and what it means."""

    metavars: tuple[str, ...] = ()
    """What stands for it in help: `SECONDS`; several are several words."""
    read: Callable[[str], Any] = str
    """From the text of one word to its value. Raises BadValue."""
    choices: tuple[str, ...] = ()
    """All texts that it may be; empty is any."""
    unit: str = ""
    """Of a number: `s`."""
    completion: Literal["", "file", "directory", "hosts", "variables"] = ""
    """What a shell offers for it."""
    has_options: bool = False
    """Whether it is another program's options: its text may begin with a dash."""
    is_assignment: bool = False
    """Whether it is NAME=VALUE, so that a file may have a table of such values."""
    path: Literal["", "here", "hosts"] = ""
    """Whether it is a path, of this machine alone or also of hosts; in a file it counts from the file's directory."""


class Option(NamedTuple):
    """One option. Texts for users have `code` in backquotes."""

    name: str
    """Its name in programs. Options of one name are ways to say the same, each with its own `constant`."""
    flags: tuple[str, ...]
    """Its names on the command line."""
    help: str
    """One phrase that says what it is or does."""
    value: Value | None = None
    """What it takes; None is nothing: it is said or not."""
    field: str = ""
    """What it sets in a JobSpec: `np`, `ssh.port`. Empty: code decides what it does, mostly with other options."""
    variable: str = ""
    """The variable of the workers' environment that it sets."""
    default: str = ""
    """What holds without it, in words; empty is what the field has, if that is anything."""
    more: str = ""
    """Sentences for those who want to know more than `help`."""
    example: str = ""
    """A command line that has it."""
    repeats: Literal["", "list", "join", "add"] = ""
    """What it means more than once: the last counts; all count; all count, joined with commas; all of all sources count."""
    constant: object = True
    """What it sets if it takes nothing."""
    excludes: str = ""
    """Of the options that have the same word here, a source can set at most one."""
    convert: Callable[[Any], Any] | None = None
    """From its value to the field's or the variable's; None where they are the same. Raises BadValue."""
    aliases: tuple[str, ...] = ()
    """More names, for those who know them from other launchers: help does not list them."""
    more_opposites: tuple[str, ...] = ()
    """More names that take it back."""
    is_everyday: bool = False
    """Whether the short help has it."""
    source: Literal["any", "own", "no file", "command line"] = "any"
    """Where it may be set: anywhere; not in a file that nobody named but was found; in no file; on the command line."""
    question: Literal["", "short help", "help", "version", "completion"] = ""
    """What it asks for, in place of a job."""

    @property
    def opposites(self) -> tuple[str, ...]:
        """The names that take it back, if it is a switch: `--no-merge`."""
        if self.value is not None or self.question:
            return ()
        long = [flag for flag in self.flags if flag.startswith("--")]
        return (*(_opposite(flag) for flag in long), *self.more_opposites)

    @property
    def flag(self) -> str:
        """All its names, as messages have them."""
        return "/".join(self.flags)

    @property
    def part(self) -> str:
        """The part of a JobSpec that its field is in: `ssh`; empty is the JobSpec itself."""
        return self.field.rpartition(".")[0]


def _opposite(flag: str) -> str:
    bare = flag.removeprefix("--no-")
    return f"--{bare}" if bare != flag else f"--no-{flag[2:]}"


class Group(NamedTuple):
    """Options that belong together."""

    title: str
    options: tuple[Option, ...]
    about: str = ""
    """A sentence for all of them."""
    pages: tuple[tuple[str, str], ...] = ()
    """Where there is more: titles and paths, as seen from docs/."""
