"""The keeper of a torchrun job's state at the rendezvous."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

from hvlaunch.rendezvous import (
    RendezvousClosed,
    RendezvousError,
    RendezvousUnreachable,
    TooManyConnections,
)
from hvlaunch.rendezvous.client import Client
from hvlaunch.torch.torchrun.state import JobState, decode, encode, left

__all__ = ["Backend", "Leases", "StateKeeper", "watched"]


class Backend(RendezvousBackend):
    """Keeps the state under one key. A token is the version that the server gives each value.

    Both methods raise RendezvousConnectionError, whose cause is the client's error.
    """

    def __init__(self, client: Client, scope: str, key: str = "state") -> None:
        self._client = client
        self.scope = scope
        self.key = key

    @property
    def name(self) -> str:
        """The backend's name for `--rdzv-backend`."""
        return "hvlaunch"

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token, or None without a state."""
        try:
            now = self._client.read(self.scope, self.key)
        except RendezvousError as error:
            raise RendezvousConnectionError(str(error)) from error
        return None if now.value is None else (now.value, now.version)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Set the state if its token is unchanged, or if no state exists for token None.

        Returns the present value, its token, and True if it was set; None without a value.
        """
        try:
            if token is None:
                now = self._client.read(self.scope, self.key)
                if now.value is not None:
                    return now.value, now.version, False
                token = now.version
            elif not (
                isinstance(token, str) and token.isascii() and token.isdigit()
            ):  # torch may hand over any object: no version of ours
                present = self.get_state()
                return None if present is None else (*present, False)
            was_set, now = self._client.compare_and_set(self.scope, self.key, state, token)
        except RendezvousError as error:
            raise RendezvousConnectionError(str(error)) from error
        return None if now.value is None else (now.value, now.version, was_set)


_WARDENS = 3


def watched(state: JobState, node: str) -> tuple[str, ...]:
    """Return the nodes whose heartbeats this node checks: the first few check all nodes, all nodes check the first few.

    The effort grows with the number of nodes instead of its square. Every death is noticed by a living node, even if the first
    few die at once.
    """
    wardens = state.nodes[:_WARDENS]
    seen = state.nodes if node in wardens else wardens
    return tuple(other for other in seen if other != node)


@dataclass(slots=True)
class _Lease:
    sign: bytes | None
    silence: float = 0.0


class Leases:
    """Heartbeats of other nodes as one node sees them. Times are in seconds.

    lease: the longest silence of a node. interval: the time between two heartbeats, and between two checks. A gap between checks,
    for example while the server is unreachable, counts as two intervals at most: no node is lost because of it.
    """

    def __init__(self, lease: float, interval: float) -> None:
        self._lease = lease
        self._interval = interval
        self._seen: dict[str, _Lease] = {}
        self._looked: float | None = None
        self.alive: frozenset[str] = frozenset()
        """Nodes of the last check that have sent a heartbeat since the first check."""

    def update(self, signs: Mapping[str, bytes | None], now: float) -> list[str]:
        """Record each node's newest heartbeat (None without one), and return the nodes that were silent for a lease."""
        passed = 0.0 if self._looked is None else min(now - self._looked, 2 * self._interval)
        self._looked = now
        alive = set(self.alive)
        seen = {}
        for node, sign in signs.items():
            lease = self._seen.get(node)
            if lease is None:
                lease = _Lease(sign)
            elif lease.sign != sign:
                lease = _Lease(sign)
                alive.add(node)
            else:
                lease.silence += passed
            seen[node] = lease
        self._seen = seen
        self.alive = frozenset(alive & seen.keys())
        return [node for node, lease in seen.items() if lease.silence >= self._lease]


_LOG = logging.getLogger(__name__)
_PASSING = (RendezvousUnreachable, RendezvousClosed, TooManyConnections)
_PAUSE = 0.2  # seconds between tries to reach the rendezvous
_PACE = 0.002  # seconds for each node there
_SLOWEST = 1.0


class StateKeeper:
    """One node's knowledge of the job, updated by one long poll, while heartbeats continue.

    While the rendezvous is unreachable, the knowledge stays, no node is lost, and requests are repeated. A caller that waits for an
    answer or a change gives up after `read_timeout` seconds.
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
        # An older answer must not overtake a newer one.
        self._talk = threading.Lock()
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> JobState | None:
        """The newest known state."""
        return self._state

    @property
    def sees_life(self) -> bool:
        """True if another node of the state has sent a heartbeat since this node began to look."""
        return bool(self._leases.alive)

    def start(self) -> None:
        """Start the thread, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hvlaunch-torchrun", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Remove this node's heartbeat and end the thread, at the latest with its long poll."""
        self._stopped.set()
        with self._talk:
            self._forget([self._node])

    def wait(self, last: JobState | None, seconds: float) -> None:
        """Return when the state differs from `last`, or after `seconds`.

        Raises RendezvousConnectionError if the rendezvous was unreachable for `read_timeout` seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._state is not last or self._lost is not None, seconds)
            if self._lost is not None and self._state is last:
                raise RendezvousConnectionError(
                    f"{self._lost}; it could not be reached for {self._read_timeout:g} s"
                ) from self._lost

    def change(
        self, transition: Callable[[JobState | None], JobState | None], *, once: bool = False
    ) -> JobState | None:
        """Replace the state by transition(state); None or an equal state changes nothing.

        once: do not repeat if the rendezvous is unreachable. Raises RendezvousConnectionError and RendezvousStateError.
        """
        deadline = self._clock() + (0.0 if once else self._read_timeout)
        while True:
            try:
                return self._change(transition)
            except RendezvousConnectionError as error:
                if not isinstance(error.__cause__, _PASSING) or self._clock() >= deadline:
                    raise
            # Not a sleep: stop() ends this pause.
            self._stopped.wait(_PAUSE)

    def _change(self, transition: Callable[[JobState | None], JobState | None]) -> JobState | None:
        while True:
            with self._talk:
                if self._token is None:
                    self._take(self._backend.get_state())
                # Under the lock, from a fresh state: a change computed from an older state would undo a
                # peer's change.
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
            # wait() compares by identity: for an equal state it must see the same object.
            if state != self._state:
                self._state = state
            self._changed.notify_all()

    @property
    def _pace(self) -> float:
        """Seconds to pause after a change: if many nodes come at once, a node sees several changes in one look."""
        return min(_SLOWEST, _PACE * len(self._state.nodes)) if self._state else 0.0

    # The thread:

    def _run(self) -> None:
        version = 0
        due = self._clock()
        reached = True
        while not self._stopped.is_set():
            try:
                # The heartbeat comes first: a busy job could otherwise keep the thread with changes until
                # peers give it up.
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
                # One warning per outage, not one per attempt.
                if reached and not self._stopped.is_set():
                    _LOG.warning("%s; the workers continue, and the rendezvous is tried again", error)
                reached = False
                self._note(error)
                self._stopped.wait(self._interval)
        # Here and not in stop(): the thread may be within its long poll, which uses this client.
        self._client.close()

    def _note(self, error: Exception) -> None:
        """Record that the rendezvous was unreachable; after `read_timeout` seconds it counts as lost."""
        with self._changed:
            if self._failing_since is None:
                self._failing_since = self._clock()
            if self._clock() >= self._failing_since + self._read_timeout:
                self._lost = error
                self._changed.notify_all()

    def _give_a_sign(self) -> None:
        # No sign may follow stop()
        with self._talk:
            if not self._stopped.is_set():
                self._client.put(self._backend.scope, _sign_of(self._node), b"%d" % next(self._signs))
        # Outside the lock, which _change() takes itself.
        state = self._state
        if state is None or self._stopped.is_set():
            return
        others = watched(state, self._node)
        signs = self._client.get_many(self._backend.scope, [_sign_of(other) for other in others])
        lost = self._leases.update(dict(zip(others, signs, strict=True)), self._clock())
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
