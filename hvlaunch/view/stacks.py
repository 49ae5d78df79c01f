"""Stacks as a page or a screen shows them, of what POST /stacks gives. Pure."""

from collections.abc import Mapping
from typing import Any

from hvlaunch.console.lines import visible
from hvlaunch.telemetry.stack import from_json, summary, tree_lines

__all__ = ["shown_stacks"]


def shown_stacks(answer: Mapping[str, Any]) -> dict[str, Any]:
    """`summary` is one line, `lines` is all of it: equal stacks are one, the rarest first."""
    stacks = from_json(answer)
    if not stacks:
        return {"summary": "no workers", "lines": []}
    return {"summary": visible(summary(stacks)), "lines": [visible(line) for line in tree_lines(stacks)]}
