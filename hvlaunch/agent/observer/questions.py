"""What an observer can be asked: one function for each kind of question, which gets the question and gives the answer.

An answer is whatever JSON has. What a function raises becomes the answer's `problem`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Mapping

__all__ = ["ANSWERS"]


def _samples(question: Dict[str, Any]) -> Any:
    from hvlaunch.agent.observer.samples import sample  # noqa: PLC0415 (each kind imports its own)

    return sample(question)


ANSWERS: Mapping[str, Callable[[Dict[str, Any]], Any]] = {"samples": _samples}
