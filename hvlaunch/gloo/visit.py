"""Visits to hosts without a job: a login with the search for a Python, or an agent on each host and work by errands.

A visit has the connections of a job, and neither workers, rounds nor an engine.
"""

import re
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from hvlaunch.agent.wire.probe import Prover
from hvlaunch.console.printer import Printer
from hvlaunch.driver.links.host_ends import never_began
from hvlaunch.driver.links.links import Heartbeat, HostLinks
from hvlaunch.driver.program import Keys, agent_command, python_candidates
from hvlaunch.driver.turn import Arrival
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.hosts import LOOPBACK, no_start
from hvlaunch.errors import HostError, HostFault, HvlaunchError, Problem
from hvlaunch.gloo.controller import by_ssh
from hvlaunch.hosts.local import is_local
from hvlaunch.job import Host, JobSpec, SSHOptions
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.ssh import Connection, Ways, connect_by_agent, connect_local
from hvlaunch.ssh.config import ask_ssh, resolve
from hvlaunch.watch.narrator import Narrator
from hvlaunch.watch.rounds import Ranks

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.engine.events import HostFacts

__all__ = ["HostAnswer", "ask_hosts", "visit_hosts"]

_CLOSING = 25.0
"""Seconds for an agent to end, as in the engine."""


def visit_hosts(
    spec: JobSpec,
    printer: Printer,
    work: "Callable[[HostLink, HostFacts], None]",
    gone: Callable[[str], None] = lambda _name: None,
    *,
    is_long: bool = False,
) -> Mapping[str, Problem]:
    """Do `work` on each host of `spec`, in a thread for each; return the problems of hosts, by name.

    `work` raises HostError. `gone` gets the name of each failed host. `is_long`: no status is shown during the work. Ends with KeyboardInterrupt at once: the agents end with their connections.
    """
    keys = Keys.new()
    with (
        RendezvousServer(
            keys.token,
            certificate=keys.certificate,
            answerer=Prover(keys.probe_key, "rendezvous"),
            host=LOOPBACK,
        ) as server,
        by_ssh(spec, keys, printer.say) as ways,
    ):
        visit = _Visit(spec, printer, work, gone, is_long=is_long)
        visit.links = HostLinks(
            spec,
            keys,
            printer,
            server,
            Ranks(),
            ways.connect,
            visit.events.put,
            clock=time.monotonic,
            record=None,
            prepare=visit.prepare,
        )
        try:
            return visit.run()
        finally:
            visit.links.close()


class _Visit:
    links: HostLinks

    def __init__(
        self,
        spec: JobSpec,
        printer: Printer,
        work: "Callable[[HostLink, HostFacts], None]",
        gone: Callable[[str], None],
        *,
        is_long: bool,
    ) -> None:
        self._gone = gone
        self._is_long = is_long
        self._working: set[str] = set()
        self.events: SimpleQueue[on.Event | Arrival] = SimpleQueue()
        self._spec = spec
        self._work = work
        self._narrator = Narrator(spec, printer.say, printer.status, time.monotonic)
        self._due = {host.name: time.monotonic() + spec.start_timeout for host in spec.hosts}
        """Until when each host has to take its next step."""
        self._connected: set[str] = set()
        self._problems: dict[str, Problem] = {}

    def prepare(
        self,
        link: "HostLink",
        facts: "HostFacts",
        ready: "Callable[[HostFacts], None]",
        failed: Callable[[HostError], None],
    ) -> None:
        """Begin the work on a host; in another thread."""

        def run() -> None:
            try:
                self._work(link, facts)
            except HostError as error:
                failed(error)
            except Exception as error:  # noqa: BLE001 (a defect must not hide the other hosts)
                failed(HostFault(f"internal error: {type(error).__name__}: {error}", host=link.host.name))
            else:
                ready(facts)

        # Its agent answers, and the work has no time limit.
        self._due.pop(link.host.name, None)
        self._working.add(link.host.name)
        threading.Thread(target=run, name=f"visit {link.host.name}", daemon=True).start()

    def run(self) -> Mapping[str, Problem]:
        """Return the problems when no host is left."""
        heartbeat = Heartbeat(self._spec, self.links, self.events.put, time.monotonic, lambda: False)
        self._narrate(on.Began(), [do.Connect(host) for host in self._spec.hosts])
        left = {host.name for host in self._spec.hosts}
        for host in self._spec.hosts:
            self.links.add(host).open()
        while left:
            with suppress(Empty):
                item = self.events.get(timeout=max(0.0, min(heartbeat.deadline - time.monotonic(), 1.0)))
                event = item.event if isinstance(item, Arrival) else item
                self._narrate(event, [])
                left -= self._take(event)
            if self._is_long and left <= self._working:
                self._is_long = False
                self._narrate(on.Tick(), [do.Stop("", ())])
            heartbeat.beat()
            for name in [name for name, due in list(self._due.items()) if time.monotonic() > due]:
                left -= self._give_up(name)
        self._narrate(on.Tick(), [do.Stop("", ())])
        return self._problems

    def _take(self, event: on.Event) -> set[str]:
        """Return the host if the event is its end."""
        match event:
            case on.HostConnected(name):
                self._connected.add(name)
            case on.HostReady(name):
                self._due[name] = time.monotonic() + _CLOSING
                self.links[name].send({"type": "bye"})
            case on.HostFailed(name, problem) | on.HostGone(name, problem):
                return self._drop(name, problem)
            case on.HostClosed(name):
                self._due.pop(name, None)
                return {name}
            case _:
                pass
        return set()

    def _drop(self, name: str, problem: Problem) -> set[str]:
        self._due.pop(name, None)
        self._problems.setdefault(name, problem)
        self.links[name].close()
        self._gone(name)
        return {name}

    def _give_up(self, name: str) -> set[str]:
        link = self.links[name]
        if link.last_heard is None:
            is_connected = name in self._connected
            return self._drop(name, no_start(name, self._spec.start_timeout, is_connected=is_connected))
        # A host with complete work only fails to end.
        self._due.pop(name, None)
        link.close()
        return {name}

    def _narrate(self, event: on.Event, actions: "list[do.Action]") -> None:
        self._narrator.watch(event, actions, time.monotonic())


_LIMIT = 10.0
"""Seconds for the login, and again for the Python."""
_MOST_AT_ONCE = 256
_MARK = "hvlaunch: Python "
_PROGRAM = zlib.compress(f"import sys\nprint('{_MARK}' + sys.version.split()[0], flush=True)\n".encode())
_ANSWER = re.compile(rf"{_MARK}([0-9][0-9A-Za-z.+]*)")
_MOST_BYTES = 1 << 16
_STATUS_WAIT = 2.0


class HostAnswer(NamedTuple):
    """A host's answer, or the problem."""

    host: Host
    is_here: bool
    """True if the host is this machine."""
    seconds: float
    """Time until a command could run."""
    python: str = ""
    problem: Problem | None = None


def ask_hosts(spec: JobSpec) -> list[HostAnswer]:
    """Ask all hosts of a job at once; return their answers in order."""
    asking = ThreadPoolExecutor(min(_MOST_AT_ONCE, max(1, len(spec.hosts))))
    with closing(Ways(spec.ssh, timeout=_LIMIT)) as ways:
        remote: Callable[[Host], Connection] = ways.connect
        if spec.ssh.remote_agent is not None:
            remote = partial(connect_by_agent, spec.ssh.remote_agent)
        try:
            return list(asking.map(partial(_ask, spec.ssh, spec.remote_python, remote), spec.hosts))
        finally:
            # Without a wait: Ctrl-C must not wait for silent hosts.
            asking.shutdown(wait=False, cancel_futures=True)


def _ask(
    ssh: SSHOptions, remote_python: str | None, remote: Callable[[Host], Connection], host: Host
) -> HostAnswer:
    start = time.monotonic()
    is_here = False
    try:
        is_here = is_local(host)
        candidates = python_candidates(host.python or remote_python)
        connection = connect_local(host) if is_here else remote(host)
        # Without it the reading below could wait for ever. Closing twice is harmless.
        late = threading.Timer(_LIMIT, connection.close)
        late.daemon = True
        late.start()
        try:
            return _ask_for_python(connection, candidates, host, is_here, start)
        finally:
            late.cancel()
            connection.close()
    except HvlaunchError as error:
        return HostAnswer(
            host, is_here, time.monotonic() - start, problem=_as_named(error.problem, host, ssh)
        )
    except Exception as error:  # noqa: BLE001 (a defect must not hide the other hosts)
        cause = f"internal error: {type(error).__name__}: {error}"
        problem = HostError(cause, host=host.name, hint="report it").problem
        return HostAnswer(host, is_here, time.monotonic() - start, problem=problem)


def _ask_for_python(
    connection: Connection, candidates: Sequence[str], host: Host, is_here: bool, start: float
) -> HostAnswer:
    """Raises HostError."""
    # The command of an agent: the same Python is chosen, and the same things go wrong.
    channel = connection.run(agent_command(candidates, len(_PROGRAM), _LIMIT))
    seconds = time.monotonic() - start
    output, broken = b"", None
    try:
        channel.write(_PROGRAM)
        while len(output) < _MOST_BYTES and (data := channel.read()):
            output += data
    except OSError as error:
        broken = str(error) or type(error).__name__
    answer = _ANSWER.search(output.decode("utf-8", "replace"))
    if answer is not None:
        return HostAnswer(host, is_here, seconds, python=answer[1])
    status = channel.exit_status(_STATUS_WAIT)
    stderr = channel.stderr().decode("utf-8", "replace").strip()
    raise never_began(host.name, status, stderr, broken, output)


def _as_named(problem: Problem, host: Host, ssh: SSHOptions) -> Problem:
    """Return the problem with the user's name of the host instead of the configured HostName."""
    try:
        hostname = resolve(host, ssh, timeout=_LIMIT, ask=ask_ssh).hostname
    except HvlaunchError:
        return problem
    if hostname == host.name:
        return problem
    hint = problem.hint and problem.hint.replace(hostname, host.name)
    return problem._replace(cause=problem.cause.replace(hostname, host.name), hint=hint)
