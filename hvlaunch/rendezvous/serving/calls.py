"""What other threads of the driver want of the server's thread, and wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from hvlaunch.rendezvous.client_errors import RendezvousClosed
from hvlaunch.rendezvous.store import Store

if TYPE_CHECKING:  # they cost most of the start: a job pays for them when it starts a server
    import asyncio
    from concurrent.futures import Future

__all__ = ["Calls"]

T = TypeVar("T")


class Calls:
    """`then(act)` does it when all changes are on record, and so tells nobody too early."""

    def __init__(self, store: Store, then: Callable[[Callable[[], None]], None]) -> None:
        self._store = store
        self._then = then
        self._open: set[Future[Any]] = set()

    def send(self, loop: asyncio.AbstractEventLoop, work: Callable[[], T]) -> Future[T]:
        """Let the loop's thread do it; from any thread."""
        from concurrent.futures import Future  # noqa: PLC0415 (see the top)

        result: Future[T] = Future()
        self._open.add(result)
        result.add_done_callback(self._open.discard)
        loop.call_soon_threadsafe(self._settle, result, work)
        return result

    def begin_wait(self, scope: str, key: str, found: Future[bytes]) -> Callable[[], None]:
        """Let `found` have the value as soon as there is one; what calls that off. In the server's thread."""
        value = self._store.get(scope, key)
        if value is not None:
            found.set_result(value)
            return lambda: None
        self._open.add(found)
        found.add_done_callback(self._open.discard)
        call_off = self._store.when_set(scope, key, lambda value: self._then(lambda: found.set_result(value)))

        def end() -> None:
            call_off()
            self._open.discard(found)

        return end

    def end(self) -> None:
        """Whoever waits still gets RendezvousClosed."""
        for result in list(self._open):
            if not result.done():
                result.set_exception(RendezvousClosed("the rendezvous has ended"))

    def _settle(self, result: Future[T], work: Callable[[], T]) -> None:
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 (raised where the work was asked for)
            result.set_exception(error)
        else:
            self._then(lambda: result.set_result(value))
