"""A host and its workers at one moment, measured."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict

__all__ = ["sample"]


def sample(question: Dict[str, Any]) -> Dict[str, Any]:
    """What the host and the workers (`workers`: pairs of rank and pid) do now."""
    return {"workers": question["workers"]}
