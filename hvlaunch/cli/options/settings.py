"""Options with their values, wherever they were set; and which of them counts."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hvlaunch.cli.options.option import BadValue, Option
from hvlaunch.errors import BadUsage

__all__ = [
    "HELP_HINT",
    "Setting",
    "check_words",
    "merged",
    "place_of",
    "read_value",
    "typed_setting",
    "value_of",
]

HELP_HINT = "hvlaunch --help"

_NUMBER = re.compile(r"-[0-9]*\.?[0-9]+")


NOT_SET = object()
"""The value of a switch that is taken back, where it is one of several of the same name: as if it had not been set."""


class Setting(NamedTuple):
    """An option that was set once, and its value."""

    option: Option
    texts: tuple[str, ...]
    """Its value in words, as on the command line; a switch has none."""
    value: Any
    called: str
    """Its name where it was set."""
    origin: str = ""
    """Where it was set: `job.yaml`, `environment`; empty is the command line."""
    is_found: bool = False
    """Whether that is a file that nobody named, but that was found from the current directory."""
    table: str = ""
    """The table of the file that sets it: `profiles.big`."""


def place_of(origin: str, table: str) -> str:
    """Return what a message about a key begins with: `job.yaml: [ssh] `; empty for the command line."""
    return (f"{origin}: " if origin else "") + (f"[{table}] " if table else "")


def typed_setting(option: Option, texts: Sequence[str], *, is_off: bool) -> Setting:
    """As it stands on the command line. Raises BadUsage."""
    try:
        return Setting(option, tuple(texts), read_value(option, texts, is_off=is_off), option.flag)
    except BadValue as error:
        raise BadUsage(f"{option.flag}: {error}", hint=HELP_HINT) from None


def read_value(option: Option, texts: Sequence[str], *, is_off: bool = False) -> Any:
    """The option's value of the words; `is_off` is whether it is a switch that is taken back. Raises BadValue."""
    if option.value is None:
        if is_off:
            return False if option.constant is True else NOT_SET
        return option.constant
    choices = option.value.choices
    for text in texts:
        if choices and text not in choices:
            raise BadValue(f"invalid choice: {text!r} (choose from {', '.join(choices)})")
    values = [option.value.read(text) for text in texts]
    return values if len(option.value.metavars) > 1 else values[0]


def check_words(option: Option, texts: Sequence[str], *, is_joined: bool) -> None:
    """Whether an option of the command line has the words that it needs: one that looks like an option is none of them.

    `is_joined` is whether the first is in one word with its name. Raises BadUsage.
    """
    value = option.value
    if value is None:
        if texts:
            raise BadUsage(f"{option.flag}: ignored explicit argument {texts[0]!r}", hint=HELP_HINT)
        return
    count = len(value.metavars) or 1
    is_forgotten = not is_joined and not value.has_options and any(map(_is_like_an_option, texts))
    if len(texts) != count or is_forgotten:
        raise BadUsage(
            f"{option.flag}: expected {'one argument' if count == 1 else f'{count} arguments'}",
            hint=HELP_HINT,
        )


def _is_like_an_option(text: str) -> bool:
    return text.startswith("-") and text != "-" and " " not in text and not _NUMBER.fullmatch(text)


def merged(sources: Iterable[Sequence[Setting]]) -> dict[str, list[Setting]]:
    """What counts of the settings of all sources, of which a later one wins, by the options' names.

    Raises BadUsage where a source sets two options of which at most one can be set.
    """
    found: dict[str, list[Setting]] = {}
    for settings in sources:
        own = _of_one_source(settings)
        for name, each in tuple(own.items()):
            if each[-1].value is NOT_SET:
                del own[name]
                if found.get(name, each)[-1].option == each[-1].option:
                    found.pop(name, None)
        decided = {each[0].option.excludes for each in own.values()} - {""}
        found = {name: each for name, each in found.items() if each[0].option.excludes not in decided}
        for name, each in own.items():
            found[name] = found.get(name, []) + each if each[0].option.repeats == "add" else each
    return found


def _of_one_source(settings: Sequence[Setting]) -> dict[str, list[Setting]]:
    own: dict[str, list[Setting]] = {}
    exclusive: dict[str, Setting] = {}
    for each in settings:
        word = each.option.excludes
        other = exclusive.setdefault(word, each) if word else each
        if other.option != each.option:
            place = place_of(each.origin, each.table)
            raise BadUsage(f"{place}{each.called}: not allowed with {other.called}", hint=HELP_HINT)
        own.setdefault(each.option.name, []).append(each)
    return own


def value_of(settings: Sequence[Setting]) -> Any:
    """The value of an option, of all its settings that count."""
    values = [each.value for each in settings]
    match settings[0].option.repeats:
        case "list" | "add":
            return values
        case "join":
            return ",".join(values)
        case _:
            return values[-1]
