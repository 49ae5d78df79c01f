"""`hvlaunch diff`: the differences between two jobs, as text or JSON."""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from hvlaunch.cli.process import print_answer
from hvlaunch.console.lines import visible
from hvlaunch.outside import KnownJob, choose
from hvlaunch.outside.run_record import Difference, differences, not_compared

__all__ = ["diff"]

_MOST_FILES = 50
"""Files that the text names; the JSON form has all."""
_SHORT = 12
"""Digits of a hash."""


def diff(jobs: Sequence[KnownJob], options: argparse.Namespace) -> int:
    """Print the differences. Raises BadUsage for a job without a record."""
    a, b = choose(jobs, options.job), choose(jobs, options.other)
    changes = [*differences(a, b)]
    unknown = not_compared(a, b)
    if options.json:
        rows = [difference._asdict() for difference in changes]
        return print_answer(
            json.dumps({"a": a.id, "b": b.id, "differences": rows, "not_compared": unknown}) + "\n"
        )
    lines = [*_lines(changes), *(f"not compared: {text}" for text in unknown)]
    heading = f"a is {a.label}, b is {b.label}"
    return print_answer(
        "".join(f"{visible(line)}\n" for line in (heading, *(lines or ["no difference is known"])))
    )


def _lines(differences: Sequence[Difference]) -> Iterator[str]:
    files = [difference for difference in differences if difference.part == "file"]
    for difference in differences:
        if difference.part == "file":
            if difference in files[:_MOST_FILES]:
                yield f"file {difference.name}: {_change(difference)}"
        else:
            yield f"{difference.part} {difference.name}: {_value(difference.a)} → {_value(difference.b)}"
    if len(files) > _MOST_FILES:
        yield f"and {len(files) - _MOST_FILES} more files: --json"


def _change(difference: Difference) -> str:
    if difference.a is None:
        return "added"
    return "removed" if difference.b is None else "changed"


def _value(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text[:_SHORT] if re.fullmatch(r"[0-9a-f]{40,64}", text) else text
