"""The hosts that a job may use, and how far each of them is. Pure."""

import math
from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from typing import cast

from hvlaunch.engine.events import HostFacts
from hvlaunch.engine.waits import Wait, Waits
from hvlaunch.errors import (
    DiscoveryFailed,
    HostLost,
    HostsFailed,
    Problem,
    StartTimeout,
    WorkingDirectoryMissing,
)
from hvlaunch.hosts.placement import Seat, slots_of, unlikely
from hvlaunch.job import Host, JobSpec

__all__ = ["Cooldown", "HostState", "Pool", "PoolHost", "no_list", "no_start", "stuck", "unfit"]

_MOST_DOUBLINGS = 30


class Cooldown:
    """Twice as long each time; forgotten when all was well for as long as the longest two."""

    def __init__(self) -> None:
        self.until = -math.inf
        self.count = 0
        """How often in a row it was begun."""

    def begin(self, now: float, bounds: tuple[float, float] | None) -> float:
        """Exclude it from `now` on: at first the lesser of the bounds, at most the greater; None is for good.

        The number of seconds.
        """
        if bounds is None:
            self.until = math.inf
            return math.inf
        least, most = bounds
        if now > self.until + 2 * most:
            self.count = 0
        seconds = min(most, least * 2.0 ** min(self.count, _MOST_DOUBLINGS))
        self.count += 1
        self.until = now + seconds
        return seconds

    def holds(self, now: float) -> bool:
        return now < self.until

    @property
    def is_for_good(self) -> bool:
        return self.until == math.inf

    def cut_short(self, now: float) -> None:
        """End it now; the next one is still twice as long."""
        self.until = min(self.until, now)

    def lift(self) -> None:
        """End one that is for good."""
        if self.is_for_good:
            self.until = -math.inf


class HostState(Enum):
    """The connection to a host."""

    NONE = "none"
    CONNECTING = "connecting"
    READY = "ready"
    PARTING = "parting"
    """Its agent ends on its own account."""
    CLOSING = "closing"


class PoolHost:
    """A host, and what is known of it."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.listed = True
        """Whether the last list of the pool has it."""
        self.cooldown = Cooldown()
        self.strikes = 0
        """How often in a row its workers ended a round that had not got anywhere."""
        self.was_ready = False
        self.was_lost = False
        """Whether the last that went wrong with it was that it was lost."""
        self.gpus = 0
        """As its agent counted them, the last time."""
        self.disconnect()

    def disconnect(self) -> None:
        """Nothing that was true of the connection is true any more."""
        self.state = HostState.NONE
        self.is_connected = False
        self.facts: HostFacts | None = None
        self.rendezvous: tuple[str, int] | None = None
        self.has_tried_rendezvous = False

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def has_agent(self) -> bool:
        """Whether an agent is there, though it may be about to end."""
        return self.state in (HostState.READY, HostState.PARTING)

    def is_usable(self, now: float) -> bool:
        """Whether workers may be started there."""
        return self.state is HostState.READY and self.listed and not self.cooldown.holds(now)


class Pool:
    """The hosts in order: those of the last list, then those that have left it."""

    def __init__(self, hosts: Sequence[Host], slots_per_host: int | None, waits: Waits) -> None:
        self._slots_per_host = slots_per_host
        self._waits = waits
        self._hosts = {host.name: PoolHost(host) for host in hosts}
        self.open: dict[str, None] = {}
        """All that are connected, or are to be, in the order in which that began."""
        self.errors: dict[str, Problem] = {}
        """Why hosts failed, the last time that they did; nothing of those that are ready again."""

    def __iter__(self) -> Iterator[PoolHost]:
        return iter(self._hosts.values())

    def __getitem__(self, name: str) -> PoolHost:
        return self._hosts[name]

    def get(self, name: str) -> PoolHost | None:
        return self._hosts.get(name)

    def update(self, hosts: Sequence[Host]) -> None:
        """There is a new list. A host that has left and comes back is a new one, as far as its failures go for good."""
        listed = {host.name: host for host in hosts}
        for old in self:
            old.listed = old.name in listed
            if not old.listed:
                old.cooldown.lift()
                old.strikes = 0
                self._waits.end(Wait.COOLDOWN, old.name)
        ordered: dict[str, PoolHost] = {}
        for name, host in listed.items():
            known = self._hosts.get(name) or PoolHost(host)
            known.host = host
            if known.cooldown.until > -math.inf:
                self._waits.begin(Wait.COOLDOWN, name, known.cooldown.until)
            ordered[name] = known
        self._hosts = ordered | {name: old for name, old in self._hosts.items() if name not in listed}

    def slots(self, host: PoolHost) -> int:
        """As many as it has, or is said to have; 1 where only its agent can count them."""
        return slots_of(host.host, self._slots_per_host, host.gpus)

    def has_slot(self, seat: Seat, now: float) -> bool:
        """Whether the slot is still one of the pool's, on a host that may be used."""
        host = self._hosts.get(seat[0])
        return host is not None and host.is_usable(now) and seat[1] < self.slots(host)

    def capacity(self, hosts: Sequence[PoolHost]) -> int:
        """All slots of these hosts."""
        return sum(self.slots(host) for host in hosts)

    def connect(self, host: PoolHost, due: float) -> None:
        host.disconnect()
        host.state = HostState.CONNECTING
        self._waits.begin(Wait.CONNECTING, host.name, due)
        self.open[host.name] = None

    def ready(self, host: PoolHost, facts: HostFacts) -> None:
        host.state, host.facts, host.gpus = HostState.READY, facts, facts.gpus or 0
        host.was_ready, host.was_lost = True, False
        self._waits.end(Wait.CONNECTING, host.name)
        self.errors.pop(host.name, None)

    def parts(self, host: PoolHost, due: float) -> None:
        host.state = HostState.PARTING
        self._waits.begin(Wait.PARTING, host.name, due)

    def closes(self, host: PoolHost, due: float) -> None:
        host.state = HostState.CLOSING
        self._waits.end(Wait.PARTING, host.name)
        self._waits.begin(Wait.CLOSING, host.name, due)

    def gone(self, host: PoolHost) -> None:
        host.disconnect()
        for wait in (Wait.CONNECTING, Wait.PARTING, Wait.CLOSING):
            self._waits.end(wait, host.name)
        self.open.pop(host.name, None)

    def connect_anew(self, ready_by: float) -> None:
        """All that are connected are so from the beginning."""
        for name in self.connecting:
            self._waits.begin(Wait.CONNECTING, name, ready_by)

    @property
    def connecting(self) -> Collection[str]:
        """The names of the hosts whose agents have not said hello yet."""
        return cast("Collection[str]", self._waits.all_of(Wait.CONNECTING))

    @property
    def has_newcomers(self) -> bool:
        """Whether any host is being connected that has never failed."""
        return any(not self._hosts[name].cooldown.count for name in self.connecting)

    def has_more(self, now: float) -> bool:
        """Whether any host may get ready soon."""
        return any(
            host.listed and host.state is not HostState.READY and not host.cooldown.holds(now)
            for host in self
        )

    @property
    def failures(self) -> list[Problem]:
        """Of the hosts that are listed, in their order."""
        return [self.errors[host.name] for host in self if host.listed and host.name in self.errors]

    @property
    def failure(self) -> Problem | None:
        """All of them in one, if there are any."""
        errors = self.failures
        return HostsFailed(errors).problem if len(errors) > 1 else next(iter(errors), None)

    def exclude(self, host: PoolHost, now: float, bounds: tuple[float, float] | None) -> float | None:
        """Begin the host's cool-down; for how many seconds, None for good."""
        seconds = host.cooldown.begin(now, bounds)
        if host.listed:
            self._waits.begin(Wait.COOLDOWN, host.name, host.cooldown.until)
        return None if host.cooldown.is_for_good else seconds

    def late(self, wait: Wait, now: float) -> list[PoolHost]:
        """Return the hosts for which this wait is over."""
        return [self._hosts[cast("str", name)] for name in self._waits.due(wait, now)]


def no_list() -> Problem:
    """Nobody says which hosts there are, not even that it can't be found out."""
    return DiscoveryFailed(
        "what finds the hosts does not answer",
        hint="look whether the hostfile or the script is on a file system that hangs",
    ).problem


def _no_directory(host: str, path: str, cause: str) -> Problem:
    """The workers' directory is not there, or can't be entered."""
    return WorkingDirectoryMissing(
        f"working directory {path}: {cause}",
        host=host,
        path=path,
        hint="--cwd DIR, with a directory that every host has",
    ).problem


def no_start(host: str, seconds: float, *, is_connected: bool) -> Problem:
    """It is not ready in time."""
    reached = "its agent does not answer" if is_connected else "no connection"
    return StartTimeout(
        f"{reached} within {seconds:g} s",
        host=host,
        hint=f"ssh {host} python3 --version, or a longer --start-timeout",
    ).problem


def stuck(host: str) -> Problem:
    """Its workers live on after SIGKILL."""
    return HostLost(
        "lost: its workers do not end, even after SIGKILL",
        host=host,
        hint="ps -eo pid,stat,wchan,args on that host: what is in state D waits for a disk or a driver",
    ).problem


def unfit(host: str, facts: HostFacts, slots: int, spec: JobSpec) -> Problem | None:
    """Why no worker can be started on a host with these slots."""
    if facts.cwd_error is not None:
        return _no_directory(host, spec.cwd, facts.cwd_error)
    if spec.force_slots or facts.gpus is not None:
        return None
    error = unlikely(host, slots, facts.cpus)
    return None if error is None else error.problem
