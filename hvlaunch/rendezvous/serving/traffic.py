"""The connections of a server's clients: how many there may be, counts of everything, and who is not authenticated yet."""

from __future__ import annotations

import resource
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

from hvlaunch.rendezvous.store import Store

__all__ = [
    "UNAUTHENTICATED_LIMITS",
    "Arriving",
    "Stats",
    "Traffic",
    "TrafficLimits",
    "UnauthenticatedClients",
    "UnauthenticatedLimits",
    "plain_address",
    "room_for",
]

ConnectionT = TypeVar("ConnectionT")


class UnauthenticatedLimits(NamedTuple):
    """How many strangers there may be at one time."""

    all: int = 256
    """From addresses that are not known, together."""
    from_one_address: int = 64
    """From one that is not known; of IPv6 a network of 64 bits counts as one, since who has one address has them all."""
    from_known_address: int = 1024
    """From one where the job has workers: they all come at once."""
    known_addresses: int = 20_000
    """How many are remembered."""
    turn: float = 1.0
    """Seconds that a stranger has before another one of its address, which is not known, takes its place."""


UNAUTHENTICATED_LIMITS = UnauthenticatedLimits()


class UnauthenticatedClients(Generic[ConnectionT]):
    """The connections of strangers, each group of them in the order in which they came."""

    def __init__(self, limits: UnauthenticatedLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._site: OrderedDict[ConnectionT, str] = OrderedDict()
        self._unknown: OrderedDict[ConnectionT, None] = OrderedDict()
        self._at: dict[str, OrderedDict[ConnectionT, float]] = {}
        self._known: set[str] = set()

    def __len__(self) -> int:
        return len(self._site)

    def __contains__(self, connection: ConnectionT) -> bool:
        return connection in self._site

    def know(self, addresses: Iterable[str]) -> None:
        """The job has workers at these addresses: strangers from elsewhere can't take their places."""
        for address in addresses:
            if len(self._known) < self.limits.known_addresses:
                self._known.add(address)

    def is_welcome(self, address: str) -> bool:
        """Whether one from this address may enter: cheaper to ask than to let it in."""
        if address in self._known:
            return True
        there = self._at.get(_network(address))
        if there is None or len(there) < self.limits.from_one_address:
            return True
        return self._clock() - next(iter(there.values())) >= self.limits.turn

    def enter(self, connection: ConnectionT, address: str) -> ConnectionT | None:
        """One has come. Gives the one that must go for it, which counts no more."""
        is_known = address in self._known
        site = address if is_known else _network(address)
        there = self._at.get(site, ())
        gone = None
        if len(there) >= (self.limits.from_known_address if is_known else self.limits.from_one_address):
            gone = next(iter(there))
        elif not is_known and len(self._unknown) >= self.limits.all:
            gone = next(iter(self._unknown))
        if gone is not None:
            self.leave(gone)
        self._site[connection] = site
        self._at.setdefault(site, OrderedDict())[connection] = self._clock()
        if not is_known:
            self._unknown[connection] = None
        return gone

    def leave(self, connection: ConnectionT) -> None:
        """It has gone, or is no stranger any more. May be repeated."""
        site = self._site.pop(connection, None)
        if site is None:
            return
        self._unknown.pop(connection, None)
        there = self._at[site]
        del there[connection]
        if not there:
            del self._at[site]

    def first(self) -> ConnectionT | None:
        """The one that has been here longest."""
        return next(iter(self._site), None)

    def oldest(self) -> ConnectionT | None:
        """The one that should go first where there is no room at all: one of an address that is not known, if any."""
        return next(iter(self._unknown), None) or next(iter(self._site), None)


def _network(address: str) -> str:
    """What counts as one address."""
    if ":" not in address or address.startswith("relay:"):
        return address
    import socket  # noqa: PLC0415 (few come by IPv6)

    try:
        return socket.inet_pton(socket.AF_INET6, address)[:8].hex()
    except OSError:
        return address


_RESERVE = 256  # for all else that the process does, or half of what there may be at most


def plain_address(name: object) -> str:
    """The address in a socket's name, an IPv4 one in its own form also where it came to an IPv6 socket."""
    address = str(name[0]) if isinstance(name, tuple) and name else ""
    return address.removeprefix("::ffff:").partition("%")[0]


def room_for(connections: int) -> bool:
    """Whether there can be so many connections; the soft limit is raised towards the hard one where that is needed.

    Only then, since every process that is started later inherits it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + (_RESERVE if hard == resource.RLIM_INFINITY else min(_RESERVE, hard // 2))
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return True
    if hard != resource.RLIM_INFINITY and needed > hard:
        return False
    raised = max(needed, 2 * soft)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (raised if hard == resource.RLIM_INFINITY else min(raised, hard), hard)
    )
    return True


_FAREWELLS = 100  # connections too many that are told so; more are just cut off


class TrafficLimits(NamedTuple):
    """How many connections there may be at one time, and what they may send."""

    connections: int = 20_000
    from_one_address: int = 10_000
    """A thousand workers with several connections each may share one (NAT)."""
    bodies: int = 512 << 20
    """Bytes of the requests' bodies that are not all there yet."""
    unauthenticated: UnauthenticatedLimits = UNAUTHENTICATED_LIMITS
    """Of these connections, those that have not shown the token yet."""


class Stats(NamedTuple):
    """A server's numbers at one moment."""

    connections: int
    """Open now."""
    requests: int
    """Answered, whatever the answer."""
    unauthorized: int
    """Of these, answered with 401."""
    refused: int
    """Of these, malformed, not allowed or over a limit."""
    dropped: int
    """Connections ended because the client was too slow, idle, or took no answers."""
    turned_away: int
    """Connections ended because there were too many, of strangers above all."""
    faults: int
    """Exceptions that nobody caught; each is a defect of the server."""
    keys: int
    size: int
    """Bytes held, names included."""
    waiting: int
    """Long polls, watches, and waits of the driver, not yet answered."""
    strangers: int
    """Open connections that have not shown the token."""


class Peer(Protocol):
    """A connection, as far as it is counted."""

    @property
    def peer(self) -> str: ...

    def abort(self) -> None:
        """End at once."""


PeerT = TypeVar("PeerT", bound=Peer)


class Arriving:
    """The bodies that are not all there yet, of all connections of a server: `size` bytes of `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0


class Traffic(Generic[PeerT]):
    """The connections of one server. room_for(count) tells whether the machine takes so many.

    Each is a stranger's until trust(), and may be aborted for another one's sake until then.
    """

    def __init__(
        self, limits: TrafficLimits | None = None, room_for: Callable[[int], bool] = room_for
    ) -> None:
        self.limits = limits or TrafficLimits()
        self.open: set[PeerT] = set()
        self.arriving = Arriving(self.limits.bodies)
        self.answers: Counter[int] = Counter()
        """How many answers by HTTP status."""
        self.dropped = 0
        """Connections ended because the client was too slow, idle, or took no answers."""
        self.turned_away = 0
        """Connections ended because there were too many, of strangers above all."""
        self.unauthenticated: UnauthenticatedClients[PeerT] = UnauthenticatedClients(
            self.limits.unauthenticated
        )
        self._room_for = room_for
        self._parting: set[PeerT] = set()
        self._by_peer: Counter[str] = Counter()

    def count(self, store: Store, faults: int) -> Stats:
        """The numbers of the server that has this store, now."""
        return Stats(
            connections=len(self.open),
            requests=self.answers.total(),
            unauthorized=self.answers[401],
            refused=sum(
                count for status, count in self.answers.items() if status not in (200, 401, 404, 412)
            ),
            dropped=self.dropped,
            turned_away=self.turned_away,
            faults=faults,
            keys=store.keys,
            size=store.size,
            waiting=store.waiting,
            strangers=len(self.unauthenticated),
        )

    def is_welcome(self, peer: str) -> bool:
        """Whether a connection from this address may enter; it is counted where not."""
        welcome = self.unauthenticated.is_welcome(peer)
        self.turned_away += not welcome
        return welcome

    def enter(self, connection: PeerT) -> bool:
        """A connection is there; False where it is one too many."""
        self.open.add(connection)
        peer = connection.peer
        if self._by_peer[peer] >= self.limits.from_one_address or not self._make_room():
            self.turned_away += 1
            self._parting.add(connection)
            return False
        self._by_peer[peer] += 1
        self._turn_out(self.unauthenticated.enter(connection, peer))
        return True

    def trust(self, connection: PeerT) -> None:
        """It has shown the token, so others at its address may, too."""
        if connection in self.unauthenticated:
            self.unauthenticated.leave(connection)
            self.unauthenticated.know([connection.peer])

    def _make_room(self) -> bool:
        """Whether there is room for one more; a stranger has to go for it where there is none else."""
        while len(self.open) - len(self._parting) > self.limits.connections or not self._room_for(
            len(self.open)
        ):
            if not self.turn_out_oldest():
                return False
        return True

    def turn_out_oldest(self) -> bool:
        """Have a stranger go for the sake of others; False where there is none."""
        oldest = self.unauthenticated.oldest()
        if oldest is None:
            return False
        self.unauthenticated.leave(oldest)
        self._turn_out(oldest)
        return True

    def _turn_out(self, stranger: PeerT | None) -> None:
        if stranger is not None:
            self.turned_away += 1
            stranger.abort()
            self.leave(stranger)

    @property
    def may_part_slowly(self) -> bool:
        """Whether one that is turned away can be told so, which takes it some time."""
        return len(self._parting) <= _FAREWELLS

    def leave(self, connection: PeerT) -> None:
        """It is gone. May be repeated."""
        if connection not in self.open:
            return
        self.open.discard(connection)
        self.unauthenticated.leave(connection)
        if connection in self._parting:
            self._parting.discard(connection)
            return
        self._by_peer[connection.peer] -= 1
        if not self._by_peer[connection.peer]:
            del self._by_peer[connection.peer]
