"""What the user is told on the way: messages, details with --verbose, and what hvlaunch waits for."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from hvlaunch.gloo.engine import actions as do
from hvlaunch.gloo.engine import events as on
from hvlaunch.gloo.engine.host_errors import count
from hvlaunch.hosts.fold import host_set
from hvlaunch.job import JobSpec

__all__ = ["Narrator"]


class Narrator:
    """Tells of events and actions as they pass, and changes nothing.

    `say` prints a message; `status` shows a text while it holds, and nothing with None.
    """

    def __init__(
        self, spec: JobSpec, say: Callable[[str], None], status: Callable[[Callable[[], str] | None], None]
    ) -> None:
        self._verbose = spec.verbose
        self._quiet = spec.console.quiet
        self._shown = spec.console.ranks
        self._say = say
        self._status = status
        self._began = 0.0
        self._hosts = 0
        self._waiting: dict[str, None] = {}
        self._failed = 0
        self._connecting = True
        self._all_at_once = spec.elastic is not None
        self._to_start: int | None = None
        """How many workers of the first round are still to be started, once it is known."""
        self._ranks: dict[str, list[int]] = {}
        self._pids: dict[str, list[int]] = {}

    def see(self, event: on.Event, actions: Sequence[do.Action], now: float) -> None:
        """An event at `now`, and what the engine made of it."""
        if isinstance(event, on.Began):
            self._began = now
        if isinstance(event, on.HostNoise) and not self._quiet:
            self._say(
                f"host {event.host}: something that its start-up files left running still prints, "
                f"which is skipped from here on: {event.text}"
            )
        if self._verbose:
            self._tell(self._of_event(event, now))
        for action in actions:
            if isinstance(action, do.Say):
                self._repeat(action)
            elif isinstance(action, do.Start):
                self._start(action)
        if self._connecting and not self._quiet:
            self._wait(event, actions)

    def _start(self, start: do.Start) -> None:
        size = start.places[0].size
        if self._to_start is None:
            self._to_start = 0 if self._all_at_once else size
        self._to_start -= len(start.places)
        if not self._ranks and not self._quiet and self._shown is not None:
            first = min(part.start for part in self._shown)
            if first >= size:
                self._say(f"--ranks: the job has only ranks 0-{size - 1}, so no output is shown")
        self._ranks[start.host] = [place.rank for place in start.places]
        if self._verbose:
            self._tell(_of_start(start))

    def _tell(self, texts: Iterable[str]) -> None:
        for text in texts:
            self._say(text)

    def _repeat(self, said: do.Say) -> None:
        if self._verbose or said.error or not (said.detail or self._quiet):
            self._say(said.text)

    def _wait(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        """Show who is waited for, until all workers are started or the job ends; some may start before."""
        for action in actions:
            match action:
                case do.Connect(host):
                    self._waiting[host.name] = None
                case do.Start() if self._to_start is not None and self._to_start > 0:
                    pass
                case do.Start() | do.Stop() | do.Finish():
                    self._connecting = False
                    self._status(None)
                    return
        self._hosts = max(self._hosts, len(self._waiting))
        match event:
            case on.HostReady():
                self._waiting.pop(event.host, None)
            case on.HostFailed() | on.HostGone() | on.HostParting() if event.host in self._waiting:
                del self._waiting[event.host]
                self._failed += 1
            case on.Began():
                pass
            case _:
                return
        self._status(partial(_waiting, tuple(self._waiting), self._hosts, self._failed))

    def _of_event(self, event: on.Event, now: float) -> Iterable[str]:
        match event:
            case on.HostConnected(host):
                yield f"host {host}: connected after {now - self._began:.2f} s"
            case on.HostReady(host, facts):
                gpus = "" if facts.gpus is None else f", {count(facts.gpus, 'GPU')}"
                has = f"Python {facts.python}, {count(facts.cpus, 'CPU')}{gpus}"
                yield f"host {host}: ready after {now - self._began:.2f} s: {has}"
            case on.RendezvousReached(host, address, tried, relay_port) if relay_port is not None:
                why = f" (can't reach it at {', '.join(tried)})" if tried else ""
                yield f"host {host}: its agent relays to the rendezvous, at {address}:{relay_port}{why}"
            case on.RendezvousReached(host, address) if address is not None:
                yield f"host {host}: reaches the rendezvous at {address}"
            case on.HostProbed(host, target, address) if address is not None:
                yield f"host {host}: reaches host {target} at {address}"
            case on.WorkerStarted(host, pid=pid):
                yield from self._started(host, pid)
            case on.HostParting(host, traceback=traceback) if traceback:
                yield f"host {host}: {traceback}"
            case on.HostClosed(host):
                yield f"host {host}: closed"

    def _started(self, host: str, pid: int) -> Iterable[str]:
        """One line when the last worker of a host has started."""
        pids = self._pids.setdefault(host, [])
        pids.append(pid)
        ranks = self._ranks.get(host, [])
        if len(pids) == len(ranks):
            yield f"host {host}: started {_span('rank', ranks)}, {_span('pid', pids)}"
            self._pids[host] = []


def _of_start(start: do.Start) -> Iterable[str]:
    network = start.network
    interface = f" on {network.interface}" if network.interface else ""
    where = f"MASTER_ADDR={network.master_addr} MASTER_PORT={network.master_port}{interface}"
    if network.rendezvous is None:
        yield f"host {start.host}: {where}, no rendezvous"
    else:
        yield f"host {start.host}: {where}, rendezvous at {network.rendezvous[0]}:{network.rendezvous[1]}"


def _waiting(hosts: Sequence[str], size: int, failed: int) -> str:
    ready = size - len(hosts) - failed
    lost = f", {failed} failed" if failed else ""
    if not size:
        return "waiting for the first hosts of the pool"
    if not hosts:
        return f"connected {ready}/{size}{lost}: finding addresses that lead from host to host"
    return f"connecting {ready}/{size}{lost}: waiting for {host_set(hosts)}"


def _span(noun: str, numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-3`, `pids 12,14`."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    if list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{noun}s {numbers[0]}-{numbers[-1]}"
    return f"{noun}s {','.join(map(str, numbers))}"
