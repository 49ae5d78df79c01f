"""The shape of an option, as data. Pure: parsers, help and pages are made from it elsewhere."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

__all__ = ["BadValue", "Option", "OptionGroup", "Value"]


class BadValue(ValueError):
    """An invalid value of an option; the text gives the cause, without the option's name."""


class Value(NamedTuple):
    """The value of an option: text on the command line, and its meaning."""

    metavars: tuple[str, ...] = ()
    """Placeholders in help: `SECONDS`; an option with several takes several words."""
    read: Callable[[str], Any] = str
    """Converts the text of one word. Raises BadValue."""
    choices: tuple[str, ...] = ()
    """Valid texts; empty for any text."""
    unit: str = ""
    """Unit of a number: `s`."""
    completion: Literal["", "file", "directory", "hosts", "variables"] = ""
    """Kind of words that a shell offers."""
    has_options: bool = False
    """Whether the text is another program's options, and may begin with a dash."""
    is_assignment: bool = False
    """Whether the text is NAME=VALUE; a file may then have a table."""
    path: Literal["", "here", "hosts"] = ""
    """A path on this machine (`here`), or on hosts too; in a file it is relative to the file's directory."""


# Not a dataclass: making one takes 0.2 to 1 ms at each start, and a named tuple 0.05.
class Option(NamedTuple):
    """An option. Texts for users have `code` in backquotes."""

    name: str
    """Its name in programs. Options of the same name are alternatives, each with its own `constant`."""
    flags: tuple[str, ...]
    """Its names on the command line."""
    help: str
    """A phrase for help."""
    value: Value | None = None
    """Its value; None for a switch."""
    field: str = ""
    """The field of JobSpec that it sets: `np`, `ssh.port`. Empty if code evaluates it, mostly with other options."""
    variable: str = ""
    """The variable of the workers' environment that it sets."""
    default: str = ""
    """Its default in words; empty for the field's own default."""
    more: str = ""
    """Sentences for the long help."""
    example: str = ""
    """A command line with it."""
    repeats: Literal["", "list", "join", "add"] = ""
    """Effect of repeating it: the last value counts (empty), a list, a list joined by commas, or a list over all sources."""
    constant: object = True
    """The value of a switch that is set."""
    excludes: str = ""
    """Of the options with the same word here, a source can set only one."""
    convert: Callable[[Any], Any] | None = None
    """Converts the value for the field or the variable; None to keep it. Raises BadValue."""
    aliases: tuple[str, ...] = ()
    """Names from other launchers, not listed in help."""
    more_opposites: tuple[str, ...] = ()
    """Further names that take it back."""
    is_everyday: bool = False
    """Whether the short help lists it."""
    source: Literal["any", "own", "no file", "command line"] = "any"
    """Sources that may set it: any; no file without a user's choice (`own`); no file; the command line only."""
    question: Literal["", "short help", "help", "version", "completion"] = ""
    """A question that hvlaunch answers instead of starting a job."""

    @property
    def opposites(self) -> tuple[str, ...]:
        """Names that take a switch back: `--no-merge`."""
        # Only switches have opposites: a question has no value to take back.
        if self.value is not None or self.question:
            return ()
        long = [flag for flag in self.flags if flag.startswith("--")]
        return (*(_opposite(flag) for flag in long), *self.more_opposites)

    @property
    def flag(self) -> str:
        """Its names, as shown in messages."""
        return "/".join(self.flags)

    @property
    def part(self) -> str:
        """The part of JobSpec with its field: `ssh`; empty for JobSpec itself."""
        return self.field.rpartition(".")[0]


def _opposite(flag: str) -> str:
    # The opposite of --no-stall-check is --stall-check.
    bare = flag.removeprefix("--no-")
    return f"--{bare}" if bare != flag else f"--no-{flag[2:]}"


class OptionGroup(NamedTuple):
    """Options of one subject."""

    title: str
    options: tuple[Option, ...]
    about: str = ""
    """A sentence about the whole group."""
    pages: tuple[tuple[str, str], ...] = ()
    """Titles and paths of pages about it, relative to docs/."""
