"""What a watch tells: what changed in a scope, and up to which version."""

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Changes"]


class Changes(NamedTuple):
    """What changed, up to `version`, where the next watch may begin: values by key, None where it was deleted."""

    version: int
    values: Mapping[str, bytes | None]
    complete: bool = False
    """These are all values of the scope: a key that is not among them is not set."""
