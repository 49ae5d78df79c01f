"""What is to be done about what happens: the whole course of a job, without I/O, clock or threads.

`Engine.handle(event, now)` returns the actions; `deadline` is when it wants a Tick. A job goes
through the phases in their order, and from any of them straight to CLOSING.
"""

import signal
from collections.abc import Iterable
from enum import Enum

from hvlaunch.errors import (
    HostError,
    HostsFailed,
    HvlaunchError,
    StartTimeout,
    WorkingDirectoryMissing,
)
from hvlaunch.gloo import actions as do
from hvlaunch.gloo import events as on
from hvlaunch.gloo.actions import Action, Step
from hvlaunch.gloo.machines import shared_machines
from hvlaunch.gloo.network import LOOPBACK, Network
from hvlaunch.gloo.round import Round
from hvlaunch.gloo.worker_env import HostNetwork
from hvlaunch.hosts.placement import Placement, needed, place, slots_of
from hvlaunch.job import JobResult, JobSpec

__all__ = ["Engine", "Phase"]

_START_MARGIN = 0.5
"""Seconds that a host's own, better explained, timeout has before ours."""
_PROBING_TIME = 8.0
_SETTLE = 0.3
_CLOSING_TIME = 25.0


class Phase(Enum):
    CONNECTING = "connecting to the hosts"
    PROBING = "finding addresses that lead from host to host"
    RUNNING = "running"
    STOPPING = "stopping the workers"
    CLOSING = "closing the hosts"
    DONE = "done"


class Engine:
    """Runs one static job. `rendezvous_port` is the port of the driver's rendezvous."""

    def __init__(self, spec: JobSpec, rendezvous_port: int) -> None:
        self._spec = spec
        self._rendezvous_port = rendezvous_port
        self._hosts = {host.name: host for host in needed(spec.hosts, spec.np, spec.slots_per_host)}
        self._open: set[str] = set()
        self._connected: set[str] = set()
        self._facts: dict[str, on.HostFacts] = {}
        self._failed: dict[str, HostError] = {}
        self._reached: dict[str, str | None] = {}
        self._network: Network | None = None
        self._round: Round | None = None
        self._places: list[Placement] = []
        self._error: HvlaunchError | None = None
        self._interrupted: int | None = None
        self._ended_at = 0.0
        self.phase = Phase.CONNECTING
        self.deadline: float | None = None

    def handle(self, event: on.Event, now: float) -> list[Action]:
        """What to do about `event` at `now` (seconds of the driver's clock)."""
        match event:
            case on.Began():
                return self._begin(now)
            case on.Tick():
                return self._tick(now) if self.deadline is not None and now >= self.deadline else []
            case on.Interrupted(number):
                return self._interrupt(number, now)
            case on.UserSignal(number):
                return [do.Signal(host, number) for host in self._live_hosts()]
            case on.WorkerExited() | on.WorkerNotStarted():
                return self._worker_ended(event, now)
            case on.WorkerStarted():
                return []
            case _:
                return self._host_event(event, now)

    def _host_event(self, event: on.Event, now: float) -> list[Action]:
        match event:
            case on.HostConnected(host):
                self._connected.add(host)
            case on.HostReady(host, facts) if host in self._open:
                return self._ready(host, facts, now)
            case on.RendezvousReached(host, address, tried):
                self._reached[host] = address
                return self._no_rendezvous(host, address, tried) + self._start_if_wired(now)
            case on.HostProbed(host, target, address) if self._network is not None:
                self._network.add(host, target, address)
                return self._start_if_wired(now)
            case on.HostFailed(host, error) | on.HostGone(host, error) if host in self._open:
                self._open.discard(host)
                return self._host_failed(host, error, now)
            case on.HostParting(host, error) if host in self._open:
                return self._parting(host, error, now)
            case on.HostClosed(host, left) if host in self._open:
                self._open.discard(host)
                return self._not_ended(host, left) + self._finish_if_closed()
            case _:
                pass
        return []

    # Connecting

    def _begin(self, now: float) -> list[Action]:
        self._open = set(self._hosts)
        self.deadline = now + self._spec.start_timeout + _START_MARGIN
        return [do.Connect(host) for host in self._hosts.values()]

    def _ready(self, host: str, facts: on.HostFacts, now: float) -> list[Action]:
        self._facts[host] = facts
        if facts.peer_address is None:
            self._reached[host] = LOOPBACK
        said: list[Action] = []
        if facts.trouble is not None:
            text = f"host {host}: {facts.trouble}: what a worker detaches there may outlive the job"
            said.append(do.Say(text))
        if facts.cwd_error is not None:
            self._failed[host] = WorkingDirectoryMissing(
                f"working directory {self._spec.cwd}: {facts.cwd_error}",
                host=host,
                path=self._spec.cwd,
                hint="--cwd DIR, a directory that is there on every host",
            )
        return said + self._connected_if_all(now)

    def _connected_if_all(self, now: float) -> list[Action]:
        if (
            self.phase is not Phase.CONNECTING
            or self._facts.keys() | self._failed.keys() < self._hosts.keys()
        ):
            return []
        if self._failed:
            return self._close(now, self._all_failures())
        return self._probe(now)

    def _all_failures(self) -> HvlaunchError:
        failures = [self._failed[host] for host in self._hosts if host in self._failed]
        return failures[0] if len(failures) == 1 else HostsFailed(failures)

    def _host_failed(self, host: str, error: HostError, now: float) -> list[Action]:
        match self.phase:
            case Phase.CONNECTING:
                self._failed[host] = error
                return self._connected_if_all(now)
            case Phase.PROBING:
                return self._close(now, error)
            case Phase.RUNNING | Phase.STOPPING if self._round is not None:
                return self._host_lost(self._round, host, error, now)
            case _:
                return [do.Say(str(error), error=True), *self._finish_if_closed()]

    def _parting(self, host: str, error: HostError, now: float) -> list[Action]:
        match self.phase:
            case Phase.CONNECTING:
                self._failed[host] = error
                return self._connected_if_all(now)
            case Phase.PROBING:
                return self._close(now, error)
            case Phase.RUNNING:
                self._error = error
                return self._stop(self._gently(), now)
            case _:
                return [do.Say(str(error), error=True)]

    def _gently(self) -> list[Step]:
        return [Step(signal.SIGTERM, 0.0), Step(signal.SIGKILL, self._spec.grace)]

    def _start_timed_out(self, now: float) -> list[Action]:
        late = [host for host in self._hosts if host not in self._facts and host not in self._failed]
        for host in late:
            reached = "its agent does not answer" if host in self._connected else "no connection"
            self._failed[host] = StartTimeout(
                f"{reached} within {self._spec.start_timeout:g} s",
                host=host,
                hint=f"ssh {host} python3 --version, or a longer --start-timeout",
            )
        self._open.difference_update(late)
        return [do.Abandon(host) for host in late] + self._connected_if_all(now)

    # Probing

    def _probe(self, now: float) -> list[Action]:
        slots = [
            (host.name, slots_of(host, self._spec.slots_per_host, self._facts[host.name].gpus or 0))
            for host in self._hosts.values()
        ]
        try:
            self._places = place(slots, self._spec.np)
        except HvlaunchError as error:
            return self._close(now, error)
        self.phase = Phase.PROBING
        self.deadline = now + _PROBING_TIME
        used = dict.fromkeys(one.host for one in self._places)
        unused: list[Action] = [do.Release(host) for host in self._hosts if host not in used]
        self._hosts = {name: self._hosts[name] for name in used}
        self._network = Network({name: self._facts[name] for name in used}, self._spec.network_interfaces)
        probes = [
            do.Probe(host, target, addresses, self._facts[target].beacon_port)
            for host, target, addresses in self._network.tries()
        ]
        return unused + self._shared_machines() + probes + self._start_if_wired(now)

    def _shared_machines(self) -> list[Action]:
        used = {name: self._facts[name] for name in self._hosts}
        return [
            do.Say(f"hosts {', '.join(names)} are one machine, and each uses all of its slots there")
            for names in shared_machines(used)
        ]

    def _no_rendezvous(self, host: str, address: str | None, tried: Iterable[str]) -> list[Action]:
        if address is not None:
            return []
        where = ", ".join(f"{one}:{self._rendezvous_port}" for one in tried)
        return [
            do.Say(
                f"host {host}: can't reach the driver's rendezvous (tried {where}); HVLAUNCH_RENDEZVOUS is unset there"
            )
        ]

    def _start_if_wired(self, now: float, *, at_last: bool = False) -> list[Action]:
        network = self._network
        if self.phase is not Phase.PROBING or network is None:
            return []
        if not at_last and not (network.is_best and self._hosts.keys() <= self._reached.keys()):
            if network.is_enough and self._hosts.keys() <= self._reached.keys():
                self.deadline = min(self.deadline or now, now + _SETTLE)
            return []
        problem = network.problem()
        return self._start(network, now) if problem is None else self._close(now, problem)

    # Running

    def _start(self, network: Network, now: float) -> list[Action]:
        self.phase, self.deadline = Phase.RUNNING, None
        self._round = Round(0, self._places, started_at=now)
        port = self._facts[network.first].master_port
        starts: list[Action] = []
        for host, places in self._round.by_host.items():
            reached = self._reached.get(host)
            own = HostNetwork(
                master_addr=network.address(host),
                master_port=port,
                interface=network.interface(host),
                rendezvous=(reached, self._rendezvous_port) if reached else None,
            )
            starts.append(do.Start(host, 0, places, own, self._facts[host]))
        where = f"{network.address(network.first)}:{port}"
        text = f"starting {len(self._places)} workers on {len(starts)} hosts; rank 0 is at {where}"
        return [do.Say(text, detail=True), *starts]

    def _worker_ended(self, event: on.WorkerExited | on.WorkerNotStarted, now: float) -> list[Action]:
        if self._round is None or self.phase not in (Phase.RUNNING, Phase.STOPPING):
            return []
        end = self._round.add(event, now)
        if end is None:
            return []
        stop: list[Action] = []
        if not end.ok and self.phase is Phase.RUNNING:
            stop = self._stop(self._gently(), now)
        return stop + self._close_if_over(now)

    def _host_lost(self, current: Round, host: str, error: HostError, now: float) -> list[Action]:
        current.lose(host)
        stop: list[Action] = []
        if self.phase is Phase.RUNNING:
            self._error = error
            stop = self._stop(self._gently(), now)
        elif self._error is None:
            stop = [do.Say(str(error), error=True)]
        return stop + self._close_if_over(now)

    def _live_hosts(self) -> list[str]:
        if self._round is None or self.phase not in (Phase.RUNNING, Phase.STOPPING):
            return []
        return [host for host in self._round.by_host if host in self._open]

    # Ending

    def _stop(self, steps: list[Step], now: float) -> list[Action]:
        self.phase = Phase.STOPPING
        if self._round is not None:
            self._round.stop(steps, now)
        return [do.Stop(host, steps) for host in self._live_hosts()]

    def _interrupt(self, number: int, now: float) -> list[Action]:
        grace = self._spec.grace
        match self.phase:
            case Phase.CONNECTING | Phase.PROBING:
                self._interrupted = number
                return self._close(now, None)
            case Phase.RUNNING:
                self._interrupted = number
                gentle = [Step(signal.SIGTERM, 0.0)]
                if number == signal.SIGINT:
                    gentle = [Step(signal.SIGINT, 0.0), Step(signal.SIGTERM, grace / 2)]
                said = do.Say(
                    f"got {signal.Signals(number).name}: workers have {grace:g} s to end; once more kills them at once"
                )
                return [said, *self._stop([*gentle, Step(signal.SIGKILL, grace)], now)]
            case Phase.STOPPING:
                return self._stop([Step(signal.SIGKILL, 0.0)], now)
            case Phase.CLOSING:
                return self._closing_timed_out()
            case _:
                return []

    def _close_if_over(self, now: float) -> list[Action]:
        if self._round is None or not self._round.is_over:
            return []
        return self._close(now, self._error)

    def _close(self, now: float, error: HvlaunchError | None) -> list[Action]:
        """Let go of every host; those that never got ready are just dropped."""
        self._error = error
        self._ended_at = now
        self.phase, self.deadline = Phase.CLOSING, now + _CLOSING_TIME
        strangers = [host for host in sorted(self._open) if host not in self._facts]
        self._open.difference_update(strangers)
        dropped: list[Action] = [do.Abandon(host) for host in strangers]
        released: list[Action] = [do.Release(host) for host in sorted(self._open)]
        return dropped + released + self._finish_if_closed()

    def _not_ended(self, host: str, left: int) -> list[Action]:
        if not left:
            return []
        return [
            do.Say(
                f"host {host}: {left} processes of the job can't be killed (another user's, or stuck in the kernel)",
                error=True,
            )
        ]

    def _closing_timed_out(self) -> list[Action]:
        late = sorted(self._open)
        self._open.clear()
        said = [
            do.Say(f"host {host}: does not close; its agent still ends what is left there", error=True)
            for host in late
        ]
        return [*said, *(do.Abandon(host) for host in late), *self._finish_if_closed()]

    def _finish_if_closed(self) -> list[Action]:
        if self.phase is not Phase.CLOSING or self._open:
            return []
        self.phase, self.deadline = Phase.DONE, None
        return [do.Finish(self._result())]

    def _result(self) -> JobResult:
        failure = None
        if self._interrupted is not None:
            code = 128 + self._interrupted
        elif self._error is not None:
            code = self._error.exit_code  # workers that failed then lost their peers: no causes
        else:
            failure = self._round.first_failure if self._round is not None else None
            code = failure.exit_code if failure is not None else 0
        exits = tuple(self._round.exits[rank] for rank in sorted(self._round.exits)) if self._round else ()
        return JobResult(
            exit_code=code,
            elapsed=self._ended_at - self._round.started_at if self._round else 0.0,
            exits=exits,
            failure=failure,
            error=self._error,
            interrupted=self._interrupted,
        )

    def _tick(self, now: float) -> list[Action]:
        match self.phase:
            case Phase.CONNECTING:
                return self._start_timed_out(now)
            case Phase.PROBING:
                return self._start_if_wired(now, at_last=True)
            case Phase.CLOSING:
                return self._closing_timed_out()
            case _:
                return []
