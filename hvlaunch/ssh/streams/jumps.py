"""One connection to each jump host, for all who need it."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from hvlaunch.errors import StartTimeout

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["Jumps"]


class _Closable(Protocol):
    def is_open(self) -> bool: ...

    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


class Jumps(Generic[C]):
    """The connections to jump hosts, by the way to them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[str, ...], Future[C]] = {}
        self._doubted: list[C] = []

    def get(self, key: tuple[str, ...], make: Callable[[], C], *, host: str, timeout: float) -> C:
        """The connection of that key: made by one of those who ask at once, and anew where it is gone.

        `host` is for messages. Raises what `make` raises, for all who wait for it; StartTimeout.
        """
        from concurrent.futures import Future  # noqa: PLC0415 (5 ms, before any connection; few hosts are behind others)
        from concurrent.futures import TimeoutError as TooLate  # noqa: PLC0415

        with self._lock:
            future = self._made.get(key)
            is_mine = future is None or (future.done() and not future.result().is_open())
            if future is None or is_mine:
                future = self._made[key] = Future()
        if is_mine:
            try:
                future.set_result(make())
            except BaseException as error:  # noqa: BLE001  (those who wait get it too)
                with self._lock:
                    del self._made[key]
                future.set_exception(error)
        try:
            return future.result(timeout)
        except TooLate:
            cause = f"no connection to its jump host {key[-1]} within {timeout:.0f} s"
            raise StartTimeout(cause, host=host) from None

    def doubt(self, connection: C) -> None:
        """It does not answer: whoever asks from now on gets another one. Those who have it may go on with it."""
        with self._lock:
            for key, future in [*self._made.items()]:
                if future.done() and not future.exception() and future.result() is connection:
                    self._doubted.append(connection)
                    del self._made[key]

    def close(self) -> None:
        """Close them, the farthest first. May be repeated."""
        with self._lock:
            made = [*self._made.values()]
            doubted = [*self._doubted]
            self._made.clear()
            self._doubted.clear()
        for connection in doubted:
            connection.close()
        for future in reversed(made):
            if future.done():
                future.result().close()
