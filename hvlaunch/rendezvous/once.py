"""Requests that must not be done twice, though the client had to send them twice."""

from collections import OrderedDict
from collections.abc import Callable

from hvlaunch.rendezvous.http import Answer

__all__ = ["Once"]

_REMEMBERED = 50_000


class Once:
    """Answers by request id, the newest `size` of them."""

    def __init__(self, size: int = _REMEMBERED) -> None:
        self._size = size
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()

    def __call__(self, identity: bytes | None, act: Callable[[], Answer]) -> Answer:
        """The answer that was given to `identity`, else act()'s. What it raises is not remembered, nor are failures."""
        if identity is None:
            return act()
        answer = self._answers.get(identity)
        if answer is None:
            answer = act()
            if answer.status in (200, 404):
                self._answers[identity] = answer
                if len(self._answers) > self._size:
                    self._answers.popitem(last=False)
        return answer
