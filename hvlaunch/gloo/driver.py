"""The loop: events off one queue, into the engine, and what it wants carried out."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, BinaryIO

from hvlaunch.agent.frames import PROTOCOL
from hvlaunch.console.files import OutputFiles
from hvlaunch.console.printer import Printer
from hvlaunch.errors import HostLost
from hvlaunch.gloo import actions as do
from hvlaunch.gloo import events as on
from hvlaunch.gloo.bundle import agent_command, bundle, local_agent_command, python_candidates
from hvlaunch.gloo.engine import Engine
from hvlaunch.gloo.link import HostLink, Opening
from hvlaunch.gloo.narrator import Narrator
from hvlaunch.gloo.network import is_usable
from hvlaunch.gloo.signals import signals_as_events
from hvlaunch.gloo.start_frame import gets_stdin, start_frame
from hvlaunch.gloo.stdin import StdinPump
from hvlaunch.hosts.local import is_local
from hvlaunch.job import Host, JobResult, JobSpec
from hvlaunch.rendezvous.server import RendezvousServer
from hvlaunch.ssh.connection import Connection
from hvlaunch.ssh.ways import Ways

__all__ = ["Driver", "Keys", "run"]

_OUTPUT_IN_FLIGHT = 64 << 20
_WINDOW_RANGE = (256 << 10, 4 << 20)
_LONGEST_PULSE = 5.0
_PULSES_PER_LEASE = 4


def _random_word(size: int) -> str:
    """`size` random bytes in hexadecimal; what the secrets module does, without its imports (10 ms)."""
    return os.urandom(size).hex()


def run(spec: JobSpec, *, stdout: BinaryIO, stderr: BinaryIO, stdin: int = 0) -> JobResult:
    """Run a job: workers' output to stdout and stderr, the failure report last of all.

    `stdin` is a file descriptor. Must be called in the main thread for signals to reach the workers.
    Raises HvlaunchError for what is wrong with the job itself, before anything is started.
    """
    events: SimpleQueue[on.Event] = SimpleQueue()
    broken = on.Interrupted(signal.SIGPIPE)
    printer = Printer(stdout, stderr, options=spec.console, on_broken=lambda: events.put(broken))
    keys = Keys(token=_random_word(32), probe_token=_random_word(16), nonce=_random_word(16))
    server = RendezvousServer(keys.token, keys.probe_token, keys.nonce)
    try:
        with (
            _journal(spec, printer.say) as record,
            server,
            signals_as_events(events.put),
            closing(Ways(spec.ssh, timeout=spec.start_timeout)) as ways,
        ):
            connect = partial(connect_to, ways)
            driver = Driver(spec, events, printer, server.port, keys, connect, stdin=stdin, record=record)
            result = driver.run()
        if result.exit_code != 0:
            from hvlaunch.console.report import failure_report  # noqa: PLC0415 (15 ms, and hopefully never)

            tails = {end.rank: printer.tail(end.rank) for end in result.exits}
            printer.show(failure_report(result, tails, len(driver.places), output_dir=spec.output_dir))
    finally:
        printer.close()
    return result


@contextmanager
def _journal(
    spec: JobSpec, say: Callable[[str], None]
) -> Iterator[Callable[[Mapping[str, object]], None] | None]:
    """What takes records for --events. Raises BadUsage."""
    if spec.events is None:
        yield None
        return
    from hvlaunch.console.journal import Journal  # noqa: PLC0415 (few jobs have one)

    with closing(Journal(spec.events, say)) as journal:
        yield journal.write


def connect_to(ways: Ways, host: Host) -> Connection:
    """A way to the host: pipes where it is this machine itself, else SSH. What is not used is not imported.

    Raises HostError.
    """
    if is_local(host):
        from hvlaunch.ssh.local import connect_local  # noqa: PLC0415 (see the docstring)

        return connect_local(host)
    return ways.connect(host)


@dataclass(frozen=True, slots=True)
class Keys:
    """A job's secrets: `token` opens the rendezvous, `probe_token` only tells its `nonce`."""

    token: str = field(repr=False)
    probe_token: str = field(repr=False)
    nonce: str


class Driver:
    """Runs one job with the engine, the links to the hosts, and a console. `connect` makes connections."""

    def __init__(
        self,
        spec: JobSpec,
        events: SimpleQueue[on.Event],
        printer: Printer,
        rendezvous_port: int,
        keys: Keys,
        connect: Callable[[Host], Connection],
        *,
        stdin: int,
        record: Callable[[Mapping[str, object]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._events = events
        self._printer = printer
        self._rendezvous_port = rendezvous_port
        self._keys = keys
        self._connect = connect
        self._stdin = stdin
        self._clock = clock
        self._job_id = _random_word(6)
        self._engine = Engine(spec, rendezvous_port)
        self._watchers = [Narrator(spec, printer.say, printer.status).see]
        if record is not None:
            from hvlaunch.gloo.recorder import Recorder  # noqa: PLC0415 (as the journal)

            self._watchers.append(Recorder(spec, self._job_id, record).see)
        self._links: dict[str, HostLink] = {}
        self._nonces: dict[str, str] = {}
        self._starts: list[do.Start] = []
        self._pulse = min(_LONGEST_PULSE, spec.lease / _PULSES_PER_LEASE)
        self._next_pulse = self._awake_since = clock()
        self._result: JobResult | None = None
        self._bundling = Lock()
        self._bundle = b""

    def _window(self) -> int:
        least, most = _WINDOW_RANGE
        return max(least, min(most, _OUTPUT_IN_FLIGHT // len(self._spec.hosts)))

    @property
    def places(self) -> list[Any]:
        """All workers' places, once they were started."""
        return [place for start in self._starts for place in start.places]

    def run(self) -> JobResult:
        """Take events until the engine has finished. Leaves no connection open, whatever happens."""
        try:
            self._handle(on.Began())
            while self._result is None:
                self._handle(self._next_event())
                self._keep_alive()
        finally:
            for link in self._links.values():
                link.close()
        return self._result

    def _next_event(self) -> on.Event:
        deadline = self._next_pulse
        if self._engine.deadline is not None:
            deadline = min(deadline, self._engine.deadline)
        try:
            return self._events.get(timeout=max(0.0, deadline - self._clock()))
        except Empty:
            return on.Tick()

    def _handle(self, event: on.Event) -> None:
        now = self._clock()
        actions = self._engine.handle(event, now)
        for watch in self._watchers:
            watch(event, actions, now)
        for action in actions:
            self._carry_out(action)
        if any(isinstance(action, do.Start) for action in actions):
            self._feed_stdin()

    def _keep_alive(self) -> None:
        """Let the agents hear from us, and give up those that are silent for the lease."""
        now = self._clock()
        if now < self._next_pulse:
            return
        if now > self._next_pulse + self._pulse:
            self._awake_since = now  # we were stopped ourselves: what the hosts sent is still to be read
        self._next_pulse = now + self._pulse
        for name, link in self._links.items():
            if link.last_heard is None:
                continue
            if now - max(link.last_heard, self._awake_since) > self._spec.lease:
                cause = f"lost: silent for {self._spec.lease:g} s (--lease)"
                hint = f"ping {name}: the host is down, or the network is cut"
                self._events.put(on.HostGone(name, HostLost(cause, host=name, hint=hint)))
                link.close()
            else:
                link.send({"type": "ping"})

    def _carry_out(self, action: do.Action) -> None:
        match action:
            case do.Connect(host):
                self._open(host)
            case do.Probe(host, target, addresses, port):
                where = {"target": target, "addresses": addresses, "port": port}
                self._links[host].send({"type": "probe", **where, "nonce": self._nonces[target]})
            case do.Start():
                self._start(action)
            case do.Signal(host, number):
                self._links[host].send({"type": "signal", "slots": None, "signal": number})
            case do.Stop(host, steps):
                orders = [(step.signal, step.after) for step in steps]
                self._links[host].send({"type": "stop", "slots": None, "steps": orders})
            case do.Release(host):
                self._links[host].send({"type": "bye"})
            case do.Abandon(host):
                self._links[host].close()
            case do.Say():
                pass  # the narrator does
            case do.Finish(result):
                self._result = result

    def _open(self, host: Host) -> None:
        self._nonces[host.name] = _random_word(16)
        opening = Opening(
            connect=self._connect,
            agent=partial(self._agent, host),
            hello=partial(self._hello, host),
            window=self._window(),
        )
        link = HostLink(host, opening, self._events.put, self._printer, self._clock)
        self._links[host.name] = link
        link.open()

    def _agent(self, host: Host, connection: Connection) -> tuple[str, bytes]:
        """The command that starts the host's agent, and what it reads first."""
        config = {"lease": self._spec.lease, "grace": self._spec.grace, "window": self._window()}
        chosen = host.python or self._spec.remote_python
        if connection.remote_address is None and chosen is None:
            return local_agent_command(config), b""
        with self._bundling:
            self._bundle = self._bundle or bundle(config)
        return agent_command(python_candidates(chosen), len(self._bundle)), self._bundle

    def _hello(self, host: Host, connection: Connection) -> Mapping[str, Any]:
        return {
            "type": "hello",
            "protocol": PROTOCOL,
            "nonce": self._nonces[host.name],
            "cwd": self._spec.cwd,
            "gpus": host.slots is None and self._spec.slots_per_host is None,
            "rendezvous": self._rendezvous_candidates(connection),
        }

    def _rendezvous_candidates(self, connection: Connection) -> Mapping[str, Any] | None:
        """Where a host may reach the rendezvous; nothing needs to be found out on this machine itself."""
        if connection.local_address is None:
            return None
        return {
            "candidates": [
                (address, self._rendezvous_port) for address in _own_addresses(connection.local_address)
            ],
            "token": self._keys.probe_token,
            "nonce": self._keys.nonce,
        }

    def _start(self, start: do.Start) -> None:
        if self._spec.output_dir is not None and not self._starts:
            self._printer.keep(OutputFiles(self._spec.output_dir, start.places[0].size))
        self._starts.append(start)
        self._printer.place({place.rank: (place.host, place.local_rank) for place in start.places})
        link = self._links[start.host]
        link.ranks = {place.local_rank: place.rank for place in start.places}
        link.send(*start_frame(start, self._spec, job_id=self._job_id, token=self._keys.token))

    def _feed_stdin(self) -> None:
        """Pass stdin on to the workers that get it."""
        readers = [
            (self._links[start.host], place.local_rank)
            for start in self._starts
            for place in start.places
            if gets_stdin(place, self._spec)
        ]
        if not readers:
            return

        def sender(link: HostLink, slot: int) -> Callable[[bytes], None]:
            return lambda data: link.send({"type": "stdin", "slot": slot}, data)

        pump = StdinPump(self._stdin, [sender(link, slot) for link, slot in readers])
        index = {(link.host.name, slot): number for number, (link, slot) in enumerate(readers)}
        for link, _ in readers:
            name = link.host.name
            link.stdin_taken = lambda slot, size, name=name: pump.taken(index[name, slot], size)  # type: ignore[misc]
        pump.start()


def _own_addresses(used: str) -> list[str]:
    """The driver's addresses, as a host may reach them; the one that SSH uses first, if that is known."""
    import psutil  # noqa: PLC0415 (only a remote host needs it)

    families = ("AF_INET", "AF_INET6")
    listed = [
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if getattr(entry.family, "name", "") in families
    ]
    usable = filter(is_usable, listed)
    return list(dict.fromkeys([used, *usable] if used else usable))
