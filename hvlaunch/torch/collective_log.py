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
from typing import NamedTuple

import torch
from torch import distributed as dist

from hvlaunch.torch.current import ProcessSet, is_world, world
from hvlaunch.torch.elastic.sockets import tcp_sockets
from hvlaunch.torch.group_errors import NotInitialized
from hvlaunch.torch.reduction import Op
from hvlaunch.torch.world import World

__all__ = ["GAP", "Step", "link_to", "note", "trail"]

_MAPPED = "::ffff:"
"""An IPv4 address as one of IPv6."""


@contextmanager
def link_to(store: dist.Store) -> Iterator[Callable[[], bool]]:
    """What tells whether the other end of the connection to the store is open; always true where there is none to be seen."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    connection = _connection(store.host, store.port) if isinstance(store, dist.TCPStore) else None
    if connection is None:
        yield lambda: True
        return
    with connection:
        yield lambda: _is_open(connection)


def _connection(host: str, port: int) -> socket.socket | None:
    """That of this process to there, by a descriptor of its own."""
    try:
        addresses = {str(about[4][0]) for about in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return None
    found = None
    for descriptor, peer in tcp_sockets():
        one = socket.socket(fileno=descriptor)
        if found is None and peer[0].removeprefix(_MAPPED) in addresses and peer[1] == port:
            found = one
        else:
            one.close()
    return found


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


_LOOK = 0.25
"""Seconds between two looks whether anybody has joined."""
_POLL = 0.002
"""Seconds between two looks what the others have begun, for who has nothing else to do."""
_KEPT = 1 << 14
_PREFIX = "hvlaunch/join"
_END = "end"
GAP = "gap"
"""Steps that nobody remembers."""


class Step(NamedTuple):
    """A collective: its kind, what its tensor is like, and what else there is to know (the operator, or its name; the root)."""

    kind: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    how: Op | str | int = ""

    def encoded(self) -> str:
        how = self.how.name if isinstance(self.how, Op) else self.how
        return json.dumps([self.kind, self.shape, str(self.dtype).removeprefix("torch."), how])

    @classmethod
    def decoded(cls, text: bytes) -> Step:
        kind, shape, dtype, how = json.loads(text)
        return cls(kind, tuple(shape), getattr(torch, dtype), how)


class Trail:
    """That of this worker in a world. It keeps no world alive."""

    def __init__(self, of: World) -> None:
        self._world = weakref.ref(of)
        self._is_alone = of.place.size == 1
        self._count = 0
        self._under_way = 0
        """How many of them are not known to have ended."""
        self._newest: deque[Step] = deque(maxlen=_KEPT)
        self._turn = threading.Lock()
        self._joins = 0
        """How often all have joined."""
        self._followers = 0
        """How many have joined since, as far as this worker has looked."""
        self._follows = False
        self._watcher: threading.Thread | None = None
        self._is_over = threading.Event()

    def is_of(self, other: World) -> bool:
        return self._world() is other

    def add(self, step: Step) -> Callable[[], None]:
        """The worker is about to begin this; what is returned is to be called when that has ended."""
        if self._is_alone:
            return _nothing
        with self._turn:
            self._count += 1
            self._under_way += 1
            self._newest.append(step)
            if self._watcher is None:
                self._watch()
            if self._followers and not self._follows:
                self._tell(self._count, step)
        return self._ended

    def _ended(self) -> None:
        with self._turn:
            self._under_way -= 1

    def follow(self, take_part: Callable[[Step], object]) -> int:
        """Do all that the others do, until all follow; the rank that joined last. `take_part` adds its step."""
        place = world().place
        self._follows = True
        self._store.set(self._key("count", place.rank), str(self._count))
        joined = self._store.add(self._key("joined"), 1)
        self._store.set(self._key("from", joined), str(self._count))
        if joined == place.size:
            counts = [int(self._store.get(self._key("count", each))) for each in range(place.size)]
            self._tell(max(counts) + 1, Step(_END, how=place.rank))
        while (step := self._awaited(self._count + 1)).kind != _END:
            take_part(step)
        with self._turn:
            self._joins += 1
            self._followers, self._follows = 0, False
        return int(str(step.how))

    @property
    def _store(self) -> dist.Store:
        found = self._world()
        if found is None:
            raise NotInitialized
        return found.store

    def _awaited(self, number: int) -> Step:
        key = self._key("step", number)
        while not self._store.check([key]):
            time.sleep(_POLL)
        return Step.decoded(self._store.get(key))

    def _tell(self, number: int, step: Step) -> None:
        self._store.set(self._key("step", number), step.encoded())

    def _key(self, *of: object) -> str:
        return "/".join(map(str, (_PREFIX, self._joins, *of)))

    def _watch(self) -> None:
        self._watcher = threading.Thread(target=self._look, name="hvlaunch join", daemon=True)
        self._watcher.start()
        atexit.register(self._end)

    def _look(self) -> None:
        with suppress(RuntimeError), link_to(self._store) as is_linked:  # of a store: the world is over
            while not self._is_over.wait(_LOOK) and is_world(self._world()) and is_linked():
                # Else nobody waits for this worker's trail, and the store may be gone in any moment.
                while (self._under_way or self._follows) and self._store.check(
                    [key := self._key("from", self._followers + 1)]
                ):
                    with self._turn:
                        if key == self._key("from", self._followers + 1):  # else all have joined meanwhile
                            self._tell_follower(int(self._store.get(key)))
        atexit.unregister(self._end)

    def _tell_follower(self, count: int) -> None:
        """Put in the store what somebody needs who has joined after so many."""
        begin = self._count - len(self._newest)
        if count < begin:
            self._tell(count + 1, Step(GAP))
        for number, step in enumerate(self._newest, begin + 1):
            if number > count:
                self._tell(number, step)
        self._followers += 1

    def _end(self) -> None:
        """Python must not end while the thread is in torch: that would be an abort."""
        self._is_over.set()
        if self._watcher is not None:
            self._watcher.join()


_trail: Trail | None = None


def trail() -> Trail:
    """That of the process' world. Raises NotInitialized."""
    global _trail  # noqa: PLW0603 (as the world is the process')
    now = world()
    if _trail is None or not _trail.is_of(now):
        _trail = Trail(now)
    return _trail


def note(process_set: ProcessSet, step: Step) -> Callable[[], None]:
    """The worker is about to begin this collective; who has joined is in no set but that of all.

    What is returned is to be called when it has ended.
    """
    return trail().add(step) if process_set.is_all else _nothing


def _nothing() -> None:
    pass
