"""What the server remembers of requests that may come twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it needs the parser, which a job without clients does not load
    from hvlaunch.rendezvous.serving.http import Answer

__all__ = ["Once"]

_REMEMBERED = 50_000


class Once:
    """Answers by request id, the newest `size` of them.

    `keep(identity, status, body, headers)`, where it is set, is told of each.
    """

    def __init__(self, size: int = _REMEMBERED) -> None:
        self._size = size
        self._answers: OrderedDict[bytes, tuple[int, bytes, bytes]] = OrderedDict()
        self.keep: Callable[[bytes, int, bytes, bytes], None] | None = None

    def __call__(self, identity: bytes | None, act: Callable[[], Answer]) -> Answer:
        """The answer that was given to `identity`, else act()'s. What it raises is not remembered, nor are failures."""
        if identity is None:
            return act()
        known = self._answers.get(identity)
        if known is not None:
            from hvlaunch.rendezvous.serving.http import Answer  # noqa: PLC0415 (see the top)

            return Answer(*known)
        answer = act()
        if answer.status in (200, 404):
            self.remember(identity, answer.status, answer.body, answer.headers)
            if self.keep is not None:
                self.keep(identity, answer.status, answer.body, answer.headers)
        return answer

    def remember(self, identity: bytes, status: int, body: bytes, headers: bytes) -> None:
        """`identity` was given this answer, by an earlier server."""
        self._answers[identity] = status, body, headers
        if len(self._answers) > self._size:
            self._answers.popitem(last=False)

    def __iter__(self) -> Iterator[tuple[bytes, int, bytes, bytes]]:
        """All that is remembered, the oldest first."""
        for identity, answer in self._answers.items():
            yield identity, *answer
