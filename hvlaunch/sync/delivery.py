"""Brings content, such as the snapshot of a job's tree, to hosts: an errand on each host takes it."""

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from hvlaunch.agent.errands.sync.content import part_numbers
from hvlaunch.agent.quick import loads
from hvlaunch.console.status import size_words
from hvlaunch.driver.links.errands import Errand, ErrandFailed, Limits, lines_of, write_line
from hvlaunch.errors import CopyFailed

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.engine.events import HostFacts

__all__ = ["Content", "Delivery", "addresses_of", "cause_of"]

_LIMITS = Limits(seconds=None, memory=1 << 30, output=1 << 24)
_LONGEST_LINE = 1 << 22
_AHEAD = 1 << 20
"""Bytes that may wait for the errand's credit."""
_USUAL = re.compile(
    r"^[A-Za-z]*(?:Value|OS|NotFound|Permission|Directory|Exists|InputOutput)Error: (?:\[Errno [0-9]+\] )?"
)
_LOOK = 1.0
"""Seconds between looks at an errand."""
_MOST_SOURCES = 3
"""Sources of a host, before the driver sends the other parts."""


class Content(Protocol):
    """Files as hosts get them: a list, and numbered parts."""

    @property
    def hash(self) -> str: ...

    @property
    def manifest(self) -> bytes:
        """The list, as agent/errands/sync reads it, compressed by zlib."""

    @property
    def numbered(self) -> Sequence[str]:
        """The hashes of all parts in the list's order."""

    def size_of(self, number: int) -> int: ...

    def read(self, number: int) -> bytes:
        """Return a part. Raises OSError."""


class _Source:
    """A host that serves its content to one other host."""

    def __init__(self, addresses: list[tuple[str, int]], errand: Errand) -> None:
        self.addresses = addresses
        self.errand = errand
        self.is_taken = False
        self.is_ready = False
        """True if its own copy is complete."""


class Delivery:
    """Brings `snapshot` to hosts. `below` is where workers start, from the root of the tree on; None for other content.

    The driver sends large content to the first host; each further host fetches the content from the host before, and
    asks the driver for missing parts.
    """

    def __init__(
        self,
        snapshot: "Content",
        below: str | None,
        *,
        peer: Mapping[str, str] | None,
        errand: str = "sync",
        arguments: Mapping[str, Any] = MappingProxyType({}),
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """`errand` takes the content on a host; `arguments` are its arguments beside the hash and the peer; a function is called for each host.

        `meanwhile` runs once in a thread of its own, while the first host is at work.
        """
        self._snapshot = snapshot
        self._below = below
        self._errand = errand
        self._arguments = arguments
        self._lock = threading.Lock()
        self._offers: list[_Source] = []
        """In the order of their beginning: a host fetches from an earlier host, so no host waits for itself."""
        self._unready = 0
        """The number of hosts on their way to a complete copy, which may still need the others."""
        self._peer = peer
        self._meanwhile = meanwhile

    def add_origin(self, addresses: list[tuple[str, int]], errand: Errand) -> None:
        """Add a host with all content, which serves other hosts."""
        with self._lock:
            self._offers.append(_Source(addresses, errand))

    def deliver(self, link: "HostLink", facts: "HostFacts", ready: "Callable[[HostFacts], None]") -> int:
        """Bring the content to a host, and call `ready` with its facts and the directory there; return the received bytes.

        Returns when the host has served others. Raises ErrandFailed, CopyFailed.
        """
        try:
            return self._deliver(link, facts, ready)
        # A host may answer with anything.
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise CopyFailed(cause_of(f"{type(error).__name__}: {error}"), host=link.host.name) from error

    def _deliver(self, link: "HostLink", facts: "HostFacts", ready: "Callable[[HostFacts], None]") -> int:
        snapshot = self._snapshot
        more = {name: value() if callable(value) else value for name, value in self._arguments.items()}
        arguments = {"hash": snapshot.hash, "peer": self._peer, **more}
        errand = link.errands.start(self._errand, arguments, _LIMITS)
        offer = source = size = None
        refused: list[_Source] = []
        received: int | None = None
        with self._lock:
            self._unready += 1
            meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            threading.Thread(target=meanwhile, name="meanwhile", daemon=True).start()
        try:
            for line in chain.from_iterable(lines_of(errand, _LOOK, _LONGEST_LINE)):
                word, _, text = line.partition(" ")
                if word == "manifest":
                    errand.write(len(snapshot.manifest).to_bytes(4, "big") + snapshot.manifest)
                elif word == "offer" and offer is None:
                    offer = _Source([(address, _port(text)) for address in addresses_of(facts)], errand)
                elif word == "parts":
                    numbers = part_numbers(text, len(snapshot.numbered))
                    if size is None:
                        size = sum(map(snapshot.size_of, numbers))
                        self._add(offer)
                    # Asked again: the other host has not sent all.
                    self._release(source)
                    source = self._source(offer, refused)
                    refused += [] if source is None else [source]
                    self._answer(link, errand, numbers, source, size)
                elif word == "progress":
                    link.tell_preparing(_stage(int(text), size or 0))
                elif word == "ready":
                    result = loads(text)
                    if self._below is not None:
                        facts = facts._replace(directory=self._directory(result))
                    count = result["received"]
                    if type(count) is not int:
                        raise TypeError("what it received is no number")
                    ready(facts)
                    received = count
                    self._release(source)
                    source = None
                    self._is_ready(offer, errand)
                    break
            while not errand.wait(_LOOK):
                pass  # a silent host is given up, and its errand with it
            if received is None:
                errand.result()
                raise ValueError("it ended before it was ready")
        except ErrandFailed as error:
            raise CopyFailed(cause_of(error.detail), host=link.host.name) from error
        else:
            return received
        finally:
            self._release(source)
            with self._lock:
                self._offers = [other for other in self._offers if other is not offer]
            if received is None:
                self._end_one()
            errand.stop()

    def _add(self, offer: _Source | None) -> None:
        """Let other hosts fetch from a host."""
        with self._lock:
            if offer is not None:
                self._offers.append(offer)

    def _source(self, offer: _Source | None, refused: Sequence[_Source]) -> _Source | None:
        """Return an untaken offer of an earlier or complete host, or None, for the host with this offer.

        `refused` offers have failed this host.
        """
        with self._lock:
            if offer is None or len(refused) >= _MOST_SOURCES:
                return None
            earlier = self._offers[: self._offers.index(offer)]
            later = [other for other in self._offers[len(earlier) + 1 :] if other.is_ready]
            for other in [*earlier, *later]:
                if not other.is_taken and other not in refused:
                    other.is_taken = True
                    return other
            return None

    def _release(self, source: _Source | None) -> None:
        """End the use of an offer, by its only user."""
        with self._lock:
            if source is not None:
                source.is_taken = False

    def _is_ready(self, offer: _Source | None, errand: Errand) -> None:
        """Note that a host's copy is complete; its errand goes on while other hosts may need the content."""
        with self._lock:
            if offer in self._offers and offer is not None:
                offer.is_ready = True
            else:
                errand.close_input()
        self._end_one()

    def _end_one(self) -> None:
        """Count a host as complete or failed. After the last host, let the errands of complete hosts end."""
        with self._lock:
            self._unready -= 1
            if not self._unready:
                for offer in [other for other in self._offers if other.is_ready]:
                    self._offers.remove(offer)
                    offer.errand.close_input()

    def _directory(self, result: Any) -> str:
        """Return the workers' directory for the result of a host's errand. Raises KeyError, TypeError, ValueError."""
        directory = result["directory"]
        if not isinstance(directory, str) or not directory.startswith("/"):
            raise ValueError("its directory is no path")
        return f"{directory}/{self._below}" if self._below else directory

    def _answer(
        self, link: "HostLink", errand: Errand, numbers: Sequence[int], source: _Source | None, size: int
    ) -> None:
        """Name the other host, or send the parts; `size` are the bytes that the host lacked at first."""
        write_line(errand, {"from": [] if source is None else source.addresses})
        snapshot = self._snapshot
        done = size - sum(map(snapshot.size_of, numbers))
        link.tell_preparing(_stage(done, size))
        unsent = 0
        for number in numbers if source is None else ():
            data = snapshot.read(number)
            errand.write(len(data).to_bytes(4, "big") + data)
            done += len(data)
            unsent += len(data)
            if unsent >= _AHEAD:
                unsent = 0
                link.tell_preparing(_stage(done, size))
                while not errand.drain(_LOOK):
                    pass
            if errand.has_ended:
                return


def _stage(done: int, total: int) -> str:
    """Return how far a host is, for its line: hosts with equal lines share one."""
    return f"files {min(10 * done // max(total, 1), 10)}0% of {size_words(total)}"


def _port(text: str) -> int:
    """Raises ValueError: other hosts connect to this port."""
    port = int(text)
    if not 0 < port < 1 << 16:
        raise ValueError("it offers content at no port")
    return port


def cause_of(detail: str) -> str:
    """Return the message of an exception without the name of a usual type."""
    return _USUAL.sub("", detail)


def addresses_of(facts: "HostFacts") -> list[str]:
    """Return addresses of a host for other hosts, first the address of the driver's connection."""
    all_addresses = [address for addresses in facts.addresses.values() for address in addresses]
    usable = [address for address in all_addresses if "%" not in address and not address.startswith("127.")]
    return list(dict.fromkeys([facts.peer_address, *usable] if facts.peer_address else usable))
