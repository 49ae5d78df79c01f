"""Collectives that are on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from torch import distributed as dist

from hvlaunch.torch.group_errors import CollectiveFailed, as_failed

__all__ = ["Handle", "poll", "synchronize", "together"]

T = TypeVar("T")
U = TypeVar("U")


class Handle(Generic[T]):
    """A collective that was begun, as the functions that end with `_async` give it; `wait()` gives its result.

    Keep it until then: what is in place gets its value by wait() or is_done(), or by synchronize() or poll() as with Horovod.
    """

    def __init__(
        self,
        works: Iterable[dist.Work | None],
        finish: Callable[[], T],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`finish` makes the result, once all of torch's works are done; `on_end` is called then, if that is known: a GPU's may go on."""
        self._works = [work for work in works if work is not None]
        self._finish: Callable[[], T] | None = finish
        self._on_end = on_end
        self._result: list[T] = []

    def is_done(self) -> bool:
        """Whether wait() would not block. Where it is true, and the collective is one in place, its tensor has the result."""
        if not all(work.is_completed() for work in self._works):
            return False
        with suppress(CollectiveFailed):  # wait() raises it again
            self.wait()
        return True

    def wait(self) -> T:
        """The result; may be called again. Raises HorovodInternalError, a RuntimeError, where a worker is lost."""
        if self._finish is not None:
            with as_failed():
                for work in self._works:
                    work.wait()
            if all(work.is_completed() for work in self._works):
                self._on_end()
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
    """Wait for a collective that was begun; its result. Raises HorovodInternalError, a RuntimeError, where a worker is lost."""
    return handle.wait()


def poll(handle: Handle[Any]) -> bool:
    """Whether synchronize() would return at once; then a tensor that is to be changed in place has its new value."""
    return handle.is_done()
