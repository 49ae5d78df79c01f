"""One thread per node: it keeps the node's lease, follows the state, and drops nodes that are silent."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from itertools import count

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError

from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.client_errors import (
    RendezvousClosed,
    RendezvousError,
    RendezvousUnreachable,
    TooManyConnections,
)
from hvlaunch.torch.torchrun.backend import Backend
from hvlaunch.torch.torchrun.leases import Leases, watched
from hvlaunch.torch.torchrun.state import JobState, decode, encode, left

__all__ = ["Keeper"]

_LOG = logging.getLogger(__name__)
_PASSING = (RendezvousUnreachable, RendezvousClosed, TooManyConnections)
_PAUSE = 0.2  # seconds between tries to reach the rendezvous
_PACE = 0.002  # seconds for each node there
_SLOWEST = 1.0


class Keeper:
    """What this node knows of the job, kept up to date by one long poll; signs of life go on beside it.

    Where the rendezvous can't be reached, what is known stands, nobody is lost, and it is tried again. The one
    who waits for an answer, or for the state to change, gives up after `read_timeout` seconds.
    """

    def __init__(
        self,
        client: Client,
        backend: Backend,
        node: str,
        *,
        interval: float,
        lease: float,
        read_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._backend = backend
        self._node = node
        self._interval = interval
        self._read_timeout = read_timeout
        self._clock = clock
        self._leases = Leases(lease, interval)
        self._signs = count()
        self._state: JobState | None = None
        self._token: object = None
        self._failing_since: float | None = None
        self._lost: Exception | None = None
        self._talk = threading.Lock()  # an older answer must not overtake a newer one
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> JobState | None:
        """The newest known."""
        return self._state

    @property
    def sees_life(self) -> bool:
        """Whether another node of the state has given a sign of life since this one looks."""
        return bool(self._leases.alive)

    def start(self) -> None:
        """Begin, if it has not begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hvlaunch-torchrun", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Take this node's sign away and end the thread, which may take until the end of its long poll."""
        self._stopped.set()
        with self._talk:
            self._forget([self._node])

    def wait(self, known: JobState | None, seconds: float) -> None:
        """Return when the state is no longer `known`, or after so many seconds.

        Raises RendezvousConnectionError where nobody could reach the rendezvous for `read_timeout` seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._state is not known or self._lost is not None, seconds)
            if self._lost is not None and self._state is known:
                raise RendezvousConnectionError(
                    f"{self._lost}; it could not be reached for {self._read_timeout:g} s"
                ) from self._lost

    def change(
        self, transition: Callable[[JobState | None], JobState | None], *, once: bool = False
    ) -> JobState | None:
        """Make the state what transition() makes of it; None or the same is for nothing to do.

        once: do not try again where the rendezvous can't be reached.
        Raises RendezvousConnectionError and RendezvousStateError.
        """
        deadline = self._clock() + (0.0 if once else self._read_timeout)
        while True:
            try:
                return self._change(transition)
            except RendezvousConnectionError as error:
                if not isinstance(error.__cause__, _PASSING) or self._clock() >= deadline:
                    raise
            self._stopped.wait(_PAUSE)

    def _change(self, transition: Callable[[JobState | None], JobState | None]) -> JobState | None:
        while True:
            with self._talk:
                if self._token is None:
                    self._take(self._backend.get_state())
                changed = transition(self._state)
                if changed is None or changed == self._state:
                    return self._state
                answer = self._backend.set_state(encode(changed), self._token)
                self._take(None if answer is None else answer[:2])
                if answer is not None and answer[2]:
                    return self._state
            self._stopped.wait(random.random() * self._pace)  # noqa: S311 (who lost a race steps aside)
            self._refresh()

    def _refresh(self) -> None:
        with self._talk:
            self._take(self._backend.get_state())

    def _take(self, answer: tuple[bytes, object] | None) -> None:
        try:
            state = None if answer is None else decode(answer[0])
        except ValueError as error:
            raise RendezvousStateError(str(error)) from error
        with self._changed:
            self._failing_since = self._lost = None
            self._token = None if answer is None else answer[1]
            if state != self._state:
                self._state = state
            self._changed.notify_all()

    @property
    def _pace(self) -> float:
        """Seconds. Where many nodes come at once, each takes several changes in one look."""
        return min(_SLOWEST, _PACE * len(self._state.nodes)) if self._state else 0.0

    # The thread:

    def _run(self) -> None:
        version = 0
        due = self._clock()
        reached = True
        while not self._stopped.is_set():
            try:
                if self._clock() >= due:
                    due = self._clock() + self._interval
                    self._give_a_sign()
                poll = max(due - self._clock(), 0.0)
                changes = self._client.watch(
                    self._backend.scope, self._backend.key, since=version, timeout=poll
                )
                version = changes.version
                if changes.values:
                    self._refresh()
                    self._stopped.wait(self._pace)
                reached = True
                self._failing_since = self._lost = None
            except (  # noqa: PERF203 (each is tried again)
                RendezvousError,
                RendezvousConnectionError,
                RendezvousStateError,
            ) as error:
                if reached and not self._stopped.is_set():
                    _LOG.warning("%s; the workers go on, and the rendezvous is tried again", error)
                reached = False
                self._note(error)
                self._stopped.wait(self._interval)
        self._client.close()

    def _note(self, error: Exception) -> None:
        """The rendezvous was not reached, and is lost where that has lasted."""
        with self._changed:
            if self._failing_since is None:
                self._failing_since = self._clock()
            if self._clock() >= self._failing_since + self._read_timeout:
                self._lost = error
                self._changed.notify_all()

    def _give_a_sign(self) -> None:
        with self._talk:  # no sign may follow stop()
            if not self._stopped.is_set():
                self._client.put(self._backend.scope, _sign_of(self._node), b"%d" % next(self._signs))
        state = self._state
        if state is None or self._stopped.is_set():
            return
        others = watched(state, self._node)
        signs = self._client.get_many(self._backend.scope, [_sign_of(other) for other in others])
        lost = self._leases.look(dict(zip(others, signs, strict=True)), self._clock())
        if lost:
            _LOG.warning("lost, because its signs of life stopped: node %s", ", node ".join(lost))
            self._change(lambda state: None if state is None else left(state, lost))
            self._forget(lost)

    def _forget(self, nodes: list[str]) -> None:
        try:
            for node in nodes:
                self._client.delete(self._backend.scope, _sign_of(node))
        except RendezvousError as error:
            _LOG.info("%s", error)


def _sign_of(node: str) -> str:
    return f"sign/{node}"
