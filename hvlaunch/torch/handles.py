"""Handles of collectives in progress."""

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
    """A collective in progress, as functions ending in `_async` return it; `wait()` returns its result.

    Keep the handle until then. An in-place tensor gets its value through wait() or is_done(), or Horovod's synchronize() or poll().
    """

    def __init__(
        self,
        works: Iterable[dist.Work | None],
        finish: Callable[[], T],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`finish` makes the result after torch's works are done. `on_end` is called then if the end is known: a GPU may still be busy."""
        self._works = [work for work in works if work is not None]
        self._finish: Callable[[], T] | None = finish
        self._on_end = on_end
        self._result: list[T] = []

    def is_done(self) -> bool:
        """Return True if wait() would not block. An in-place tensor then has its result."""
        if not all(work.is_completed() for work in self._works):
            return False
        # Wait() raises it again.
        with suppress(CollectiveFailed):
            self.wait()
        return True

    def wait(self) -> T:
        """Return the result, on every call. Raises HorovodInternalError, a RuntimeError, if a worker is lost."""
        if self._finish is not None:
            with as_failed():
                for work in self._works:
                    work.wait()
            if all(work.is_completed() for work in self._works):
                self._on_end()
            # Works hold the tensors' memory, which the script may want back before it drops the handle.
            self._works.clear()
            self._result.append(self._finish())
            self._finish = None
        return self._result[0]

    def then(self, make: Callable[[T], U]) -> Handle[U]:
        """Return a handle whose result is made of this handle's result."""
        return Handle(self._works, lambda: make(self.wait()))


def together(handles: Sequence[Handle[T]]) -> Handle[list[T]]:
    """Return one handle for several."""
    works = [work for handle in handles for work in handle._works]  # noqa: SLF001 (of the same class)
    return Handle(works, lambda: [handle.wait() for handle in handles])


def synchronize(handle: Handle[T]) -> T:
    """Wait for a collective and return its result. Raises HorovodInternalError, a RuntimeError, if a worker is lost."""
    return handle.wait()


def poll(handle: Handle[Any]) -> bool:
    """Return True if synchronize() would return at once; an in-place tensor then has its new value."""
    return handle.is_done()
