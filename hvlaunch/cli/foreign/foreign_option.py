"""What an option of another launcher is, as data."""

from typing import Literal, NamedTuple

__all__ = ["Becomes", "ForeignOption", "absent", "needless", "other", "same", "word"]

Becomes = Literal["same", "another word", "not needed", "not here", "another meaning"]


class ForeignOption(NamedTuple):
    """One option of another launcher.

    In `here`, `{}` is its value, `{=}` its two values as NAME=VALUE, and `{option}` the option with its value.
    """

    spelled: str
    """All its names, and what stands for its value: `-n, --ntasks N`."""
    becomes: Becomes
    here: str = ""
    """What to write here; or why it is not needed, or not there."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name.split()[0] for name in self.spelled.split(", "))

    @property
    def metavars(self) -> tuple[str, ...]:
        """What stands for its values; empty is a switch."""
        return tuple(self.spelled.rpartition(", ")[2].split()[1:])


def same(*all_spelled: str) -> tuple[ForeignOption, ...]:
    """Options that are hvlaunch's too."""
    return tuple(ForeignOption(spelled, "same") for spelled in all_spelled)


def word(here: str, *all_spelled: str) -> tuple[ForeignOption, ...]:
    """Options that have another name here."""
    return tuple(ForeignOption(spelled, "another word", here) for spelled in all_spelled)


def needless(why: str, *all_spelled: str) -> tuple[ForeignOption, ...]:
    """Options that hvlaunch does without."""
    return tuple(ForeignOption(spelled, "not needed", why) for spelled in all_spelled)


def absent(why: str, *all_spelled: str) -> tuple[ForeignOption, ...]:
    """Options for what hvlaunch can't do."""
    return tuple(ForeignOption(spelled, "not here", why) for spelled in all_spelled)


def other(here: str, *all_spelled: str) -> tuple[ForeignOption, ...]:
    """Options whose name means something else here."""
    return tuple(ForeignOption(spelled, "another meaning", here) for spelled in all_spelled)
