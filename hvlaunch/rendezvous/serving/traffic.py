"""The connections of a server: limits, counts, and its unauthenticated clients.

An unauthenticated client must not cost the job anything. If there are too many, the oldest is dropped: a client of
the job shows the token at once. An address without workers is refused early when it returns again and again.
"""

from __future__ import annotations

import resource
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from hvlaunch.named_tuples import NamedTuple
from hvlaunch.rendezvous.store import Store

__all__ = [
    "UNAUTHENTICATED_LIMITS",
    "Answerer",
    "Arriving",
    "HttpLimits",
    "Stats",
    "Traffic",
    "TrafficLimits",
    "UnauthenticatedClients",
    "UnauthenticatedLimits",
    "is_loopback",
    "plain_address",
    "room_for",
]

ConnectionT = TypeVar("ConnectionT")


class UnauthenticatedLimits(NamedTuple):
    """Limits of unauthenticated clients at a time."""

    all: int = 256
    """From all unknown addresses."""
    from_one_address: int = 64
    """From an unknown address; an IPv6 network of 64 bits counts as a single address, since its owner has every address."""
    from_known_address: int = 1024
    """From an address with workers of the job, which connect at the same time."""
    known_addresses: int = 20_000
    """Addresses remembered."""
    turn: float = 1.0
    """Seconds before another client of its unknown address may replace an unauthenticated client."""


UNAUTHENTICATED_LIMITS = UnauthenticatedLimits()


class UnauthenticatedClients(Generic[ConnectionT]):
    """Unauthenticated connections, each group in the order of arrival."""

    def __init__(self, limits: UnauthenticatedLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._site: OrderedDict[ConnectionT, str] = OrderedDict()
        self._unknown: OrderedDict[ConnectionT, None] = OrderedDict()
        self._at: dict[str, OrderedDict[ConnectionT, float]] = {}
        self._trusted: set[str] = set()

    def __len__(self) -> int:
        return len(self._site)

    def __contains__(self, connection: ConnectionT) -> bool:
        return connection in self._site

    def know(self, addresses: Iterable[str]) -> None:
        """Trust addresses with workers of the job: clients from elsewhere can't take their places."""
        for address in addresses:
            if len(self._trusted) < self.limits.known_addresses:
                self._trusted.add(address)

    def is_welcome(self, address: str) -> bool:
        """True if a client from this address may enter: cheaper than letting it in and dropping it."""
        if address in self._trusted:
            return True
        clients = self._at.get(_network(address))
        if clients is None or len(clients) < self.limits.from_one_address:
            return True
        return self._clock() - next(iter(clients.values())) >= self.limits.turn

    def enter(self, connection: ConnectionT, address: str) -> ConnectionT | None:
        """Count a new connection. Return the connection to be dropped for it, which is not counted any more."""
        is_known = address in self._trusted
        site = address if is_known else _network(address)
        clients = self._at.get(site, ())
        gone = None
        if len(clients) >= (self.limits.from_known_address if is_known else self.limits.from_one_address):
            gone = next(iter(clients))
        elif not is_known and len(self._unknown) >= self.limits.all:
            gone = next(iter(self._unknown))
        if gone is not None:
            self.leave(gone)
        # Counted by the site at arrival: the address may become trusted meanwhile.
        self._site[connection] = site
        self._at.setdefault(site, OrderedDict())[connection] = self._clock()
        if not is_known:
            self._unknown[connection] = None
        return gone

    def leave(self, connection: ConnectionT) -> None:
        """Count a connection no longer: closed, or authenticated. May be repeated."""
        site = self._site.pop(connection, None)
        if site is None:
            return
        self._unknown.pop(connection, None)
        clients = self._at[site]
        del clients[connection]
        if not clients:
            del self._at[site]

    def first(self) -> ConnectionT | None:
        """Return the oldest connection."""
        return next(iter(self._site), None)

    def oldest(self) -> ConnectionT | None:
        """Return the connection to drop first: the oldest of an unknown address, if any."""
        return next(iter(self._unknown), None) or next(iter(self._site), None)


def _network(address: str) -> str:
    """Return the part of an address by which clients are counted."""
    # A relay's address names its host, and is no IPv6 address in spite of its colons.
    if ":" not in address or address.startswith("relay:"):
        return address
    import socket  # noqa: PLC0415 (few come by IPv6)

    try:
        return socket.inet_pton(socket.AF_INET6, address)[:8].hex()
    except OSError:
        return address


class Answerer(Protocol):
    """Answers questions of `size` bytes beginning with `mark`, neither HTTP nor TLS."""

    mark: bytes
    size: int

    def answer(self, data: bytes, addresses: Iterable[str], port: int) -> bytes | None: ...


_RESERVE = 256  # descriptors for the rest of the process, or half of the hard limit


def plain_address(name: object) -> str:
    """Return the address in a socket's name; an IPv4 client of an IPv6 socket has its IPv4 address."""
    address = str(name[0]) if isinstance(name, tuple) and name else ""
    return address.removeprefix("::ffff:").partition("%")[0]


def is_loopback(address: str) -> bool:
    """True if the address belongs to this machine only; in the form of a socket's name."""
    return address == "::1" or address.removeprefix("::ffff:").startswith("127.")


def room_for(connections: int) -> bool:
    """True if the process may have so many connections; raises the soft limit only when needed.

    Every process started later inherits the raised limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + (_RESERVE if hard == resource.RLIM_INFINITY else min(_RESERVE, hard // 2))
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return True
    # The hard limit is the administrator's.
    if hard != resource.RLIM_INFINITY and needed > hard:
        return False
    raised = max(needed, 2 * soft)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (raised if hard == resource.RLIM_INFINITY else min(raised, hard), hard)
    )
    return True


_FAREWELLS = 100  # excess connections with an answer; more are cut off


class HttpLimits(NamedTuple):
    """Limits of a connection's cost."""

    head: int = 16 << 10
    """Bytes of a request line and its header fields."""
    body: int = 16 << 20
    """Bytes of a request's body."""
    exchange: float = 30.0
    """Seconds for a request to arrive after its first byte (or after the connection), and for its answer to be taken."""
    idle: float = 300.0
    """Seconds between an answer and the next request."""
    linger: float = 2.0
    """Seconds for a client to read its last answer and hang up."""
    farewell: int = 64 << 10
    """Bytes still accepted from an unauthenticated client meanwhile, and thrown away."""
    unauthenticated: float = 10.0
    """Seconds from the start of a connection to its first head with the token."""


class TrafficLimits(NamedTuple):
    """Limits of the connections at a time, and of their requests."""

    connections: int = 20_000
    from_one_address: int = 10_000
    """A thousand workers with several connections each may share an address (NAT)."""
    bodies: int = 512 << 20
    """Bytes of unfinished request bodies."""
    unauthenticated: UnauthenticatedLimits = UNAUTHENTICATED_LIMITS
    """Limits of connections before the token."""


class Stats(NamedTuple):
    """The server's numbers at a moment."""

    connections: int
    """Open connections."""
    requests: int
    """Answered requests."""
    unauthorized: int
    """Requests answered with 401."""
    refused: int
    """Requests malformed, not allowed or over a limit."""
    dropped: int
    """Connections ended because the client was too slow, idle, or took no answers."""
    turned_away: int
    """Connections ended because there were too many, most of them unauthenticated."""
    faults: int
    """Uncaught exceptions; each is a defect of the server."""
    keys: int
    size: int
    """Bytes held, names included."""
    waiting: int
    """Unanswered long polls, watches, and waits of the driver."""
    strangers: int
    """Open connections without the token."""


class Peer(Protocol):
    """A connection, for counting."""

    @property
    def peer(self) -> str: ...

    def abort(self) -> None:
        """Close at once."""


PeerT = TypeVar("PeerT", bound=Peer)


class Arriving:
    """Unfinished bodies of all connections of a server: `size` bytes of `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0


class Traffic(Generic[PeerT]):
    """The connections of a server. room_for(count) checks the machine's limit.

    A connection is unauthenticated until trust(), and may be dropped for another until then.
    """

    def __init__(
        self, limits: TrafficLimits | None = None, room_for: Callable[[int], bool] = room_for
    ) -> None:
        self.limits = limits or TrafficLimits()
        self.open: set[PeerT] = set()
        self.arriving = Arriving(self.limits.bodies)
        self.answers: Counter[int] = Counter()
        """Answers by HTTP status."""
        self.dropped = 0
        """Connections ended because the client was too slow, idle, or took no answers."""
        self.turned_away = 0
        """Connections ended because there were too many, most of them unauthenticated."""
        self.unauthenticated: UnauthenticatedClients[PeerT] = UnauthenticatedClients(
            self.limits.unauthenticated
        )
        self._room_for = room_for
        self._parting: set[PeerT] = set()
        self._by_peer: Counter[str] = Counter()

    def count(self, store: Store, faults: int) -> Stats:
        """Return the numbers of the server with this store."""
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
        """True if a connection from this address may enter; a refusal is counted."""
        welcome = self.unauthenticated.is_welcome(peer)
        self.turned_away += not welcome
        return welcome

    def enter(self, connection: PeerT) -> bool:
        """Count a new connection; False if there are too many."""
        self.open.add(connection)
        peer = connection.peer
        if self._by_peer[peer] >= self.limits.from_one_address or not self._make_room():
            self.turned_away += 1
            # Refused, but open until its answer is taken: counted apart.
            self._parting.add(connection)
            return False
        self._by_peer[peer] += 1
        self._turn_out(self.unauthenticated.enter(connection, peer))
        return True

    def trust(self, connection: PeerT) -> None:
        """Count the connection as authenticated, and trust its address."""
        if connection in self.unauthenticated:
            self.unauthenticated.leave(connection)
            self.unauthenticated.know([connection.peer])

    def _make_room(self) -> bool:
        """True if there is room for another connection; an unauthenticated client may be dropped for it."""
        while len(self.open) - len(self._parting) > self.limits.connections or not self._room_for(
            len(self.open)
        ):
            if not self.turn_out_oldest():
                return False
        return True

    def turn_out_oldest(self) -> bool:
        """Drop the oldest unauthenticated client; False without such a client."""
        oldest = self.unauthenticated.oldest()
        if oldest is None:
            return False
        self.unauthenticated.leave(oldest)
        self._turn_out(oldest)
        return True

    def _turn_out(self, client: PeerT | None) -> None:
        if client is not None:
            self.turned_away += 1
            # The event loop reports the loss later; the place is free at once.
            client.abort()
            self.leave(client)

    @property
    def may_part_slowly(self) -> bool:
        """True if a refused client may get an answer, which takes time."""
        return len(self._parting) <= _FAREWELLS

    def leave(self, connection: PeerT) -> None:
        """Count a closed connection no longer. May be repeated."""
        if connection not in self.open:
            return
        self.open.discard(connection)
        self.unauthenticated.leave(connection)
        if connection in self._parting:
            self._parting.discard(connection)
            return
        # Zeros are deleted: each address ever seen would take memory.
        self._by_peer[connection.peer] -= 1
        if not self._by_peer[connection.peer]:
            del self._by_peer[connection.peer]
