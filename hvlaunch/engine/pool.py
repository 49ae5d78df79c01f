"""The hosts that a job may use: their connections, cool-downs and failures. Pure."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import cast

from hvlaunch.engine.events import HostFacts
from hvlaunch.engine.waits import Wait, Waits
from hvlaunch.errors import (
    Defect,
    DiscoveryFailed,
    HostLost,
    HostsFailed,
    Problem,
    StartTimeout,
    WorkingDirectoryMissing,
)
from hvlaunch.hosts.placement import Seat, slots_of, unlikely
from hvlaunch.job import Host, JobSpec

__all__ = [
    "HOST_TRANSITIONS",
    "Cooldown",
    "HostState",
    "InvalidHostStep",
    "Pool",
    "PoolHost",
    "gone_unasked",
    "no_list",
    "no_start",
    "stuck",
    "unfit",
]

_PREPARING = 60.0
"""Seconds without progress after which a host that gets its files is given up."""
_MOST_DOUBLINGS = 30


class Cooldown:
    """A cool-down that doubles each time, until the host or slot was well for twice the longest one."""

    def __init__(self) -> None:
        self.until = -math.inf
        self._before: float | None = None
        """End of the newest cool-down of a retired host."""
        self.count = 0
        """Cool-downs in a row."""

    def begin(self, now: float, bounds: tuple[float, float] | None) -> float:
        """Begin a cool-down at `now`, between the bounds (least, most); None excludes for good. Returns its seconds."""
        if self._before is not None:
            self.until, self._before = self._before, None
        if bounds is None:
            self.until = math.inf
            return math.inf
        least, most = bounds
        # A host that was well for this long begins with the shortest cool-down again.
        if now > self.until + 2 * most:
            self.count = 0
        # The exponent is bounded, since 2.0 ** 1024 overflows.
        seconds = min(most, least * 2.0 ** min(self.count, _MOST_DOUBLINGS))
        self.count += 1
        self.until = now + seconds
        return seconds

    def holds(self, now: float) -> bool:
        return now < self.until

    @property
    def is_for_good(self) -> bool:
        return self.until == math.inf

    def retire(self) -> None:
        """Exclude for good without any failure."""
        self._before, self.until = self.until, math.inf

    def cut_short(self, now: float) -> None:
        """End the cool-down now; the next one is still twice as long."""
        self.until = min(self.until, now)

    def lift(self) -> None:
        """End a cool-down that is for good."""
        if self.is_for_good:
            self.until = -math.inf if self._before is None else self._before
            self._before = None


class HostState(Enum):
    """State of the connection to a host."""

    NONE = "none"
    CONNECTING = "connecting"
    READY = "ready"
    PARTING = "parting"
    """The host's agent ends by itself."""
    CLOSING = "closing"


HOST_TRANSITIONS: Mapping[str, tuple[tuple[HostState, ...], HostState]] = {
    "connect": ((HostState.NONE,), HostState.CONNECTING),
    "ready": ((HostState.CONNECTING,), HostState.READY),
    "parts": ((HostState.READY,), HostState.PARTING),
    "closes": ((HostState.READY, HostState.PARTING), HostState.CLOSING),
    # A host that failed before it was connected is gone like the others: policy need not know the difference.
    "gone": (tuple(HostState), HostState.NONE),
}
"""Each step of a host: the states from which it may come, and the state that follows."""


class InvalidHostStep(Defect):
    """A host's state does not fit its next step: HOST_TRANSITIONS has no such pair."""

    def __init__(self, host: str, state: HostState, step: str) -> None:
        super().__init__(f"host {host} is {state.name}, and {step} can't follow")


class PoolHost:
    """A host and its connection."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.listed = True
        """True if the newest list of hosts contains the host."""
        self.cooldown = Cooldown()
        self.strikes = 0
        """Rounds in a row that made no progress and were ended by workers of this host."""
        self.was_ready = False
        self.was_lost = False
        """True if its most recent failure was a lost connection."""
        self.slow = ""
        """Cause of its slowness in comparison with the other hosts, in words; empty without."""
        self.was_moved = False
        """True if its workers were moved to another host."""
        self.gpus = 0
        """Number of GPUs by its agent's newest count."""
        # Sets the attributes of a connection for the first time.
        self.disconnect()

    def disconnect(self) -> None:
        """Reset the attributes of a connection."""
        self.state = HostState.NONE
        self.is_connected = False
        self.facts: HostFacts | None = None
        self.rendezvous: tuple[str, int] | None = None
        self.has_tried_rendezvous = False
        self.silent_for: float | None = None
        """Seconds without a sign of life after which the host was suspected; None for a host that answers."""
        self.is_aside = False
        """True if a round continues without the host, which was suspected."""

    @property
    def name(self) -> str:
        return self.host.name

    def take_step(self, step: str) -> None:
        """Change the state as HOST_TRANSITIONS says. Raises InvalidHostStep."""
        states, after = HOST_TRANSITIONS[step]
        if self.state not in states:
            raise InvalidHostStep(self.name, self.state, step)
        self.state = after

    @property
    def has_agent(self) -> bool:
        """True if the host has an agent, possibly an ending agent."""
        return self.state in (HostState.READY, HostState.PARTING)

    def is_usable(self, now: float) -> bool:
        """True if workers may be started there. A suspected host keeps its workers, and gets no others."""
        return self.state is HostState.READY and self.listed and not self.cooldown.holds(now)

    def is_coming(self, now: float) -> bool:
        """True if workers may be started there once it has connected."""
        return self.state is HostState.CONNECTING and self.listed and not self.cooldown.holds(now)

    def may_join(self, now: float) -> bool:
        """True if its workers may take part in the next round."""
        return self.is_usable(now) and self.silent_for is None


class Pool:
    """The hosts in order: the newest list, then former members."""

    def __init__(
        self, hosts: Sequence[Host], slots_per_host: int | None, waits: Waits, gpus_per_worker: int | None
    ) -> None:
        self._slots_per_host = slots_per_host
        self._gpus_per_worker = gpus_per_worker or 1
        self._waits = waits
        self._hosts = {host.name: PoolHost(host) for host in hosts}
        self.open: dict[str, None] = {}
        """Hosts that are connected or being connected, in the order of their connections."""
        self.moving: str | None = None
        """The host of workers about to move."""
        self.target: str | None = None
        """The host that takes them over, if the user has named one."""
        self.errors: dict[str, Problem] = {}
        """Most recent failure by host; removed when the host is ready again."""

    def __iter__(self) -> Iterator[PoolHost]:
        return iter(self._hosts.values())

    def __getitem__(self, name: str) -> PoolHost:
        return self._hosts[name]

    def get(self, name: str) -> PoolHost | None:
        return self._hosts.get(name)

    def update(self, hosts: Sequence[Host]) -> None:
        """Replace the list of hosts. A host that has left and comes back is not excluded for good any more."""
        listed = {host.name: host for host in hosts}
        for old in self:
            old.listed = old.name in listed
            # Whoever takes a host off the list and puts it back has probably repaired it.
            if not old.listed:
                old.cooldown.lift()
                old.strikes = 0
                self._waits.end(Wait.COOLDOWN, old.name)
        ordered: dict[str, PoolHost] = {}
        for name, host in listed.items():
            pool_host = self._hosts.get(name) or PoolHost(host)
            pool_host.host = host
            # A host that comes back while its cool-down lasts has its wait again.
            if pool_host.cooldown.until > -math.inf:
                self._waits.begin(Wait.COOLDOWN, name, pool_host.cooldown.until)
            ordered[name] = pool_host
        self._hosts = ordered | {name: old for name, old in self._hosts.items() if name not in listed}

    def slots(self, host: PoolHost) -> int:
        """Return the host's number of slots; 1 until its agent has counted them. With leases there are as many as leases."""
        if host.facts is not None and host.facts.leased is not None:
            return len(host.facts.leased) // self._gpus_per_worker
        return slots_of(host.host, self._slots_per_host, host.gpus // self._gpus_per_worker)

    def has_slot(self, seat: Seat, now: float) -> bool:
        """True if the pool has this slot, and the host may be used."""
        host = self._hosts.get(seat[0])
        return host is not None and host.is_usable(now) and seat[1] < self.slots(host)

    def may_join(self, seat: Seat, now: float) -> bool:
        """True if the pool has this slot, and its worker may take part in the next round."""
        return self.has_slot(seat, now) and self._hosts[seat[0]].silent_for is None

    def capacity(self, hosts: Sequence[PoolHost]) -> int:
        """Return the number of slots of these hosts."""
        return sum(self.slots(host) for host in hosts)

    def connect(self, host: PoolHost, due: float) -> None:
        host.take_step("connect")
        self._waits.begin(Wait.CONNECTING, host.name, due)
        self.open[host.name] = None

    def prepares(self, host: PoolHost, now: float) -> None:
        """The host's agent is there, and its files make progress, on their way there or back."""
        wait = Wait.CLOSING if host.state is HostState.CLOSING else Wait.CONNECTING
        self._waits.begin(wait, host.name, max(now + _PREPARING, self._waits[wait, host.name]))

    def ready(self, host: PoolHost, facts: HostFacts) -> None:
        host.take_step("ready")
        host.facts, host.gpus = facts, facts.gpus or 0
        # Earlier failures to connect are over.
        host.was_ready, host.was_lost, host.was_moved = True, False, False
        self._waits.end(Wait.CONNECTING, host.name)
        self.errors.pop(host.name, None)

    def parts(self, host: PoolHost, due: float) -> None:
        host.take_step("parts")
        self._waits.begin(Wait.PARTING, host.name, due)

    def closes(self, host: PoolHost, due: float) -> None:
        host.take_step("closes")
        self._waits.end(Wait.PARTING, host.name)
        self._waits.begin(Wait.CLOSING, host.name, due)

    def gone(self, host: PoolHost) -> None:
        host.take_step("gone")
        host.disconnect()
        for wait in (Wait.CONNECTING, Wait.PARTING, Wait.CLOSING, Wait.RETURNING):
            self._waits.end(wait, host.name)
        self.open.pop(host.name, None)

    def connect_anew(self, ready_by: float) -> None:
        """Restart the time limits of connecting hosts, whose connections begin again."""
        for name in self.connecting:
            self._waits.begin(Wait.CONNECTING, name, ready_by)

    @property
    def connecting(self) -> Collection[str]:
        """Names of hosts whose agents have not said hello yet."""
        return cast("Collection[str]", self._waits.all_of(Wait.CONNECTING))

    @property
    def has_newcomers(self) -> bool:
        """True if a host is being connected that has never failed."""
        return any(not self._hosts[name].cooldown.count for name in self.connecting)

    def has_more(self, now: float) -> bool:
        """True if a listed host may get ready soon."""
        return any(
            host.listed and host.state is not HostState.READY and not host.cooldown.holds(now)
            for host in self
        )

    @property
    def failures(self) -> list[Problem]:
        """Failures of listed hosts, in their order."""
        return [self.errors[host.name] for host in self if host.listed and host.name in self.errors]

    @property
    def failure(self) -> Problem | None:
        """These failures as one problem; None without any."""
        errors = self.failures
        return HostsFailed(errors).problem if len(errors) > 1 else next(iter(errors), None)

    def exclude(self, host: PoolHost, now: float, bounds: tuple[float, float] | None) -> float | None:
        """Begin the host's cool-down; return its seconds, or None for good."""
        # Unlisted hosts are not used anyway, so the end of their cool-down wakes nobody.
        seconds = host.cooldown.begin(now, bounds)
        if host.listed:
            self._waits.begin(Wait.COOLDOWN, host.name, host.cooldown.until)
        return None if host.cooldown.is_for_good else seconds

    def late(self, wait: Wait, now: float) -> list[PoolHost]:
        """Return the hosts whose wait is over."""
        return [self._hosts[cast("str", name)] for name in self._waits.due(wait, now)]


def no_list() -> Problem:
    """Make the error for discovery that does not answer."""
    return DiscoveryFailed(
        "host discovery does not answer",
        hint="look whether the hostfile or the script is on a file system that hangs",
    ).problem


def _no_directory(host: str, path: str, cause: str) -> Problem:
    """Make the error for a missing or inaccessible working directory."""
    return WorkingDirectoryMissing(
        f"working directory {path}: {cause}",
        host=host,
        path=path,
        hint="--cwd DIR, with a directory that every host has",
    ).problem


def no_start(host: str, seconds: float, *, is_connected: bool) -> Problem:
    """Make the error for a host that is not ready in time."""
    reached = "its agent does not answer" if is_connected else "no connection"
    return StartTimeout(
        f"{reached} within {seconds:g} s",
        host=host,
        hint=f"ssh {host} python3 --version, or a longer --start-timeout",
    ).problem


def stuck(host: str) -> Problem:
    """Make the error for a host whose workers survive SIGKILL."""
    return HostLost(
        "lost: its workers do not end, even after SIGKILL",
        host=host,
        hint="ps -eo pid,stat,wchan,args on that host: processes in state D wait for a disk or a driver",
    ).problem


def gone_unasked(host: str) -> Problem:
    """Make the error for an agent that ends, and was not told to."""
    return HostLost("lost: its agent ended without an order", host=host).problem


def unfit(host: str, facts: HostFacts, slots: int, spec: JobSpec) -> Problem | None:
    """Return why no worker can be started on a host with these slots, if so."""
    if facts.cwd_error is not None:
        return _no_directory(host, spec.cwd, facts.cwd_error)
    if spec.force_slots or facts.gpus is not None:
        return None
    error = unlikely(host, slots, facts.cpus)
    return None if error is None else error.problem
