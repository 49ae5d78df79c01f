"""The hosts that a job may use: their connections and failures, and the network among them. Pure.

The network is probed before a round: its addresses and interfaces are chosen by the findings.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import cast

from hvlaunch.engine.actions import Action, Probe
from hvlaunch.engine.events import HostAnswers, HostAway, HostBack, HostFacts, HostProbed, HostQuiet
from hvlaunch.engine.waits import Cooldown, Wait, Waits
from hvlaunch.errors import (
    BadUsage,
    Defect,
    DiscoveryFailed,
    HostLost,
    HostsFailed,
    Problem,
    StartTimeout,
    Unreachable,
    WorkingDirectoryMissing,
)
from hvlaunch.hosts.placement import Seat, slots_of, unlikely
from hvlaunch.job import Host, JobSpec

__all__ = [
    "HOST_TRANSITIONS",
    "LOOPBACK",
    "SOCKETS",
    "HostState",
    "InvalidHostStep",
    "Network",
    "Pool",
    "PoolHost",
    "Probing",
    "candidates",
    "gone_unasked",
    "interface_of",
    "is_usable",
    "no_list",
    "no_start",
    "shared_machines",
    "stuck",
    "unfit",
]

_PREPARING = 60.0
"""Seconds without progress after which a host that gets its files is given up."""


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


LOOPBACK = "127.0.0.1"
SOCKETS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
"""Variables with the interface for sockets."""
_MOST_TRIED = 64
"""Most addresses of a host to probe: a host that claims more must not make others scan the network."""


def candidates(facts: HostFacts) -> tuple[str, ...]:
    """Return the host's addresses for other hosts, the likeliest first.

    The driver's address of the host comes first if the host really owns it. An address that only leads to the host (by NAT,
    for example) comes last, since the host itself must be able to use it too.
    """
    addresses = [address for listed in facts.addresses.values() for address in listed if is_usable(address)]
    addresses = sorted(addresses, key=lambda address: ":" in address)[:_MOST_TRIED]
    peer = facts.peer_address
    if peer in addresses:
        addresses.remove(peer)
        addresses.insert(0, peer)
    elif peer and is_usable(peer):
        addresses.append(peer)
    return tuple(addresses)


def is_usable(address: str) -> bool:
    """True if other hosts may use the address: neither loopback nor valid on one link alone."""
    # Imported here: a job on a single host does not need this.
    import ipaddress  # noqa: PLC0415 (a job on one host needs none of this)

    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified)


def interface_of(facts: HostFacts, address: str) -> str | None:
    """Return the interface with the address; None if its name would mislead libraries.

    A host that routes may have its address on the loopback device, after 127.0.0.1. A library that is given `lo` takes the
    first address, and reaches no host; without a name it uses the host's name.
    """
    names = [name for name, listed in facts.addresses.items() if address in listed]
    if address != LOOPBACK:
        # See above: `lo` would mislead libraries.
        names = [name for name in names if LOOPBACK not in facts.addresses[name]]
    return next(iter(names), None)


class _Target:
    """A host that `hosts` probe: its addresses in order of preference, and the results."""

    def __init__(self, addresses: tuple[str, ...], hosts: Sequence[str], *, needs_all: bool) -> None:
        self.addresses = addresses
        self._needs_all = needs_all
        self.hosts = hosts
        self._reached: dict[str, set[str]] = {address: set() for address in addresses}
        self._trying = set(hosts)

    def add(self, host: str, address: str | None) -> None:
        if address is None:
            self._trying.discard(host)
        elif address in self._reached:
            self._reached[address].add(host)

    def common(self) -> str | None:
        """Return the best address in reach of every probing host."""
        return next((at for at in self.addresses if len(self._reached[at]) == len(self.hosts)), None)

    def proven(self) -> set[str]:
        """Return the addresses in reach of every probing host."""
        return {at for at in self.addresses if len(self._reached[at]) == len(self.hosts)}

    def best_for(self, host: str) -> str | None:
        return next((at for at in self.addresses if host in self._reached[at]), None)

    def is_tried_by(self, host: str) -> bool:
        """True if the host still probes."""
        return host in self._trying

    @property
    def is_best(self) -> bool:
        """True if waiting can't find a better common address."""
        if self._needs_all:
            return not self._trying or len(self.proven()) == len(self.addresses)
        return not self._trying or (bool(self.addresses) and self.common() == self.addresses[0])


class Network:
    """The hosts of a round, in order of rank, and the paths between them.

    Every host probes rank 0's host, and its next neighbour, in a ring without the last step. A connection
    counts if the right host answers. `only` are interfaces named by the user, which are used without probing. A single
    host uses its loopback. With `each_other`, every host probes every other one. `needs_all`: the best address is not
    enough, since adapters are chosen by the others.
    """

    def __init__(
        self,
        facts: Mapping[str, HostFacts],
        only: Sequence[str] = (),
        *,
        each_other: bool = False,
        needs_all: bool = False,
    ) -> None:
        self._facts = facts
        self._only = only
        self.first, *others = facts
        self._targets: dict[str, _Target] = {}
        if others and not only:
            # Every host must reach rank 0's; other paths are sampled by a neighbour each.
            previous = dict(zip(others, [self.first, *others], strict=False))
            for target in facts:
                hosts = others if target == self.first else [previous[target]]
                if each_other:
                    hosts = [host for host in facts if host != target]
                self._targets[target] = _Target(candidates(facts[target]), hosts, needs_all=needs_all)
        self._may_improve = list(self._targets.values())
        self._lack = list(self._targets.values())

    def tries(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """Yield each probing host, its target and the target's addresses."""
        for name, target in self._targets.items():
            for host in target.hosts:
                yield host, name, target.addresses

    def add(self, host: str, target: str, address: str | None) -> None:
        """Note that `host` reached `target` at the address; None after the last address."""
        tried = self._targets.get(target)
        if tried is not None and host in tried.hosts:
            tried.add(host, address)

    @property
    def is_best(self) -> bool:
        """True if waiting can't lead to a better choice."""
        while self._may_improve and self._may_improve[-1].is_best:
            # A best target stays best. Thousands of findings must not ask every target each time.
            self._may_improve.pop()  # it stays so: thousands of findings must not ask every host each time
        return not self._may_improve

    @property
    def is_final(self) -> bool:
        """True if no missing path can be found any more."""
        return not any(self._targets[target].is_tried_by(host) for host, target in self.lacks())

    @property
    def is_enough(self) -> bool:
        """True if every path exists, though perhaps not by the best address."""
        while self._lack and self._lack[-1].common() is not None:
            self._lack.pop()
        return not self._lack

    def lacks(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of hosts without a path."""
        for name, target in self._targets.items():
            for host in target.hosts:
                if target.best_for(host) is None:
                    yield host, name

    def problem(self) -> Problem | None:
        """Return why the hosts can't work together once probing is over: the first pair, or interface."""
        for host, name in self.lacks():
            return _unreachable(host, name, self._targets[name].addresses)
        for name, facts in self._facts.items():
            if self._only and self._named(facts) is None:
                has = ", ".join(facts.addresses)
                hint = "--network-interfaces with a name for each host, if their names differ"
                cause = f"none of the interfaces {', '.join(self._only)} has an address on it (it has {has})"
                return BadUsage(cause, host=name, hint=hint).problem
        return None

    def _named(self, facts: HostFacts) -> str | None:
        """Return the first of the user's interfaces that has an address on the host."""
        return next((name for name in self._only if facts.addresses.get(name)), None)

    def address(self, host: str, target: str | None = None) -> str:
        """Return the address at which `host` reaches `target` (default: rank 0's host); valid without a problem()."""
        target = target or self.first
        named = self._named(self._facts[target])
        if named is not None:
            return self._facts[target].addresses[named][0]
        if target not in self._targets:
            return LOOPBACK
        tried = self._targets[target]
        return tried.common() or tried.best_for(host) or tried.addresses[0]

    def own_address(self, host: str) -> str:
        """Return the host's address for the others; without a common one, the address for the first of them."""
        others = self._targets[host].hosts if host in self._targets else [host]
        return self.address(others[0], host)

    def proven(self, host: str) -> set[str]:
        """Return the addresses of the host in reach of all hosts that probe it."""
        return self._targets[host].proven() if host in self._targets else set()

    def interface(self, host: str) -> str | None:
        """Return the host's interface that the others use."""
        facts = self._facts[host]
        return self._named(facts) if self._only else interface_of(facts, self.own_address(host))


def _unreachable(host: str, target: str, addresses: Sequence[str]) -> Problem:
    tried = ", ".join(addresses) or "none: it has only loopback addresses"
    return Unreachable(
        f"can't connect to host {target} (tried {tried})",
        host=host,
        other=target,
        addresses=addresses,
        hint="open the firewall between the two, or use --network-interfaces, which takes addresses without trying",
    ).problem


_PROBING_TIME = 8.0
_MOST_IN_DOUBT = 32
"""Most hosts that probe each other: the number of probes grows with the square."""
_SETTLE = 0.3
"""Seconds that a better address may take once each host is reachable."""
_RETRY_AFTER = 2.0
"""Seconds until two hosts try again: a dead agent's port refuses others before our connection to it ends."""


class Probing:
    """Probes the network of the planned hosts, and keeps findings while both hosts are there.

    `needs_all`: see Network. `lease` is the silence in seconds after which a host is lost. Probing waits as long for a silent host, since our own
    link may be down.
    """

    def __init__(self, only: Sequence[str], lease: float, waits: Waits, *, needs_all: bool = False) -> None:
        self._only = only
        self._needs_all = needs_all
        self._waits = waits
        self._lease = lease
        self._findings: dict[str, dict[str, list[str | None]]] = {}
        """Findings by probing host and target; an empty list means that the host was asked."""
        self._agents: Counter[str] = Counter()
        """Number of earlier agents of each host: findings about those do not count."""
        self._hosts: tuple[str, ...] = ()
        self._in_doubt = False
        self._quiet: set[str] = set()
        """Hosts that do not answer."""
        self._retried: dict[frozenset[str], None] = {}
        """Pairs without a path that try again, or have."""
        self.network: Network | None = None

    def want(self, facts: Mapping[str, HostFacts], now: float) -> list[Action]:
        """Set the hosts in order of rank; return probes that are new."""
        if not self._waits.has(Wait.PROBING_AGAIN):
            self._waits.begin(Wait.PROBING_AGAIN, None, now + 2 * _PROBING_TIME + self._lease)
        if self.network is not None and tuple(facts) == self._hosts:
            return []
        self._hosts = tuple(facts)
        each_other = self._in_doubt and len(facts) <= _MOST_IN_DOUBT
        self.network = Network(facts, self._only, each_other=each_other, needs_all=self._needs_all)
        self._waits.begin(Wait.PROBING, None, now + _PROBING_TIME)
        probes: list[Action] = []
        for host, target, addresses in self.network.tries():
            findings = self._findings.setdefault(host, {})
            # Probed once: the findings hold while both agents live.
            if target not in findings:
                findings[target] = []
                port = facts[target].beacon_port
                probes.append(Probe(host, target, addresses, port, self._agents[target]))
            for address in findings[target]:
                self.network.add(host, target, address)
        return probes

    def add(self, finding: HostProbed) -> None:
        """Note a finding of a probing host."""
        host, target, address, agent = finding
        findings = self._findings.get(host, {}).get(target)
        # An answer about an earlier agent of the target, whose port may be another's now.
        if findings is None or agent != self._agents[target]:
            return
        findings.append(address)
        if self.network is not None:
            self.network.add(host, target, address)

    def forget(self, host: str) -> None:
        """Forget a host whose agent is gone: it may come back with other addresses."""
        self._agents[host] += 1
        self._findings.pop(host, None)
        for targets in self._findings.values():
            targets.pop(host, None)
        self._quiet.discard(host)
        for pair in self._pairs_with(host):
            self._forget_retry(pair)
        self._look_anew()

    def hears(self, event: HostQuiet | HostAnswers | HostAway | HostBack) -> None:
        """Note silence or a new answer of a host; after an answer, its failed pairs try again."""
        if isinstance(event, HostQuiet | HostAway):
            self._quiet.add(event.host)
        else:
            self._quiet.discard(event.host)
            for pair in self._pairs_with(event.host):
                self._retried.pop(pair, None)
                self._waits.begin(Wait.PROBE_RETRY, pair, 0.0)

    def is_silent(self, host: str) -> bool:
        """True if the host does not answer."""
        return host in self._quiet

    def _look_anew(self) -> None:
        self.network, self._hosts = None, ()
        self._waits.end(Wait.PROBING)

    def _pairs_with(self, host: str) -> list[frozenset[str]]:
        pairs = cast("Iterable[frozenset[str]]", self._waits.all_of(Wait.PROBE_RETRY))
        return [pair for pair in (*pairs, *self._retried) if host in pair]

    def _forget_retry(self, pair: frozenset[str]) -> None:
        self._retried.pop(pair, None)
        self._waits.end(Wait.PROBE_RETRY, pair)

    def forget_silence(self) -> None:
        """Forget the silence of hosts after a stop of the driver."""
        self._quiet.clear()
        self._forget_retries()

    def _forget_retries(self) -> None:
        self._retried.clear()
        self._waits.end_all((Wait.PROBE_RETRY,))

    def is_certain(self, host: str, target: str, now: float) -> bool:
        """True if the missing path between the two hosts is certain; otherwise probe them again.

        It is not certain while one of them is silent, nor before they have tried again: the path may have been cut for a moment.
        """
        pair = frozenset((host, target))
        until = self._waits.until(Wait.PROBING_AGAIN)
        if self.network is None or until is None or now >= until:
            return True
        names_by_pair = {frozenset(names): names for names in self.network.lacks()}
        for lacking in names_by_pair:
            if lacking not in self._retried and not self._waits.has(Wait.PROBE_RETRY, lacking):
                self._waits.begin(Wait.PROBE_RETRY, lacking, now + _RETRY_AFTER)
        # A cut of our own link looks the same; the lease decides.
        if pair & self._quiet:
            return False
        if pair in self._retried:
            return True
        for lacking, names in names_by_pair.items():
            if self._waits.is_over(Wait.PROBE_RETRY, now, lacking):
                self._waits.end(Wait.PROBE_RETRY, lacking)
                self._retried[lacking] = None
                self.ask_again(*names)
        return False

    def finish(self) -> None:
        """End the probing: the network is accepted, impossible, or not needed any more."""
        self._waits.end(Wait.PROBING_AGAIN)
        self._forget_retries()

    def ask_again(self, host: str, target: str) -> None:
        """Forget the missing path between two hosts; the next plan with both probes again."""
        for prober, other in ((host, target), (target, host)):
            findings = self._findings.get(prober, {}).get(other, ())
            if None in findings and not any(findings):
                del self._findings[prober][other]
        self._look_anew()

    def doubt(self) -> None:
        """Distrust earlier findings after an unexplained failure: from now on all hosts probe each other."""
        self._in_doubt = True
        for targets in self._findings.values():
            for target in [target for target, findings in targets.items() if None in findings]:
                # A host that still probes is not asked twice.
                del targets[target]  # who is still trying is not asked twice
        self._look_anew()

    def is_settled(self, now: float, *, others: bool) -> bool:
        """True if the network can be used as it is; `others`: nothing else is awaited."""
        deadline, until = self._waits.until(Wait.PROBING), self._waits.until(Wait.PROBING_AGAIN)
        if self.network is None or deadline is None or until is None:
            return False
        if now >= deadline:
            return now >= until or self.network.is_final
        if others and not self.network.is_best and self.network.is_enough and now + _SETTLE < deadline:
            self._waits.begin(Wait.PROBING, None, now + _SETTLE)
        return others and self.network.is_best


def shared_machines(facts: Mapping[str, HostFacts]) -> list[tuple[str, ...]]:
    """Return groups of hosts that are the same machine, in the order of the hosts.

    One machine has one boot id. Containers share it too, but not each other's addresses.
    """
    names_by_machine: dict[object, list[str]] = {}
    for name, host_facts in facts.items():
        if host_facts.boot_id is not None:
            # Containers share the boot id of their machine, but have addresses of their own.
            addresses = {(interface, *listed) for interface, listed in host_facts.addresses.items()}
            names_by_machine.setdefault((host_facts.boot_id, frozenset(addresses)), []).append(name)
    return [tuple(names) for names in names_by_machine.values() if len(names) > 1]
