"""The driver's messages with workers at the rendezvous: rounds of elastic jobs, and the scopes of Horovod's workers."""

import ipaddress
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

from hvlaunch.agent.wire.frames import LONGEST_TEXT, plain
from hvlaunch.driver.process import loud
from hvlaunch.driver.turn import Arrival
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.actions import Start
from hvlaunch.hosts.placement import Placement
from hvlaunch.rendezvous.messages import (
    ASKS,
    BEATS,
    PLACES,
    ROUNDS,
    Ask,
    Beat,
    Grant,
    Notice,
    decode,
    encode,
    worker_id,
    worker_of,
)
from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.watch.sentences import because

__all__ = ["Message", "WorkerMessages", "addresses", "let_in", "scopes"]


Message: TypeAlias = do.Assign | do.Leave | do.Break | do.Change
"""An action for workers that ask for their places."""


class WorkerMessages:
    """Turns messages of workers into events for `post`, and actions of the engine into messages.

    `exists` returns True if a worker of this host, slot and start was ever started.
    """

    def __init__(
        self,
        server: RendezvousServer,
        post: Callable[[Arrival], None],
        exists: Callable[[str, int, int], bool],
    ) -> None:
        self._server = server
        self._post = post
        self._exists = exists

    def open(self, since: int | None = None) -> None:
        """Listen to workers until the server closes. `post` is called in the server's thread.

        `since` is the version of the last message to a killed driver.
        """
        # Exceptions are reported: the server's event loop would swallow them, and the job would wait for ever.
        self._server.subscribe(ASKS, loud(self._asked), since=since)
        self._server.subscribe(BEATS, loud(self._beaten), since=since)

    def carry_out(self, action: Message) -> None:
        self._server.put(*_message(action))

    def carry_out_again(self, actions: Iterable[Message]) -> None:
        """Repeat the actions of a killed driver, of which the last may not have been carried out."""
        values = {(scope, key): value for scope, key, value in map(_message, actions)}
        for (scope, key), value in values.items():
            # A put of an equal value would wake waiting workers for nothing.
            if self._server.get(scope, key) != value:
                self._server.put(scope, key, value)

    def _asked(self, key: str, value: bytes | None, version: int) -> None:
        with suppress(ValueError):  # a malformed message is the worker's own mistake
            if value is not None:
                ask = decode(Ask, value)
                # A worker's words end up in messages: no control characters, and a bound.
                cause = None if ask.cause is None else plain(ask.cause, LONGEST_TEXT)
                event = on.WorkerAsked(*self._worker(key), ask.round, ask.commit, cause)
                self._post(Arrival(event, version=version))

    def _beaten(self, key: str, value: bytes | None, version: int) -> None:
        with suppress(ValueError):
            if value is not None:
                beat = decode(Beat, value)
                event = on.WorkerBeat(*self._worker(key), beat.commit, beat.last, beat.round, beat.done)
                self._post(Arrival(event, version=version))

    def _worker(self, key: str) -> tuple[str, int, int]:
        """Return host, slot and start. Raises ValueError for an unknown worker."""
        worker = worker_of(key)
        if not self._exists(*worker):
            raise ValueError("no worker of this job")
        return worker


def _message(action: Message) -> tuple[str, str, bytes]:
    """Return scope, key and value of the message. A new value replaces the key's old one."""
    match action:
        case do.Assign(number, launch, network):
            place = launch.place
            grant = Grant(
                round=number,
                rank=place.rank,
                size=place.size,
                local_rank=place.local_rank,
                local_size=place.local_size,
                cross_rank=place.cross_rank,
                cross_size=place.cross_size,
                master_addr=network.master_addr,
                interface=network.interface,
                variables=_words(network.variables),
            )
            return PLACES, worker_id(place.host, launch.slot, launch.start), encode(grant)
        case do.Leave(host, slot, start, cause):
            return PLACES, worker_id(host, slot, start), encode(Grant(-1, leave=because(cause)))
        case do.Break(number, cause):
            return ROUNDS, str(number), encode(Notice("broken", because(cause)))
        case do.Change(number, cause):
            return ROUNDS, str(number), encode(Notice("changing", because(cause)))


def _words(variables: Mapping[str, str] | None) -> str | None:
    return None if variables is None else " ".join(f"{name}={value}" for name, value in variables.items())


def let_in(starts: Sequence[Start], rendezvous: RendezvousServer) -> None:
    """Let the workers of a round use Horovod's scopes, unless some of them already do."""
    places = [launch.place for start in starts for launch in start.launches]
    rendezvous.open_to_horovod(scopes(places), addresses(starts), starts[0].round)


def scopes(places: Iterable[Placement]) -> dict[str, int]:
    """Return the scopes for Horovod's workers, with the number of workers in each."""
    sizes: dict[str, int] = {}
    for place in places:
        sizes["global"] = place.size
        sizes[f"local_{place.host}"] = place.local_size
        sizes[f"cross_{place.local_rank}"] = place.cross_size
    return sizes


def addresses(starts: Sequence[Start]) -> set[str]:
    """Return the peer addresses of the hosts' connections, as the rendezvous server sees them."""
    # A loopback address stands for the driver's own machine there, whichever host reported it.
    from hvlaunch.driver.links.relay import peer_name  # noqa: PLC0415 (it needs asyncio, which few jobs do)

    peers: set[str] = set()
    for start in starts:
        facts = start.facts
        addresses_here = {address for listed in facts.addresses.values() for address in listed}
        if facts.peer_address:
            addresses_here.add(facts.peer_address.partition("%")[0])
        if facts.peer_address is not None:
            addresses_here = {
                address for address in addresses_here if not ipaddress.ip_address(address).is_loopback
            }
        peers |= addresses_here | {peer_name(start.host)}
    return peers
