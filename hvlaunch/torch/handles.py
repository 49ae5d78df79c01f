"""Collectives that are on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from torch import distributed as dist

__all__ = ["Handle", "poll", "synchronize", "together"]

T = TypeVar("T")
U = TypeVar("U")


class Handle(Generic[T]):
    """What has been begun; `wait()` gives its result."""

    def __init__(self, works: Iterable[dist.Work | None], finish: Callable[[], T]) -> None:
        """`finish` makes the result, once all of torch's works are done."""
        self._works = [work for work in works if work is not None]
        self._finish: Callable[[], T] | None = finish
        self._result: list[T] = []

    def is_done(self) -> bool:
        """Whether wait() would not block."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> T:
        """The result; may be called again. Raises RuntimeError where the collective failed."""
        if self._finish is not None:
            for work in self._works:
                work.wait()
            self._works.clear()
            self._result.append(self._finish())
            self._finish = None
        return self._result[0]

    def then(self, make: Callable[[T], U]) -> Handle[U]:
        """One whose result is made of this one's."""
        return Handle(self._works, lambda: make(self.wait()))


def together(handles: Sequence[Handle[T]]) -> Handle[list[T]]:
    """One for all of these."""
    works = [work for handle in handles for work in handle._works]  # noqa: SLF001 (of the same class)
    return Handle(works, lambda: [handle.wait() for handle in handles])


def synchronize(handle: Handle[T]) -> T:
    """Wait for a collective that was begun; its result."""
    return handle.wait()


def poll(handle: Handle[Any]) -> bool:
    """Whether synchronize() would return at once."""
    return handle.is_done()
