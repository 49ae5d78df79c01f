"""The shape of an option, as data, and how a line is split into options and a command. Pure: help and pages are made elsewhere."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "BadValue",
    "Option",
    "OptionGroup",
    "Typed",
    "UnknownOption",
    "Value",
    "by_name",
    "split",
    "words_of",
]


class BadValue(ValueError):
    """An invalid value of an option; the text gives the cause, without the option's name."""

    def __init__(self, cause: str, *, hint: str | None = None) -> None:
        super().__init__(cause)
        self.hint = hint
        """Advice for the user, or None."""


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
    """Titles and paths of pages about it, relative to docs/reference/."""


class Typed(NamedTuple):
    """An option as it stands on the command line."""

    name: str
    values: Sequence[str]
    is_joined: bool = False
    """Whether name and value are one word."""


class UnknownOption(Exception):
    """The first of the remaining words is not an option of hvlaunch."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(words[0])
        self.words = words


def by_name(groups: Sequence[OptionGroup]) -> dict[str, Option]:
    """Return the options by each of their names."""
    return {
        flag: option
        for group in groups
        for option in group.options
        for flag in (*option.flags, *option.aliases, *option.opposites)
    }


def split(
    argv: Sequence[str], options: Mapping[str, Option], is_foreign: Callable[[str], bool]
) -> tuple[list[Typed], Sequence[str]]:
    """Split a line into options and the user's command.

    The command begins at the first word that is neither an option nor an option's value. `is_foreign` returns whether
    another launcher has an option of that name. Raises UnknownOption.
    """
    typed: list[Typed] = []
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "--":
            return typed, argv[index + 1 :]
        if not word.startswith("-") or word == "-":
            return typed, argv[index:]
        words = argv[index : index + words_of(argv[index:], options, is_foreign)]
        if not words:
            raise UnknownOption(argv[index:])
        typed.append(_typed(words, options))
        index += len(words)
    return typed, ()


def words_of(words: Sequence[str], options: Mapping[str, Option], is_foreign: Callable[[str], bool]) -> int:
    """Return how many of the first words are an option with its values; 0 for an unknown option."""
    word = words[0]
    if word in options:
        value = options[word].value
        return 1 + (0 if value is None else len(value.metavars) or 1)
    if word.partition("=")[0] in options:
        return 1
    # A short name may be in one word with its value: `-p2222`.
    option = options.get(word[:2])
    if option is None or option.value is None:
        return 0
    return 0 if _is_like_a_name(word) and is_foreign(word) else 1


def _is_like_a_name(word: str) -> bool:
    """Return whether a word such as `-p2222` may also be another launcher's option, such as `-ppn`."""
    return all(part.isalpha() for part in word[1:].split("-"))


def _typed(words: Sequence[str], options: Mapping[str, Option]) -> Typed:
    name, *values = words
    if name in options:
        return Typed(name, values)
    long, equals, value = name.partition("=")
    if equals and long in options:
        return Typed(long, [value], is_joined=True)
    return Typed(name[:2], [name[2:]], is_joined=True)
