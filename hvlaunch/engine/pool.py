"""The hosts that a job may use, and how far each of them is. Pure."""

from collections.abc import Iterator, Sequence
from enum import Enum

from hvlaunch.engine.cooldown import Cooldown
from hvlaunch.engine.events import HostFacts
from hvlaunch.errors import HostsFailed, Problem
from hvlaunch.hosts.placement import Seat, slots_of
from hvlaunch.job import Host

__all__ = ["HostState", "Pool", "PoolHost"]


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

    def __init__(self, hosts: Sequence[Host], slots_per_host: int | None) -> None:
        self._slots_per_host = slots_per_host
        self._hosts = {host.name: PoolHost(host) for host in hosts}
        self.connecting: dict[str, float] = {}
        """When each must be ready; the first is the most urgent."""
        self.parting: dict[str, float] = {}
        """When each must be gone; likewise."""
        self.closing: dict[str, float] = {}
        """When each must be closed; likewise."""
        self.open: dict[str, None] = {}
        """All that are connected, or are to be, in the order in which that began."""
        self._resting: set[PoolHost] = set()
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
        ordered: dict[str, PoolHost] = {}
        for name, host in listed.items():
            known = self._hosts.get(name) or PoolHost(host)
            known.host = host
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
        self.connecting[host.name] = due
        self.open[host.name] = None

    def ready(self, host: PoolHost, facts: HostFacts) -> None:
        host.state, host.facts, host.gpus = HostState.READY, facts, facts.gpus or 0
        host.was_ready, host.was_lost = True, False
        self.connecting.pop(host.name, None)
        self.errors.pop(host.name, None)

    def parts(self, host: PoolHost, due: float) -> None:
        host.state = HostState.PARTING
        self.parting[host.name] = due

    def closes(self, host: PoolHost, due: float) -> None:
        host.state = HostState.CLOSING
        self.parting.pop(host.name, None)
        self.closing[host.name] = due

    def gone(self, host: PoolHost) -> None:
        host.disconnect()
        for names in (self.connecting, self.parting, self.closing, self.open):
            names.pop(host.name, None)

    def connect_anew(self, ready_by: float) -> None:
        """All that are connected are so from the beginning."""
        self.connecting = dict.fromkeys(self.connecting, ready_by)

    def prolong(self, seconds: float) -> None:
        """All that are waited for have so much more time."""
        self.connecting = {name: due + seconds for name, due in self.connecting.items()}
        self.parting = {name: due + seconds for name, due in self.parting.items()}
        self.closing = {name: due + seconds for name, due in self.closing.items()}

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
        self._resting.add(host)
        seconds = host.cooldown.begin(now, bounds)
        return None if host.cooldown.is_for_good else seconds

    @property
    def resting(self) -> int:
        """How many listed hosts are in their cool-down."""
        return sum(host.listed for host in self._resting)

    def wake_ups(self, now: float) -> list[float]:
        """When cool-downs are over."""
        self._resting = {host for host in self._resting if host.cooldown.holds(now)}
        return [host.cooldown.until for host in self._resting if host.listed]

    def late(self, dues: dict[str, float], now: float) -> list[PoolHost]:
        """Those of `connecting`, `parting` or `closing` whose time is over."""
        return [self._hosts[name] for name, due in dues.items() if due <= now]
