"""The collective log: the collectives that workers have begun, for workers that have joined."""

from __future__ import annotations

import atexit
import json
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import distributed as dist

from hvlaunch.named_tuples import NamedTuple
from hvlaunch.torch.backends import tcp_sockets
from hvlaunch.torch.current import ProcessSet, World, is_world, world
from hvlaunch.torch.group_errors import NotInitialized

__all__ = ["GAP", "LoggedStep", "Op", "collective_log", "link_to", "note"]

Op = dist.ReduceOp.RedOpType

_MAPPED = "::ffff:"
"""Prefix of an IPv4 address written as IPv6."""


@contextmanager
def link_to(store: dist.Store) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells if the store's peer is still connected; always True if no connection is visible."""
    # Only the store at the bottom has a host and a port.
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    connection = _connection(store.host, store.port) if isinstance(store, dist.TCPStore) else None
    if connection is None:
        yield lambda: True
        return
    with connection:
        yield lambda: _is_open(connection)


def _connection(host: str, port: int) -> socket.socket | None:
    """Return a duplicate of this process's socket to the store, or None."""
    try:
        addresses = {str(about[4][0]) for about in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return None
    connection = None
    for descriptor, peer in tcp_sockets():
        duplicate = socket.socket(fileno=descriptor)
        if connection is None and peer[0].removeprefix(_MAPPED) in addresses and peer[1] == port:
            connection = duplicate
        else:
            duplicate.close()
    return connection


def _is_open(connection: socket.socket) -> bool:
    try:
        # Peeking leaves torch's bytes in place. An empty answer is the peer's end of the connection.
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


_LOOK = 0.25
"""Seconds between two checks for workers that have joined."""
_POLL = 0.002
"""Seconds between two checks of a joined worker for its peers' next collective."""
_KEPT = 1 << 14
_PREFIX = "hvlaunch/join"
_END = "end"
GAP = "gap"
"""Kind of a step that stands for forgotten ones."""


class LoggedStep(NamedTuple):
    """One collective: its kind, its tensor's shape and dtype, and the operator (or its name) or the root."""

    kind: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    how: Op | str | int = ""

    def encoded(self) -> str:
        how = self.how.name if isinstance(self.how, Op) else self.how
        return json.dumps([self.kind, self.shape, str(self.dtype).removeprefix("torch."), how])

    @classmethod
    def decoded(cls, text: bytes) -> LoggedStep:
        kind, shape, dtype, how = json.loads(text)
        return cls(kind, tuple(shape), getattr(torch, dtype), how)


class CollectiveLog:
    """The log of this worker for a world. It does not keep the world alive."""

    def __init__(self, own_world: World) -> None:
        self._world = weakref.ref(own_world)
        self._is_alone = own_world.place.size == 1
        self._count = 0
        self._under_way = 0
        """Number of collectives that may still run."""
        self._newest: deque[LoggedStep] = deque(maxlen=_KEPT)
        self._turn = threading.Lock()
        self._joins = 0
        """Number of times that all workers have joined."""
        self._followers = 0
        """Number of joined workers since then, as far as this worker has looked."""
        self._follows = False
        self._watcher: threading.Thread | None = None
        self._is_over = threading.Event()

    def is_of(self, other: World) -> bool:
        return self._world() is other

    def add(self, step: LoggedStep) -> Callable[[], None]:
        """Log a collective that is about to begin. Call the returned function at its end."""
        if self._is_alone:
            return _nothing
        with self._turn:
            self._count += 1
            self._under_way += 1
            self._newest.append(step)
            # The thread starts with the first collective: many scripts import this library and never use a
            # group.
            if self._watcher is None:
                self._watch()
            # A worker that follows must not publish the steps that it repeats.
            if self._followers and not self._follows:
                self._tell(self._count, step)
        return self._ended

    def _ended(self) -> None:
        with self._turn:
            self._under_way -= 1

    def follow(self, take_part: Callable[[LoggedStep], object]) -> int:
        """Take part in all collectives of the peers until every worker follows; return the rank that joined last. `take_part` logs its step."""
        place = world().place
        self._follows = True
        # Before this worker counts as joined: the last to join reads the counts of all.
        self._store.set(self._key("count", place.rank), str(self._count))
        joined = self._store.add(self._key("joined"), 1)
        self._store.set(self._key("from", joined), str(self._count))
        if joined == place.size:
            # The last worker to join ends the wait of all: no peer is left that could begin another
            # collective.
            counts = [int(self._store.get(self._key("count", rank))) for rank in range(place.size)]
            # Behind the last step of any worker, so that every worker has taken part in all steps.
            self._tell(max(counts) + 1, LoggedStep(_END, how=place.rank))
        while (step := self._awaited(self._count + 1)).kind != _END:
            take_part(step)
        with self._turn:
            self._joins += 1
            self._followers, self._follows = 0, False
        return int(str(step.how))

    @property
    def _store(self) -> dist.Store:
        own_world = self._world()
        if own_world is None:
            raise NotInitialized
        return own_world.store

    def _awaited(self, number: int) -> LoggedStep:
        key = self._key("step", number)
        # Not get(): it gives up after the store's timeout, and peers may compute for longer.
        while not self._store.check([key]):
            time.sleep(_POLL)
        return LoggedStep.decoded(self._store.get(key))

    def _tell(self, number: int, step: LoggedStep) -> None:
        self._store.set(self._key("step", number), step.encoded())

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (_PREFIX, self._joins, *parts)))

    def _watch(self) -> None:
        self._watcher = threading.Thread(target=self._look, name="hvlaunch join", daemon=True)
        self._watcher.start()
        atexit.register(self._end)

    def _look(self) -> None:
        # A RuntimeError of the store means that the world is over.
        with suppress(RuntimeError), link_to(self._store) as is_linked:
            while not self._is_over.wait(_LOOK) and is_world(self._world()) and is_linked():
                # Otherwise no peer waits for this worker's log, and the store may vanish at any moment.
                while (self._under_way or self._follows) and self._store.check(
                    [key := self._key("from", self._followers + 1)]
                ):
                    with self._turn:
                        # Otherwise all have joined meanwhile.
                        if key == self._key("from", self._followers + 1):
                            self._tell_follower(int(self._store.get(key)))
        atexit.unregister(self._end)

    def _tell_follower(self, count: int) -> None:
        """Publish the steps that a worker lacks that joined after `count` steps."""
        begin = self._count - len(self._newest)
        if count < begin:
            self._tell(count + 1, LoggedStep(GAP))
        # Under the lock of the caller, so no step can be added between the last one published and the count.
        for number, step in enumerate(self._newest, begin + 1):
            if number > count:
                self._tell(number, step)
        self._followers += 1

    def _end(self) -> None:
        """Stop the thread before Python ends: a thread inside torch at that moment aborts the process."""
        self._is_over.set()
        if self._watcher is not None:
            self._watcher.join()


_log: CollectiveLog | None = None


def collective_log() -> CollectiveLog:
    """Return the log of the process's world. Raises NotInitialized."""
    # One per process, like torch's groups. A new round has another world, and so another log.
    global _log  # noqa: PLW0603 (as the world is the process')
    now = world()
    if _log is None or not _log.is_of(now):
        _log = CollectiveLog(now)
    return _log


def note(process_set: ProcessSet, step: LoggedStep) -> Callable[[], None]:
    """Log a collective that is about to begin. Call the returned function at its end.

    Joined workers take part in the set of all workers only, so other sets are not logged.
    """
    return collective_log().add(step) if process_set.is_all else _nothing


def _nothing() -> None:
    pass
