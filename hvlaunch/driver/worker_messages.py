"""The driver's side of rounds that workers ask for: what it hears from them, and tells them, at the rendezvous."""

import ipaddress
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeAlias

from hvlaunch.agent.wire.frames import LONGEST_TEXT
from hvlaunch.agent.wire.shapes import plain
from hvlaunch.driver.process_events import loud
from hvlaunch.driver.turn import Arrival
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.actions import Start
from hvlaunch.hosts.placement import Placement
from hvlaunch.rendezvous.round_messages import (
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
from hvlaunch.rendezvous.serving.server import RendezvousServer
from hvlaunch.watch.sentences import because

__all__ = ["Message", "WorkerMessages", "addresses", "let_in", "scopes"]


Message: TypeAlias = do.Assign | do.Leave | do.Break | do.Change
"""What is for workers that ask for their places."""


class WorkerMessages:
    """Turns what workers write into events for `post`, and the engine's actions into what they read.

    `exists` tells whether there ever was a worker of this host, slot and start.
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
        """Listen to workers, until the server closes. `post` is called in the server's thread.

        `since` is the version of the last message that a driver before us has heard.
        """
        self._server.subscribe(ASKS, loud(self._asked), since=since)
        self._server.subscribe(BEATS, loud(self._beaten), since=since)

    def carry_out(self, action: Message) -> None:
        self._server.put(*_message(action))

    def carry_out_again(self, actions: Iterable[Message]) -> None:
        """What a driver before us was to carry out, and has, but perhaps for the last."""
        told = {(scope, key): value for scope, key, value in map(_message, actions)}
        for (scope, key), value in told.items():
            if self._server.get(scope, key) != value:
                self._server.put(scope, key, value)

    def _asked(self, key: str, value: bytes | None, version: int) -> None:
        with suppress(ValueError):  # nonsense from a worker is none of our business
            if value is not None:
                ask = decode(Ask, value)
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
        """Raises ValueError where there is no such worker."""
        worker = worker_of(key)
        if not self._exists(*worker):
            raise ValueError("no worker of this job")
        return worker


def _message(action: Message) -> tuple[str, str, bytes]:
    """Scope, key and value, which takes the place of what the key had before."""
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
            )
            return PLACES, worker_id(place.host, launch.slot, launch.start), encode(grant)
        case do.Leave(host, slot, start, cause):
            return PLACES, worker_id(host, slot, start), encode(Grant(-1, leave=because(cause)))
        case do.Break(number, cause):
            return ROUNDS, str(number), encode(Notice("broken", because(cause)))
        case do.Change(number, cause):
            return ROUNDS, str(number), encode(Notice("changing", because(cause)))


def let_in(starts: Sequence[Start], rendezvous: RendezvousServer) -> None:
    """The workers of these, which are all of a round, unless they may be at work there already."""
    places = [launch.place for start in starts for launch in start.launches]
    rendezvous.open_to_horovod(scopes(places), addresses(starts), starts[0].round)


def scopes(places: Iterable[Placement]) -> dict[str, int]:
    """The scopes that Horovod's workers meet in, and how many do in each."""
    sizes: dict[str, int] = {}
    for place in places:
        sizes["global"] = place.size
        sizes[f"local_{place.host}"] = place.local_size
        sizes[f"cross_{place.local_rank}"] = place.cross_size
    return sizes


def addresses(starts: Sequence[Start]) -> set[str]:
    """Where the hosts' connections to the rendezvous come from, as the server names it.

    A loopback address is the driver's own machine's there, whichever host it was told by.
    """
    from hvlaunch.driver.links.relay import peer_name  # noqa: PLC0415 (it needs asyncio, which few jobs do)

    found: set[str] = set()
    for start in starts:
        known = start.facts
        own = {address for listed in known.addresses.values() for address in listed}
        if known.peer_address:
            own.add(known.peer_address.partition("%")[0])
        if known.peer_address is not None:
            own = {address for address in own if not ipaddress.ip_address(address).is_loopback}
        found |= own | {peer_name(start.host)}
    return found
