"""The words of a command line: which are hvlaunch's options, and where the user's command begins.

argparse can't say it: it takes words of the command that look like options for its own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hvlaunch.cli.options.option import Group, Option

__all__ = ["Typed", "UnknownOption", "by_name", "split", "words_of"]


class Typed(NamedTuple):
    """An option as it stands on the command line."""

    name: str
    values: Sequence[str]
    is_joined: bool = False
    """Whether name and value are one word."""


class UnknownOption(Exception):
    """There is no such option as the first of these words, which are all that is left of the line."""

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(words[0])
        self.words = words


def by_name(groups: Sequence[Group]) -> dict[str, Option]:
    """The options by all their names."""
    return {
        flag: option
        for group in groups
        for option in group.options
        for flag in (*option.flags, *option.aliases, *option.opposites)
    }


def split(
    argv: Sequence[str], options: Mapping[str, Option], is_foreign: Callable[[str], bool]
) -> tuple[list[Typed], Sequence[str]]:
    """The options, and the user's command.

    It begins at the first word that is no option and no option's value. `is_foreign` is whether another launcher has an
    option of that name. Raises UnknownOption.
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
    """How many of the words, from the first on, are one of the options with its values; 0 if it is none."""
    word = words[0]
    if word in options:
        value = options[word].value
        return 1 + (0 if value is None else len(value.metavars) or 1)
    if word.partition("=")[0] in options:
        return 1
    option = options.get(word[:2])
    if option is None or option.value is None:
        return 0
    return 0 if _is_like_a_name(word) and is_foreign(word) else 1


def _is_like_a_name(word: str) -> bool:
    """Whether what seems to be a short name with its value, `-p2222`, may be another launcher's option: `-ppn`."""
    return all(part.isalpha() for part in word[1:].split("-"))


def _typed(words: Sequence[str], options: Mapping[str, Option]) -> Typed:
    name, *values = words
    if name in options:
        return Typed(name, values)
    long, equals, value = name.partition("=")
    if equals and long in options:
        return Typed(long, [value], is_joined=True)
    return Typed(name[:2], [name[2:]], is_joined=True)
