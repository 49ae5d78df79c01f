"""The loop: events off one queue, into the engine, and what it wants carried out."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

from hvlaunch.agent.frames import PROTOCOL
from hvlaunch.console.printer import Printer
from hvlaunch.errors import BadUsage, HostLost
from hvlaunch.gloo.driver.agent_channel import AgentConnection
from hvlaunch.gloo.driver.agent_program import AgentProgram
from hvlaunch.gloo.driver.arrival import Arrival, Turn
from hvlaunch.gloo.driver.host_link import HostLink, Opening
from hvlaunch.gloo.driver.inquiry import Inquiry
from hvlaunch.gloo.driver.keys import Keys
from hvlaunch.gloo.driver.lease import Lease, agents_lease
from hvlaunch.gloo.driver.ranks import Ranks
from hvlaunch.gloo.driver.start_frame import gets_stdin, start_frame
from hvlaunch.gloo.driver.stdin import StdinPump
from hvlaunch.gloo.engine import actions as do
from hvlaunch.gloo.engine import events as on
from hvlaunch.gloo.engine.engine import Engine
from hvlaunch.gloo.engine.network import is_usable
from hvlaunch.gloo.watch.narrator import Narrator
from hvlaunch.gloo.watch.overview import overview
from hvlaunch.hosts.local import own_addresses
from hvlaunch.job import ElasticOptions, Host, JobResult, JobSpec
from hvlaunch.rendezvous.serving.listeners import EVERYWHERE
from hvlaunch.rendezvous.serving.server import RendezvousServer

if TYPE_CHECKING:
    from hvlaunch.console.job_folder import JobFolder
    from hvlaunch.gloo.driver.keeping import Keeping
    from hvlaunch.gloo.driver.relay import HostRelay
    from hvlaunch.gloo.driver.worker_messages import WorkerMessages
    from hvlaunch.hosts.discovery import Discovery, Source

__all__ = ["Driver", "Item", "Watcher"]

Item: TypeAlias = on.Event | Arrival | Inquiry
"""What comes by the driver's queue."""

Watcher: TypeAlias = "Callable[[on.Event, Sequence[do.Action], float], None]"
"""Sees each event, what the engine made of it before that is carried out, and the time."""

_OUTPUT_IN_FLIGHT = 64 << 20
_PULSES_PER_WORKER_TIMEOUT = 8
"""So it is known of a silent host before one of its workers has been silent for too long."""
_MOST_AT_ONCE = 256
_SECRETS = ("key", "session")
_WINDOW_RANGE = (256 << 10, 4 << 20)


class Driver:
    """Runs one job with the engine, the links to the hosts, and a console. `connect` makes connections.

    `record` takes records for --events; `watchers` see all before anybody else does; `keeping` keeps what another
    driver needs to take the job over.
    """

    def __init__(
        self,
        spec: JobSpec,
        events: SimpleQueue[Item],
        printer: Printer,
        rendezvous: RendezvousServer,
        keys: Keys,
        connect: Callable[[Host], AgentConnection],
        *,
        stdin: int,
        record: Callable[[Mapping[str, object]], None] | None = None,
        watchers: Sequence[Watcher] = (),
        keeping: "Keeping | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._events = events
        self._printer = printer
        self._rendezvous = rendezvous
        self._keys = keys
        self._connect = connect
        self._stdin = stdin
        self._clock = clock
        self._keeping = keeping
        self._engine = Engine(spec, rendezvous.port)
        self._ranks = Ranks()
        self._watchers = [*watchers, Narrator(spec, printer.say, printer.status, clock).see]
        if record is not None:
            from hvlaunch.gloo.watch.recorder import Recorder  # noqa: PLC0415 (few jobs have one)

            self._watchers.append(Recorder(spec, keys.job_id, record, self._ranks.of).see)
        self._worker_messages = (
            None if spec.elastic is None else _worker_messages(rendezvous, events.put, self._ranks)
        )
        self._discovery = None if spec.elastic is None else _discovery(spec.elastic, events.put)
        self._links: dict[str, HostLink] = {}
        self._beacon_keys: dict[str, str] = {}
        self._opened = 0
        """How many connections to hosts there have been."""
        self._stdin_pump: StdinPump | None = None
        self._readers: list[tuple[HostLink, int, int]] = []
        """The workers that read our stdin: link, slot and rank."""
        self._job_folder: JobFolder | None = None
        self._files_of: int | None = None
        self.output_dir: Path | None = None
        """Where the output of the last round is kept, if it is."""
        self.size = 0
        """How many workers the last round had."""
        pulse = inf if spec.elastic is None else spec.elastic.worker_timeout / _PULSES_PER_WORKER_TIMEOUT
        self._lease = Lease(spec.lease, clock(), pulse=pulse)
        self._quiet: set[str] = set()
        """Hosts that the engine knows to be."""
        self._result: JobResult | None = None
        config = {
            "lease": agents_lease(spec.lease),
            "grace": spec.grace,
            "window": self._window(),
            "reconnect": spec.reconnect_timeout,
            "spill": spec.spill,
        }
        own_pythons = frozenset(host.python for host in spec.hosts if host.python is not None)
        self._program = AgentProgram(config, spec.remote_python, own_pythons)

    def _window(self) -> int:
        least, most = _WINDOW_RANGE
        return max(least, min(most, _OUTPUT_IN_FLIGHT // max(1, len(self._spec.hosts))))

    def run(self) -> JobResult:
        """Take events until the engine has finished. Leaves no connection open, whatever happens."""
        try:
            if self._worker_messages is not None:
                self._worker_messages.open()
            began = self._decide([on.Began()])
            self._carry_out_all(began)
            if self._keeping is not None:
                self._keeping.begin(self._spec, self._keys, self._rendezvous.port)
                self._keep(began)
            if self._discovery is not None:
                self._discovery.start()
            while self._result is None:
                turns = self._decide(self._next_items())
                self._keep(turns)
                self._carry_out_all(turns)
                self._keep_alive()
        finally:
            if self._discovery is not None:
                self._discovery.stop()
            for link in self._links.values():
                link.leave()
            for link in self._links.values():
                link.close()
            if self._job_folder is not None:
                self._job_folder.close()
        return self._result

    def _next_items(self) -> list[Item]:
        """What waits in the queue, at least one thing."""
        deadline = self._lease.deadline
        if self._engine.deadline is not None:
            deadline = min(deadline, self._engine.deadline)
        items: list[Item] = []
        with suppress(Empty):
            items.append(self._events.get(timeout=max(0.0, deadline - self._clock())))
            while len(items) < _MOST_AT_ONCE:
                items.append(self._events.get_nowait())
        return items or [on.Tick()]

    def _decide(self, items: Sequence[Item]) -> list[Turn]:
        """What the engine makes of these, one after the other."""
        turns: list[Turn] = []
        for item in items:
            if isinstance(item, Inquiry):
                item.answer(overview(self._engine, self._clock()))
                continue
            arrival = item if isinstance(item, Arrival) else Arrival(item)
            if isinstance(arrival.event, on.WorkerAlone) and self._rendezvous.was_asked:
                _settle(arrival)
                continue
            turns.append(self._take_turn(arrival))
            if any(isinstance(action, do.Finish) for action in turns[-1].actions):
                break
        return turns

    def _take_turn(self, arrival: Arrival) -> Turn:
        now = self._clock()
        actions = self._engine.handle_or_end(arrival.event, now)
        places = [launch.place for launch in self._ranks.see(actions)]
        if places:
            self._printer.place({place.rank: (place.host, place.local_rank) for place in places})
        for watch in self._watchers:
            watch(arrival.event, actions, now)
        return Turn(now, arrival, actions)

    def _keep(self, turns: Sequence[Turn]) -> None:
        """Put them on record before anything follows of them. What they were made of need not be said again."""
        if self._keeping is None:
            return
        ready = [turn.arrival.event.host for turn in turns if isinstance(turn.arrival.event, on.HostReady)]
        links = [self._links[name] for name in ready]
        self._keeping.write(turns, {link.number: _without_secrets(link.hello) for link in links})
        for turn in turns:
            _settle(turn.arrival)

    def _carry_out_all(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            starts = [action for action in turn.actions if isinstance(action, do.Start)]
            if starts and self._spec.horovod:
                self._open_to_horovod(starts)
            for action in turn.actions:
                self._carry_out(action)
            if starts and self._readers:
                self._feed_stdin()

    def _keep_alive(self) -> None:
        """Let the agents hear from us, and give up those that are silent for the lease."""
        now = self._clock()
        if now < self._lease.deadline:
            return
        links = {name: link for name, link in self._links.items() if not (link.is_closed or link.has_parted)}
        heard = {name: link.last_heard for name, link in links.items() if link.last_heard is not None}
        is_due, silent = self._lease.look(heard, lambda name: links[name].last_acknowledged, now)
        for name in silent:
            cause = f"lost: silent for {self._spec.lease:g} s (--lease)"
            hint = f"ping {name}: the host is down, or the network is cut"
            self._events.put(on.HostGone(name, HostLost(cause, host=name, hint=hint).problem))
            links[name].close()
        self._tell_quiet()
        if is_due:
            for name in heard.keys() - silent:
                links[name].ping()
            for name in set(self._lease.doubtful) - set(silent):
                links[name].renew()

    def _tell_quiet(self) -> None:
        """Let the engine of an elastic job know of whom it can't hear that their workers live."""
        quiet = self._lease.quiet if self._spec.elastic is not None else set()
        for name in sorted(quiet ^ self._quiet):
            self._events.put(on.HostQuiet(name) if name in quiet else on.HostAnswers(name))
        self._quiet = quiet

    def _carry_out(self, action: do.Action) -> None:
        match action:
            case do.Connect(host):
                self._open(host)
            case do.Probe(host, target, addresses, port):
                where = {"target": target, "addresses": addresses, "port": port}
                self._links[host].send({"type": "probe", **where, "key": self._beacon_keys[target]})
            case do.Start():
                self._start(action)
            case do.Signal(host, number):
                self._links[host].send({"type": "signal", "slots": None, "signal": number})
            case do.Stop(host, steps, slots):
                orders = [(step.signal, step.after) for step in steps]
                self._links[host].send({"type": "stop", "slots": slots, "steps": orders})
            case do.Release(host):
                self._links[host].send({"type": "bye"})
            case do.Abandon(host):
                if host in self._links:  # where the engine ended for a defect, it may not have come to that
                    self._links[host].close()
            case do.Assign() | do.Leave() | do.Break() | do.Change():
                self._tell(action)
            case do.GiveInput():
                if self._stdin_pump is not None:
                    self._stdin_pump.go_on()
            case do.Finish(result):
                self._result = result
            case _:
                pass  # facts and group states are for those who look on

    def _open(self, host: Host) -> None:
        number, self._opened = self._opened, self._opened + 1
        # Nobody asks its beacon where it is alone: the library for such keys takes 3 ms.
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
            seen=None if self._keeping is None else self._keeping.seen(number),
        )

        def post(event: on.Event | Arrival) -> None:
            # Else it is news of an earlier connection, or of one that we have given up.
            if self._links.get(host.name) is link and not link.is_closed:
                self._events.put(event)

        rank_of, born = partial(self._ranks.of, host.name), partial(self._ranks.born, host.name)
        link = HostLink(host, opening, post, self._printer, rank_of, born, self._clock)
        self._links[host.name] = link
        link.open()

    @property
    def _is_alone(self) -> bool:
        """Whether the job has one host, and there will be no other."""
        return self._spec.elastic is None and len(self._spec.hosts) == 1

    def _hello(self, host: Host, number: int, connection: AgentConnection) -> Mapping[str, Any]:
        # On this machine alone nothing breaks but the driver.
        is_needed = not self._is_alone or connection.remote_address is not None or self._keeping is not None
        has_session = connection.can_rejoin and is_needed
        return {
            "type": "hello",
            "protocol": PROTOCOL,
            "name": host.name,
            "key": self._beacon_keys[host.name],
            "known_as": connection.remote_address or None,
            "cwd": self._spec.cwd,
            "gpus": host.slots is None and self._spec.slots_per_host is None,
            "ports": self._spec.worker_ports,
            "elastic": None if self._spec.elastic is None else self._spec.elastic.worker_timeout,
            "processes": connection.processes,
            "rendezvous": self._rendezvous_candidates(connection),
            "session": self._keys.session(number) if has_session else None,
        }

    def _rendezvous_candidates(self, connection: AgentConnection) -> Mapping[str, Any] | None:
        """Where a host may reach the rendezvous; nothing needs to be found out on this machine itself."""
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
        """Ours, as a host may reach them that comes by `used`; the one that the user chose, if any."""
        chosen = self._spec.rendezvous_bind
        if chosen is None or chosen in EVERYWHERE:
            addresses = _own_addresses(used)
        else:
            addresses = [chosen] if is_usable(chosen) else []  # where it is a loopback, agents relay
        if self._spec.horovod:
            # Its client knows IPv4 alone; where that leads nowhere, agents relay.
            addresses = [address for address in addresses if ":" not in address]
        return addresses

    def _relay(self, host: Host, send: Callable[[Mapping[str, Any], bytes], None]) -> "HostRelay":
        from hvlaunch.gloo.driver.relay import HostRelay  # noqa: PLC0415 (it needs asyncio, which few jobs do)

        return HostRelay(host.name, self._rendezvous, send)

    def _open_to_horovod(self, starts: Sequence[do.Start]) -> None:
        from hvlaunch.gloo.driver import horovod  # noqa: PLC0415 (few jobs have such workers)

        places = [launch.place for start in starts for launch in start.launches]
        self._rendezvous.open_to_horovod(horovod.scopes(places), horovod.addresses(starts))

    def _start(self, start: do.Start) -> None:
        self._keep_files(start.round, start.launches[0].place.size)
        self._rendezvous.expect([address for own in start.facts.addresses.values() for address in own])
        link = self._links[start.host]
        for launch in start.launches:
            if self._stdin_pump is None and gets_stdin(launch.place, self._spec):
                self._readers.append((link, launch.slot, launch.place.rank))
        link.send(*start_frame(start, self._spec, job_id=self._keys.job_id, keys=self._keys))

    def _tell(self, action: do.Assign | do.Leave | do.Break | do.Change) -> None:
        """Pass on what is for workers that ask for their places."""
        if isinstance(action, do.Assign):
            self._keep_files(action.round, action.launch.place.size)
        if self._worker_messages is not None:
            self._worker_messages.carry_out(action)

    def _keep_files(self, number: int, size: int) -> None:
        """From here on output goes to files of this round. Raises BadUsage where those of the first can't be made."""
        self.size = size
        number = number if self._spec.elastic is not None else 0  # its second try goes on in the same files
        if self._spec.output_dir is None or self._files_of == number:
            return
        try:
            if self._job_folder is None:
                self._job_folder = _job_folder(self._spec.output_dir, self._keys.job_id)
            below = "" if self._spec.elastic is None else f"round.{number}"
            self._printer.keep(self._job_folder.files(size, below))
            self.output_dir = self._job_folder.path / below
        except BadUsage as error:
            if self._files_of is None:
                raise
            self._printer.say(str(error))
        self._files_of = number

    def _feed_stdin(self) -> None:
        """Pass stdin on to the workers that get it; those of a second try have the slots of the first."""
        readers = self._readers
        if self._stdin_pump is not None:
            self._stdin_pump.begin_again()
            return

        def sender(link: HostLink, slot: int) -> Callable[[bytes], None]:
            return lambda data: link.send({"type": "stdin", "slot": slot}, data)

        if os.isatty(self._stdin):
            self._printer.read_by([rank for _, _, rank in readers])
        targets = [sender(link, slot) for link, slot, _ in readers]
        pump = StdinPump(
            self._stdin, targets, self._printer.answered, lambda: self._events.put(on.InputRead())
        )
        index = {(link.host.name, slot): number for number, (link, slot, _) in enumerate(readers)}
        for link, _, _ in readers:
            name = link.host.name
            link.stdin_taken = lambda slot, size, name=name: pump.taken(index[name, slot], size)  # type: ignore[misc]
        self._stdin_pump = pump
        pump.start()


def _without_secrets(hello: Mapping[str, Any]) -> dict[str, Any]:
    """What may be known of it to whoever reads the journal."""
    rendezvous = hello["rendezvous"]
    return {
        **hello,
        **dict.fromkeys(_SECRETS),
        "rendezvous": None if rendezvous is None else {**rendezvous, "key": None},
    }


def _settle(arrival: Arrival) -> None:
    """Whoever sent what it was made of need not keep that."""
    if arrival.source is not None:
        arrival.source.settle(arrival.frame)


def _job_folder(directory: Path, job_id: str) -> "JobFolder":
    from hvlaunch.console.job_folder import JobFolder  # noqa: PLC0415 (few jobs have one)

    return JobFolder(directory, job_id)


def _own_addresses(used: str) -> list[str]:
    """The driver's addresses, as a host may reach them; the one that SSH uses first, if that is known."""
    usable = filter(is_usable, own_addresses())
    return list(dict.fromkeys([used, *usable] if used else usable))


def _worker_messages(
    rendezvous: RendezvousServer, post: Callable[[on.Event], None], ranks: Ranks
) -> "WorkerMessages":
    from hvlaunch.gloo.driver.worker_messages import WorkerMessages  # noqa: PLC0415 (only elastic jobs have one)

    return WorkerMessages(rendezvous, post, lambda *worker: ranks.of(*worker) is not None)


def _discovery(options: ElasticOptions, post: Callable[[on.Event], None]) -> "Discovery | None":
    """What finds hosts; None where the pool is what it is."""
    from hvlaunch.hosts.discovery import Discovery, HostFile, HostScript  # noqa: PLC0415 (as those messages)

    if options.discovery_script is not None:
        source: Source = HostScript(options.discovery_script, options.discovery_timeout)
    elif options.hostfile is not None:
        source = HostFile(options.hostfile)
    else:
        return None
    return Discovery(
        source,
        lambda hosts: post(on.HostsDiscovered(tuple(hosts))),
        lambda error: post(on.DiscoveryFailed(error.problem)),
        interval=options.discovery_interval,
    )
