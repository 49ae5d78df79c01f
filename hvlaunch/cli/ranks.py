"""Sets of ranks, as in --ranks 0,8-15."""

import argparse
import re

__all__ = ["parse_ranks"]

_PART = r"([0-9]{1,9})(?:-([0-9]{1,9})(?:/([0-9]{1,9}))?)?"


def parse_ranks(text: str) -> tuple[range, ...]:
    """Numbers, ranges with both ends included, and steps: `0,8-15`, `0-62/2`. Raises argparse.ArgumentTypeError."""
    return tuple(_part(part.strip()) for part in text.split(","))


def _part(text: str) -> range:
    found = re.fullmatch(_PART, text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a rank nor a range such as 8-15")
    first = int(found[1])
    last, step = int(found[2] or first), int(found[3] or 1)
    if last < first or step == 0:
        raise argparse.ArgumentTypeError(f"{text!r} has no rank in it")
    return range(first, last + 1, step)
