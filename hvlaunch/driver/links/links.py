"""The links to a job's hosts, by name, and the heartbeat over them: pings, and the lease, which ends with a host's silence."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from hvlaunch.agent.wire.frames import PROTOCOL
from hvlaunch.driver.links.agent_channel import AgentConnection
from hvlaunch.driver.links.host_link import HostLink, Opening, OutputPrinter, Prepare
from hvlaunch.driver.program import AgentProgram, Keys
from hvlaunch.driver.turn import Arrival
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.hosts import candidates, is_usable
from hvlaunch.errors import HostLost
from hvlaunch.hosts.local import only_local, own_addresses
from hvlaunch.job import RECONNECT_TIMEOUT, Call, Host, JobSpec
from hvlaunch.rendezvous.serving import EVERYWHERE, RendezvousServer
from hvlaunch.watch.rounds import Ranks

if TYPE_CHECKING:
    from hvlaunch.driver.job_record import JobRecord, PastTurn
    from hvlaunch.driver.links.relay import HostRelay
    from hvlaunch.driver.links.suspicion import Suspicion, Vouch
    from hvlaunch.driver.worker_files import ResultFiles

__all__ = ["Heartbeat", "HostLinks", "Lease", "agents_lease", "pack_sync", "patience_alone", "workers_python"]

_LONGEST_PULSE = 5.0
_PULSES_PER_LEASE = 4
_RESENT = 1.0
"""Seconds between two of TCP's attempts (ssh/streams.py): data sent during a cut arrives up to this much late."""
_MOST_LATE = 2 * _PULSES_PER_LEASE
"""How often the driver's own delay excuses a silent host: after so many turns its answer would have been read."""


def agents_lease(seconds: float) -> float:
    """Return the silence after which an agent gives up, for a lease of `seconds`."""
    # The last ping may have arrived a pulse before a cut as long as the lease.
    return seconds + _pulse(seconds) + _RESENT


def patience_alone(spec: JobSpec) -> float | None:
    """Return the seconds that agents wait for a driver without a possible successor; None for no change.

    With --detach agents otherwise wait for a successor as long as the lease, unless the user has set a time.
    """
    waits_for_another = spec.detach != "never" and spec.reconnect_timeout == spec.lease
    return min(RECONNECT_TIMEOUT, spec.lease) if waits_for_another else None


class Lease:
    """Ends for a host without an answer to a ping for `seconds`, plus a second for TCP's next attempt.

    Times are seconds of the driver's clock; check() must be called at `deadline`. `pulse` is the longest time between two
    pings.
    """

    def __init__(self, seconds: float, now: float, *, pulse: float = inf) -> None:
        self._seconds = seconds
        self._pulse = min(_pulse(seconds), pulse)
        self._next_pulse = now
        self._silences: dict[str, _Silence] = {}
        self.deadline = now
        self.doubtful: list[str] = []
        """Hosts without an answer for half the lease: another connection may reach them."""
        self.quiet: set[str] = set()
        """Hosts without an answer to the last ping when the next was due."""
        self.silent: dict[str, float] = {}
        """Hosts with an unanswered ping, and the start of their silence."""

    def check(
        self, heard: Mapping[str, float], acknowledged: Callable[[str], float | None], now: float
    ) -> tuple[bool, list[str]]:
        """Return True if a ping is due, and the hosts that have been silent for the lease.

        `heard` has the time of each host's last bytes; `acknowledged` returns when its kernel last acknowledged data, None if
        unknown.
        """
        # A late call means that this process was stopped: the hosts' answers may wait unread.
        is_late = now > self._next_pulse + self._pulse
        is_due = now >= self._next_pulse
        if is_due:
            self._next_pulse = now + self._pulse
        before = self._silences
        self._silences = {
            host: before[host] if host in before and before[host].heard == when else _Silence(when, when)
            for host, when in heard.items()
        }
        ends: dict[str, float] = {}
        for host, silence in self._silences.items():
            if silence.asked < inf:
                silence.note_acknowledged(acknowledged(host), self._seconds)
                if is_late:
                    silence.excuse(now)
            elif is_due:
                silence.asked = silence.since = now
            ends[host] = silence.ends_at(self._seconds)
        self.doubtful = [
            host for host, silence in self._silences.items() if now >= silence.since + self._seconds / 2
        ]
        self.silent = {host: silence.since for host, silence in self._silences.items() if silence.since < inf}
        if is_due:
            self.quiet = {host for host, silence in self._silences.items() if now > silence.since}
        self.deadline = min([self._next_pulse, *(end for end in ends.values() if end > now)])
        return is_due, [host for host, end in ends.items() if end <= now]


class _Silence:
    """Silence of a host: its start, and the time of the first unanswered ping."""

    # After a cut, the host's own data is sent again by its sshd's TCP, with doubling pauses: the pause in which a cut heals
    # may last as long as the cut. The host's kernel acknowledges earlier than that, and earns the host more time.
    def __init__(self, heard: float, acknowledged: float) -> None:
        self.heard = heard
        self.acknowledged = acknowledged
        self.asked = self.since = inf
        """`asked` is the time of the first unanswered ping; `since` is later if the driver itself was late."""
        self.until = 0.0
        self._excused = 0

    def note_acknowledged(self, acknowledged: float | None, seconds: float) -> None:
        """Note the newest acknowledgement of the host's kernel; after a long cut the host gets more time."""
        if acknowledged is not None and acknowledged > self.acknowledged:
            cut = acknowledged - self.acknowledged
            # A shorter cut leaves enough of the lease for TCP's longest pause.
            if cut > seconds / 2:
                self.until = min(acknowledged + cut, self.asked + 2 * seconds)
            self.acknowledged = acknowledged

    def excuse(self, now: float) -> None:
        """Restart the silence: the driver itself could not read answers until now."""
        if self._excused < _MOST_LATE:
            self._excused += 1
            self.since = now

    def ends_at(self, seconds: float) -> float:
        """Return the time at which the host is given up."""
        return max(self.since + seconds, self.until) + _RESENT


def _pulse(seconds: float) -> float:
    return min(_LONGEST_PULSE, seconds / _PULSES_PER_LEASE)


_OUTPUT_IN_FLIGHT = 64 << 20
_WINDOW_RANGE = (256 << 10, 4 << 20)
_FIRST_PING = 1.0
"""Seconds until the first ping. Shorter jobs end without one."""
_PULSES_PER_WORKER_TIMEOUT = 8
"""A silent host is known as such before one of its workers has been silent for too long."""


class HostLinks:
    """Makes the links, and keeps the newest of each host by its name. `post` takes the links' events."""

    def __init__(
        self,
        spec: JobSpec,
        keys: Keys,
        printer: OutputPrinter,
        rendezvous: RendezvousServer,
        ranks: Ranks,
        connect: Callable[[Host], AgentConnection],
        post: Callable[[on.Event | Arrival], None],
        *,
        clock: Callable[[], float],
        record: "JobRecord | None",
        prepare: Prepare | None = None,
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._spec = spec
        self._keys = keys
        self._printer = printer
        self._rendezvous = rendezvous
        self._ranks = ranks
        self._connect = connect
        self._post = post
        self._clock = clock
        self._record = record
        self._prepare = prepare
        self._say = say
        self._no_preload_causes: set[str] = set()
        program = workers_python(spec)
        self._python = None if program is None else (program, spec.env.get("PATH"))
        self._links: dict[str, HostLink] = {}
        self._beacon_keys: dict[str, str] = {}
        self._opened = 0
        """The number of links so far."""
        self.vouched: Callable[[str, str], None] = lambda _voucher, _host: None
        """Takes the names of an agent's host and of another host in its reach; in any thread."""
        # The same for all hosts: the program is packed once.
        config = {
            "lease": agents_lease(spec.lease),
            "grace": spec.grace,
            "window": self._window(),
            "reconnect": spec.reconnect_timeout,
            "spill": spec.spill,
        }
        calls: tuple[Sequence[bytes], ResultFiles | None] = (
            ((), None) if spec.call is None else _call_files(spec.call)
        )
        self._call, self._results = calls
        own_pythons = frozenset(host.python for host in spec.hosts if host.python is not None)
        self._program = AgentProgram(
            config,
            spec.remote_python,
            own_pythons,
            binds=spec.is_bound,
            leases=spec.leases is not None,
            preloads=spec.elastic is not None and bool(spec.elastic.preload),
            container=_container(spec),
            also=None if spec.sync is None else pack_sync,
        )

    def __getitem__(self, host: str) -> HostLink:
        return self._links[host]

    def __iter__(self) -> Iterator[HostLink]:
        return iter(self._links.values())

    def __contains__(self, host: str) -> bool:
        return host in self._links

    def remember(self, turn: "PastTurn", hellos: Mapping[int, Mapping[str, Any]]) -> None:
        """Take on the state of the links after a turn of a killed driver."""
        link = self._links.get(getattr(turn.event, "host", ""))
        if link is not None:
            link.remember(turn, hellos.get(link.number, {}))

    def take_up(self, epoch: int, lost: Callable[[Host], AgentConnection]) -> None:
        """Continue the sessions of a killed driver; connect anew to hosts without a session.

        `epoch` is this driver's number. `lost` returns the lost connection to a host's agent, for the session to replace.
        """
        for link in self:
            if link.last_heard is None:
                link.open()
            elif not link.is_closed:
                link.take_up(epoch, self._keys.session(link.number), lost(link.host))

    def probe(self, probe: do.Probe) -> None:
        """Order a host to try the addresses of another host's beacon."""
        # With the key of the target's beacon, by which the host proves that it may ask.
        question = {**probe._asdict(), "type": "probe", "key": self._beacon_keys[probe.target]}
        del question["host"]
        self._links[probe.host].send(question)

    def ask_to_vouch(self, vouch: "Vouch") -> None:
        """Ask a host's agent to try to reach another host, and to report success."""
        facts = self._links[vouch.host].facts
        if facts is None:
            return
        question = {"target": vouch.host, "addresses": list(candidates(facts)), "port": facts.beacon_port}
        self._links[vouch.voucher].send({"type": "vouch", "key": self._beacon_keys[vouch.host], **question})

    def close(self) -> None:
        """Tell the agents that the driver leaves, and give them up."""
        # First to all hosts, then wait for each: the agents end at the same time.
        for link in self:
            link.session.leave()
        for link in self:
            link.close()
        if self._results is not None:
            self._results.close()

    def add(self, host: Host) -> HostLink:
        """Make a link for the caller to open."""
        number, self._opened = self._opened, self._opened + 1
        # The beacon of a single host is never asked: skip the library for its key, which takes 3 ms.
        self._beacon_keys[host.name] = self._keys.beacons if self._is_alone else self._keys.beacon(number)
        opening = Opening(
            connect=self._connect,
            program=self._program,
            hello=partial(self._hello, host, number),
            relay=partial(self._relay, host),
            window=self._window(),
            spill=self._spec.spill,
            reconnect=min(self._spec.reconnect_timeout, self._spec.lease),
            number=number,
            call=self._call,
            results=self._results,
            frame_record=None if self._record is None else self._record.frames(number),
            prepare=self._prepare,
            links=lambda: list(self._links.values()),
        )

        def post(event: on.Event | Arrival) -> None:
            # Drop events of an earlier link to the host, and of a link that was given up.
            if self._links.get(host.name) is link and not link.is_closed:
                self._post(event)

        rank_of, born = (
            partial(self._ranks.rank_of, host.name),
            partial(self._ranks.first_round_of, host.name),
        )
        link = HostLink(host, opening, post, self._printer, rank_of, born, self._clock)
        link.no_preload = partial(self._tell_no_preload, host.name)
        link.vouched = lambda target: self.vouched(host.name, target)
        self._links[host.name] = link
        return link

    def _tell_no_preload(self, host: str, cause: str) -> None:
        """Tell why a host does without --preload, once for all hosts with this cause."""
        if cause not in self._no_preload_causes:
            self._no_preload_causes.add(cause)
            self._say(
                f"host {host}: --preload has no effect from now on, and workers start as usual: {cause}"
            )

    def _window(self) -> int:
        # The driver's memory is shared by all hosts; a small window still holds many lines.
        least, most = _WINDOW_RANGE
        return max(least, min(most, _OUTPUT_IN_FLIGHT // max(1, len(self._spec.hosts))))

    @property
    def _is_alone(self) -> bool:
        """True if the job has one host and will never have another."""
        return self._spec.elastic is None and len(self._spec.hosts) == 1

    def _hello(self, host: Host, number: int, connection: AgentConnection) -> Mapping[str, Any]:
        # A job on this machine alone has no connection to lose, unless the driver is replaced.
        is_needed = not self._is_alone or connection.remote_address is not None or self._record is not None
        has_session = connection.can_rejoin and is_needed
        templates = self._spec.templates
        more_ports = len(templates.ports) if templates is not None else 0
        if self._spec.roles:
            from hvlaunch.hosts.roles import ports_by_host  # noqa: PLC0415 (few jobs have roles)

            more_ports = ports_by_host(self._spec.roles)[host.name]
        return {
            "type": "hello",
            "protocol": PROTOCOL,
            "name": host.name,
            "key": self._beacon_keys[host.name],
            "known_as": connection.remote_address or None,
            # The directory of a copy is known only when the copy is there.
            "cwd": self._spec.cwd if self._spec.sync is None else "/",
            "gpus": (host.slots is None and self._spec.slots_per_host is None)
            or (templates is not None and templates.counts_gpus and host.name not in templates.slots),
            "ports": self._spec.worker_ports,
            **({"more_ports": more_ports} if more_ports else {}),
            "elastic": None if self._spec.elastic is None else self._spec.elastic.suspension,
            "processes": connection.processes,
            "rendezvous": self._rendezvous_candidates(connection),
            "session": self._keys.session(number) if has_session else None,
            **({} if self._python is None else {"python": self._python}),
        }

    def _rendezvous_candidates(self, connection: AgentConnection) -> Mapping[str, Any] | None:
        """Return the addresses at which a host may reach the rendezvous; None for this machine itself."""
        if connection.local_address is None:
            return None
        if connection.remote_address is not None:
            self._rendezvous.expect([connection.remote_address.partition("%")[0]])
        addresses = [] if self._spec.relay == "always" else self._addresses_for(connection.local_address)
        for address in addresses:
            self._rendezvous.listen_at(address)
        return {
            "candidates": [(address, self._rendezvous.port) for address in addresses],
            "key": self._keys.probe_key,
            "relay": self._spec.relay,
        }

    def _addresses_for(self, used: str) -> list[str]:
        """Return the driver's addresses for a host whose connection uses address `used`, or the user's choice."""
        chosen = self._spec.rendezvous_bind
        if chosen is None or chosen in EVERYWHERE:
            addresses = _own_addresses(used)
        else:
            # Without an address, as for a loopback, agents relay.
            addresses = [chosen] if is_usable(chosen) else []
        if self._spec.horovod:
            # Horovod's client speaks IPv4 only. Without an IPv4 address, agents relay.
            addresses = [address for address in addresses if ":" not in address]
        return addresses

    def _relay(self, host: Host, send: Callable[[Mapping[str, Any], bytes], None]) -> "HostRelay":
        from hvlaunch.driver.links.relay import HostRelay  # noqa: PLC0415 (it needs asyncio, which few jobs do)

        return HostRelay(host.name, self._rendezvous, send)


def workers_python(spec: JobSpec) -> str | None:
    """Return the Python whose packages hosts look at; None for commands without one, and for jobs that have all files here."""
    first, *others = spec.command
    if only_local(spec) and spec.sync is None and spec.container is None:
        return None
    if "python" in PurePath(first).name:
        return first
    # A script, or a program that starts Python, such as torchrun.
    return "python3" if any(word.endswith((".py", ".sh")) for word in (first, *others)) else None


def _container(spec: JobSpec) -> dict[str, Any] | None:
    """Return the options of agent/container.py."""
    if spec.container is None:
        return None
    sync = spec.sync
    return {
        **spec.container._asdict(),
        "cwd": spec.cwd if sync is None else None,
        "to": None if sync is None else sync.to,
        "is_bound": spec.is_bound,
    }


def _call_files(call: Call) -> "tuple[Sequence[bytes], ResultFiles]":
    from hvlaunch.driver.worker_files import ResultFiles, parts_of  # noqa: PLC0415 (few jobs call a function)

    return parts_of(call.program), ResultFiles(call.results)


def pack_sync() -> None:
    """Make the program that brings the project to near hosts, for the first of them."""
    from hvlaunch.driver.links.errands import errand_program  # noqa: PLC0415 (not for a local job)

    errand_program("sync", is_near=True)


def _own_addresses(used: str) -> list[str]:
    """Return the driver's usable addresses, `used` first if known: SSH got through there."""
    usable = filter(is_usable, own_addresses())
    return list(dict.fromkeys([used, *usable] if used else usable))


class Heartbeat:
    """Pings the agents, and gives up hosts after a silence as long as the lease. For the loop's thread.

    `can_be_replaced` returns True if another driver could take the job over: agents then wait longer. The function is called at
    each ping.
    """

    def __init__(
        self,
        spec: JobSpec,
        links: HostLinks,
        post: Callable[[on.Event], None],
        clock: Callable[[], float],
        can_be_replaced: Callable[[], bool],
    ) -> None:
        self._spec = spec
        self._links = links
        self._post = post
        self._clock = clock
        self._can_be_replaced = can_be_replaced
        first = clock() + _FIRST_PING
        pulse, suspect_after = inf, 0.0
        if spec.elastic is not None:
            pulse = spec.elastic.worker_timeout / _PULSES_PER_WORKER_TIMEOUT
            suspect_after = spec.elastic.suspect_after
        self._suspicion: Suspicion | None = None
        if suspect_after:
            from hvlaunch.driver.links import suspicion  # noqa: PLC0415 (only elastic jobs suspect hosts)

            self._suspicion = suspicion.Suspicion(suspect_after, first)
            pulse = min(pulse, self._suspicion.pulse)
            links.vouched = self._note_vouch
        self._lease = Lease(spec.lease, first, pulse=pulse)
        self._quiet: set[str] = set()
        """Quiet hosts, as posted to the engine."""
        self._suspected: dict[str, int] = {}
        """Suspected hosts, as posted to the engine, with the numbers of their links."""
        self._numbers: dict[str, int] = {}
        """Numbers of the links that suspicion knows."""

    @property
    def deadline(self) -> float:
        """The time of the next beat()."""
        return min(self._lease.deadline, inf if self._suspicion is None else self._suspicion.deadline)

    def beat(self) -> None:
        """Ping the agents if a ping is due, and post the silent hosts."""
        now, due = self._clock(), self.deadline
        if now < due:
            return
        links = {link.host.name: link for link in self._links if not (link.is_closed or link.has_parted)}
        heard = {name: link.last_heard for name, link in links.items() if link.last_heard is not None}

        def acknowledged(name: str) -> float | None:
            silence = links[name].session.silence()
            return None if silence is None else self._clock() - silence

        is_due, silent = self._lease.check(heard, acknowledged, now)
        for name in silent:
            cause = f"lost: silent for {self._spec.lease:g} s (--lease)"
            hint = f"ping {name}: the host is down, or the network is cut"
            self._post(on.HostGone(name, HostLost(cause, host=name, hint=hint).problem))
            links[name].close()
        self._post_quiet()
        if self._suspicion is not None:
            others = {name: link for name, link in links.items() if name in heard and name not in silent}
            self._suspect(self._suspicion, others, heard, acknowledged, now, due)
        if is_due:
            patience = None if self._can_be_replaced() else patience_alone(self._spec)
            for name in heard.keys() - silent:
                links[name].session.ping(patience)
            for link in self._links:
                link.let_go()
            for name in set(self._lease.doubtful) - set(silent):
                links[name].session.renew()

    def _suspect(
        self,
        suspicion: "Suspicion",
        links: Mapping[str, HostLink],
        heard: Mapping[str, float],
        acknowledged: Callable[[str], float | None],
        now: float,
        due: float,
    ) -> None:
        """Post the suspected hosts, and ask vouchers about silent hosts."""
        for name, link in links.items():
            # Proofs of the first link may be older.
            if self._numbers.setdefault(name, link.number) != link.number:
                self._numbers[name] = link.number
                suspicion.forget(name)
        silent = {name: since for name, since in self._lease.silent.items() if name in links}
        requests, suspected = suspicion.check(silent, heard, acknowledged, now, due)
        # Without an earlier answer, a dead host looks like a firewall.
        proving = suspicion.to_prove([name for name in links if name not in self._quiet], now)
        for vouch in (*requests, *proving):
            self._links.ask_to_vouch(vouch)
        for name in suspected:
            if name in self._quiet and self._suspected.get(name) != links[name].number:
                self._suspected[name] = links[name].number
                self._post(on.HostSuspected(name, suspicion.seconds))
        for name in self._suspected.keys() - self._quiet:
            del self._suspected[name]

    def _note_vouch(self, voucher: str, host: str) -> None:
        if self._suspicion is not None:
            self._suspicion.vouched(voucher, host, self._clock())

    def _post_quiet(self) -> None:
        """Post the hosts that have become quiet or answer again: the state of a quiet host's workers is unknown."""
        quiet = self._lease.quiet
        for name in sorted(quiet ^ self._quiet):
            self._post(on.HostQuiet(name) if name in quiet else on.HostAnswers(name))
        self._quiet = quiet
