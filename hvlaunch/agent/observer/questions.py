"""What an observer can be asked: one function for each kind of question, which gets the question and gives the answer.

An answer is whatever JSON has. What a function raises becomes the answer's `problem`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Mapping

__all__ = ["ANSWERS"]


class _Samples:
    """Keeps what has to be known of the sample before."""

    def __init__(self) -> None:
        self._samples: Any = None

    def __call__(self, question: Dict[str, Any]) -> Any:
        if self._samples is None:
            from hvlaunch.agent.observer.samples import Samples  # noqa: PLC0415 (each kind imports its own)

            self._samples = Samples()
        return self._samples.take(question["workers"], question["paths"])


def _stacks(question: Dict[str, Any]) -> Any:
    from hvlaunch.agent.observer.stacks import answer  # noqa: PLC0415 (as the samples)

    return answer(question)


def _py_spy(question: Dict[str, Any]) -> Any:
    from hvlaunch.agent.observer.stacks import take_py_spy  # noqa: PLC0415 (as the samples)

    return take_py_spy(question)


def _peers(question: Dict[str, Any]) -> Any:
    from hvlaunch.agent.observer.peers import answer  # noqa: PLC0415 (as the samples)

    return answer(question)


ANSWERS: Mapping[str, Callable[[Dict[str, Any]], Any]] = {
    "samples": _Samples(),
    "stacks": _stacks,
    "stacks_before_kill": _stacks,  # which waits for nobody's request
    "py_spy": _py_spy,
    "peers": _peers,
}
