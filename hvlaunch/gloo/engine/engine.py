"""What is to be done about what happens: the whole course of a job, without I/O, clock or threads.

`Engine.handle(event, now)` returns the actions; `deadline` is when it wants a Tick. A job goes
through the phases in their order, and from any of them straight to CLOSING. A static job is an
elastic one with one round: all of its hosts must be there, and no failure is made up for.
"""

from collections.abc import Iterable, Sequence
from enum import Enum

from hvlaunch.errors import HostError, HvlaunchError
from hvlaunch.gloo.engine import actions as do
from hvlaunch.gloo.engine import events as on
from hvlaunch.gloo.engine import facts as tell
from hvlaunch.gloo.engine.actions import Action, Step
from hvlaunch.gloo.engine.health import Health
from hvlaunch.gloo.engine.host_errors import no_directory, no_start, stuck
from hvlaunch.gloo.engine.life import InvalidTransition
from hvlaunch.gloo.engine.network import LOOPBACK
from hvlaunch.gloo.engine.outcome import final_state, group_state, outcome
from hvlaunch.gloo.engine.policy import Decision, Ending, Policy
from hvlaunch.gloo.engine.pool import HostState, Pool, PoolHost
from hvlaunch.gloo.engine.rounds import Rounds
from hvlaunch.gloo.engine.stopping import AT_ONCE, gently, passing_on
from hvlaunch.gloo.engine.workers import Workers
from hvlaunch.hosts.placement import needed
from hvlaunch.job import Host, JobResult, JobSpec

__all__ = ["Engine", "Phase"]

_START_MARGIN = 0.5
"""Seconds that a host's own, better explained, timeout has before ours."""
_KILLING_TIME = 2.0
"""Seconds that SIGKILL has before the user may have enough of waiting."""
_CLOSING_TIME = 25.0


class Phase(Enum):
    CONNECTING = "connecting to the hosts"
    RUNNING = "running"
    FINISHING = "waiting for the others, since the first worker has ended well"
    STOPPING = "stopping the workers"
    CLOSING = "closing the hosts"
    DONE = "done"


_AT_WORK = (Phase.CONNECTING, Phase.RUNNING)
_WITH_WORKERS = (Phase.RUNNING, Phase.FINISHING, Phase.STOPPING)


class Engine:
    """Runs one job. `rendezvous_port` is the port of the driver's rendezvous."""

    def __init__(self, spec: JobSpec, rendezvous_port: int) -> None:
        self._spec = spec
        self._elastic = spec.elastic
        self._rendezvous_port = rendezvous_port
        hosts: Sequence[Host] = spec.hosts
        if spec.elastic is None:
            hosts = needed(spec.hosts, spec.np, spec.slots_per_host)
        self._pool = Pool(hosts, spec.slots_per_host)
        self._rounds = Rounds(spec, self._pool)
        self._policy = Policy(spec, self._pool, self._rounds)
        self._health = Health(spec.elastic, self._rounds) if spec.elastic is not None else None
        self._ending = Ending()
        self._interrupted: int | None = None
        self._killing_since: float | None = None
        """When the user, for the first time, wanted the workers killed."""
        self._ended_at = 0.0
        self._is_pool_known = spec.elastic is None or not spec.elastic.discovers
        self._discovery_error = ""
        self._has_released = False
        self._final: str | None = None
        self._group: tuple[str, int | None] = ("", None)
        self.phase = Phase.CONNECTING
        self.deadline: float | None = None

    @property
    def workers(self) -> Workers:
        """All that live."""
        return self._rounds.workers

    def handle(self, event: on.Event, now: float) -> list[Action]:
        """What to do about `event` at `now` (seconds of the driver's clock)."""
        if isinstance(event, on.WorkerBeat | on.WorkerStarted):
            return self._life_sign(event, now)
        wanted = self._handle(event, now)
        if self.deadline is not None and now >= self.deadline:
            wanted += self._tick(now)
        self.deadline = self._next_deadline(now)
        if self._elastic is not None:
            self._tell_group_state(wanted)
        return wanted

    def handle_or_end(self, event: on.Event, now: float) -> list[Action]:
        """As handle(), but that a defect of hvlaunch, found in its own records, ends the job in order."""
        try:
            return self.handle(event, now)
        except InvalidTransition as defect:
            actions = self._end_for(defect, now)
        self.deadline = self._next_deadline(now)
        return actions

    def _end_for(self, defect: InvalidTransition, now: float) -> list[Action]:
        if self.phase in (*_AT_WORK, Phase.FINISHING):
            try:
                return self._end(Ending(error=defect), now)
            except InvalidTransition:
                pass
        self._ending = Ending(error=defect)
        return self._leave_to_agents(now)

    def _handle(self, event: on.Event, now: float) -> list[Action]:
        match event:
            case on.Tick():
                return []
            case on.Interrupted(number):
                return self._interrupt(number, now)
            case on.UserSignal(number):
                return [do.Signal(host, number) for host in self._hosts_with_workers()]
            case on.WorkerAsked() | on.WorkerSuspended():
                return self._worker_event(event, now)
            case on.WorkerExited() | on.WorkerNotStarted():
                return self._worker_ended(event, now)
            case on.Began() | on.HostsDiscovered() | on.DiscoveryFailed():
                return self._pool_event(event, now)
            case on.MasterPort(name, port):
                host = self._pool.get(name)
                if host is not None and host.facts is not None:
                    host.facts = host.facts._replace(master_port=port)
                return []
            case _:
                host = self._pool.get(event.host)
                return [] if host is None else self._host_event(host, event, now)

    # The pool

    def _pool_event(
        self, event: on.Began | on.HostsDiscovered | on.DiscoveryFailed, now: float
    ) -> list[Action]:
        match event:
            case on.Began():
                return self._connect(self._pool, now) if self._elastic is None else self._proceed(now)
            case on.HostsDiscovered(hosts):
                return self._discovered(hosts, now)
            case on.DiscoveryFailed(error):
                return self._discovery_failed(error, now)

    def _discovered(self, hosts: Sequence[Host], now: float) -> list[Action]:
        self._discovery_error = ""
        if not hosts and self._is_pool_known:
            return [tell.PoolEmpty(keeps_hosts=True)]
        actions: list[Action] = [] if hosts else [tell.PoolEmpty(keeps_hosts=False)]
        self._is_pool_known = True
        self._pool.update(hosts)
        self._rounds.changed()
        return actions + self._proceed(now)

    def _discovery_failed(self, error: HvlaunchError, now: float) -> list[Action]:
        if not self._is_pool_known:
            return self._end(Ending(error=error), now) if self.phase in _AT_WORK else []
        if str(error) == self._discovery_error:
            return []
        self._discovery_error = str(error)
        return [tell.KeepingHosts(error.problem)]

    def _connect(self, hosts: Iterable[PoolHost], now: float) -> list[Action]:
        due = now + self._spec.start_timeout + _START_MARGIN
        wanted: list[Action] = []
        for host in hosts:
            self._pool.connect(host, due)
            wanted.append(do.Connect(host.host))
        return wanted

    def _tend_pool(self, now: float) -> list[Action]:
        """Connect to the hosts that are wanted, and let go of those that are not."""
        wanted = self._policy.needed_hosts(now)
        actions = self._connect([host for host in wanted if host.state is HostState.NONE], now)
        names = {host.name for host in wanted}
        for host in self._pool:
            if host.state is not HostState.READY or host.is_parting or self._rounds.workers.on(host.name):
                continue
            if host.name not in names and (self.phase is Phase.RUNNING or not host.is_usable(now)):
                actions += self._release(host, now)
        return actions

    def _release(self, host: PoolHost, now: float) -> list[Action]:
        self._pool.closes(host, now + _CLOSING_TIME)
        self._rounds.changed()
        return [do.Release(host.name)]

    # Hosts

    def _host_event(self, host: PoolHost, event: on.Event, now: float) -> list[Action]:
        if host.state is HostState.NONE:
            return []
        match event:
            case on.HostConnected():
                host.is_connected = True
            case on.HostReady(_, facts) if host.state is HostState.CONNECTING:
                return self._ready(host, facts, now)
            case on.RendezvousReached(name, address, tried, relay_port):
                host.has_tried_rendezvous = True
                host.rendezvous = None if address is None else (address, relay_port or self._rendezvous_port)
                actions: list[Action] = []
                if address is None:
                    actions = [tell.RendezvousUnreachable(name, tuple(tried), self._rendezvous_port)]
                return actions + self._rounds.reached(name, now) + self._proceed(now)
            case on.HostProbed(name, target, address):
                return self._rounds.found(name, target, address, now) + self._proceed(now, is_minor=True)
            case on.HostFailed(_, error) | on.HostGone(_, error):
                return self._host_failed(host, error, now)
            case on.HostParting(_, error) if host.state is HostState.READY and not host.is_parting:
                return self._parting(host, error, now)
            case on.HostClosed(_, left):
                actions = [tell.HostLeftOver(host.name, left)] if left else []
                self._gone(host, now)
                return actions + self._proceed(now)
            case _:
                pass
        return []

    def _ready(self, host: PoolHost, facts: on.HostFacts, now: float) -> list[Action]:
        self._pool.ready(host, facts)
        if facts.peer_address is None:
            host.rendezvous, host.has_tried_rendezvous = (LOOPBACK, self._rendezvous_port), True
        wanted: list[Action] = []
        if facts.trouble is not None:
            wanted.append(tell.KernelLacks(host.name, facts.trouble))
        if facts.cwd_error is not None:
            error = no_directory(host.name, self._spec.cwd, facts.cwd_error)
            self._pool.errors[host.name] = error
            wanted += self._policy.host_failed(host, error, now)
        return wanted + self._rounds.ready(host) + self._proceed(now)

    def _host_failed(self, host: PoolHost, error: HostError, now: float) -> list[Action]:
        """It did not get ready, or was ready and is gone."""
        before = host.state
        if before is not HostState.CLOSING:
            self._pool.errors[host.name] = error
        if self.phase in (Phase.CLOSING, Phase.DONE) or before is HostState.CLOSING:
            decision = Decision([tell.HostLostAtEnd(error.problem)])
        elif before is HostState.READY:
            decision = self._lost(host, error, now)
        else:
            decision = Decision(self._policy.host_failed(host, error, now))
        self._gone(host, now)
        return self._follow(decision, now)

    def _gone(self, host: PoolHost, now: float) -> None:
        """Nothing of the host is there any more."""
        self._pool.gone(host)
        self._rounds.workers.lose(host.name, now)
        if self.phase in _AT_WORK:
            self._rounds.lost(host.name)

    def _lost(self, host: PoolHost, error: HostError, now: float) -> Decision:
        if self.phase in _AT_WORK and not host.is_parting:
            return self._policy.host_lost(host, error, now)
        return Decision([tell.HostLostAtEnd(error.problem)] if self._ending.error is None else [])

    def _parting(self, host: PoolHost, error: HostError, now: float) -> list[Action]:
        host.is_parting = True
        self._pool.errors[host.name] = error
        if self.phase in _AT_WORK:
            return self._follow(self._policy.host_lost(host, error, now), now)
        self._policy.agent_ends(host.name, now)
        return [tell.HostLostAtEnd(error.problem)]

    def _start_timed_out(self, host: PoolHost, now: float) -> list[Action]:
        error = no_start(host.name, self._spec.start_timeout, is_connected=host.is_connected)
        self._pool.gone(host)
        self._pool.errors[host.name] = error
        return [do.Abandon(host.name), *self._policy.host_failed(host, error, now)]

    # Workers

    def _life_sign(self, event: on.WorkerBeat | on.WorkerStarted, now: float) -> list[Action]:
        """There are thousands of these, and nothing is to be done about them."""
        if isinstance(event, on.WorkerBeat) and self._health is not None and self.phase in _AT_WORK:
            worker = self._rounds.workers.find((event.host, event.slot), event.start)
            if worker is not None:
                due = self._health.beat(worker, event.commit, now, is_last=event.is_last)
                self.deadline = due if self.deadline is None else min(self.deadline, due)
        return []

    def _worker_event(self, event: on.WorkerAsked | on.WorkerSuspended, now: float) -> list[Action]:
        worker = self._rounds.workers.find((event.host, event.slot), event.start)
        if worker is None or self._health is None or self.phase not in _AT_WORK or worker.is_ending:
            return []
        if isinstance(event, on.WorkerSuspended):
            return self._follow(self._policy.hangs(worker, "stopped", now), now)
        self._health.beat(worker, event.commit, now)
        decision = self._policy.asked(worker, event, now)
        if decision.ending is None and self._rounds.awaits_asks:
            return [*decision.actions]
        return self._follow(decision, now)

    def _worker_ended(self, event: on.WorkerExited | on.WorkerNotStarted, now: float) -> list[Action]:
        worker = self._rounds.workers.find((event.host, event.slot), event.start)
        if worker is None or worker.born != event.round or self.phase not in _WITH_WORKERS:
            return []
        if self.phase is not Phase.RUNNING:
            self._policy.record_end(worker, event, now)
            return self._close_if_over(now)
        decision = self._policy.worker_ended(worker, event, now)
        if decision.is_empty and self._rounds.awaits_ends:
            return []
        return self._follow(decision, now)

    # What follows

    def _follow(self, decision: Decision, now: float) -> list[Action]:
        """Carry out a decision, and whatever has to be done as things stand then."""
        actions = [*decision.actions]
        if self.phase in _AT_WORK and decision.ending is not None:
            return actions + self._end(decision.ending, now)
        if self.phase in _AT_WORK and decision.is_done:
            self.phase = Phase.FINISHING
        return actions + self._proceed(now)

    def _proceed(self, now: float, *, is_minor: bool = False) -> list[Action]:
        """Whatever has to be done as things stand; when `is_minor`, hosts and workers are what they were."""
        if self.phase not in _AT_WORK:
            return self._close_if_over(now) + self._finish_if_closed()
        decision = Decision()
        while decision.ending is None:
            step, problem = self._advance(now, is_minor=is_minor)
            decision = decision.also(step)
            if problem is None:
                break
            decision = decision.also(self._policy.blame(problem, now))
        actions = [*decision.actions]
        if decision.ending is not None:
            return actions + self._end(decision.ending, now)
        return actions + self._close_if_over(now)

    def _advance(self, now: float, *, is_minor: bool) -> tuple[Decision, HvlaunchError | None]:
        """Towards the next round; why there can be none, if that is certain."""
        if self._elastic is None:
            if self._pool.errors and not self._pool.connecting and not self._rounds.has_begun:
                return Decision((), Ending(error=self._pool.failure)), None
            settled = self._rounds.settle(now)
            return Decision([*settled.actions, *self._note_start(now)]), settled.problem
        if not self._is_pool_known:
            return Decision(), None
        actions = [] if is_minor else self._policy.drain(now)
        settled = self._rounds.settle(now)
        actions += [*settled.actions, *self._note_start(now)]
        if is_minor:
            return Decision(actions), settled.problem
        actions += self._rounds.fill(now) + self._tend_pool(now)
        hopeless = self._policy.hopeless() if settled.problem is None else None
        return Decision(actions, hopeless), settled.problem

    def _note_start(self, now: float) -> list[Action]:
        """When the only round of a static job is planned, its other hosts are let go; then it starts."""
        current = self._rounds.round
        if current is not None:
            self.phase = Phase.RUNNING
        if self._elastic is not None or self._has_released:
            return []
        used = set(self._rounds.next_hosts if current is None else current.hosts)
        self._has_released = bool(used)
        others = [
            host for host in self._pool if used and host.name not in used and host.state is HostState.READY
        ]
        return [action for host in others for action in self._release(host, now)]

    def _hosts_with_workers(self) -> list[str]:
        """Where to send what is for all workers."""
        if self.phase not in _WITH_WORKERS:
            return []
        current = self._rounds.round
        names = dict.fromkeys([*(current.hosts if current is not None else ()), *self._rounds.workers.hosts])
        return [name for name in names if self._pool[name].state is HostState.READY]

    # Ending

    def _end(self, ending: Ending, now: float) -> list[Action]:
        """The job ends before its time."""
        self._ending = ending
        actions: list[Action] = [] if ending.cause is None else [tell.JobEnding(ending.cause)]
        if self.phase is Phase.CONNECTING:
            return actions + self._close(now)
        return actions + self._stop(gently(self._spec.grace), now) + self._close_if_over(now)

    def _stop(self, steps: list[Step], now: float) -> list[Action]:
        hosts = self._hosts_with_workers()
        self.phase = Phase.STOPPING
        self._rounds.workers.stop(list(self._rounds.workers), steps, now)
        return [do.Stop(host, steps) for host in hosts]

    def _interrupt(self, number: int, now: float) -> list[Action]:
        grace = self._spec.grace
        match self.phase:
            case Phase.CONNECTING:
                self._interrupted = number
                return self._close(now)
            case Phase.RUNNING | Phase.FINISHING:
                self._interrupted = number
                stop = self._stop(passing_on(number, grace), now)
                return [tell.Interrupting(number, grace), *stop, *self._close_if_over(now)]
            case Phase.STOPPING:
                if self._killing_since is not None and now >= self._killing_since + _KILLING_TIME:
                    return self._leave_to_agents(now)
                self._killing_since = now if self._killing_since is None else self._killing_since
                return self._stop(AT_ONCE, now)
            case Phase.CLOSING:
                return self._give_up_closing(list(self._pool.open))
            case _:
                return []

    def _leave_to_agents(self, now: float) -> list[Action]:
        """Wait no longer: what does not end (its output, where nobody reads it) ends when the agents lose us."""
        self._ended_at = now
        self.phase = Phase.CLOSING
        self._final = final_state(self._result())
        return self._give_up_closing(list(self._pool.open))

    def _close_if_over(self, now: float) -> list[Action]:
        if self._rounds.workers.size or self.phase not in _WITH_WORKERS:
            return []
        if self.phase is Phase.RUNNING and (self._elastic is not None or not self._rounds.has_begun):
            return []
        return self._close(now)

    def _close(self, now: float) -> list[Action]:
        """Let go of every host; those that never got ready are just dropped."""
        self._ended_at = now
        self.phase = Phase.CLOSING
        self._final = final_state(self._result())
        strangers = [name for name in sorted(self._pool.open) if name in self._pool.connecting]
        dropped: list[Action] = [do.Abandon(name) for name in strangers]
        for name in strangers:
            self._pool.gone(self._pool[name])
        released: list[Action] = []
        for name in sorted(self._pool.open):
            if self._pool[name].state is HostState.READY:
                released += self._release(self._pool[name], now)
        return dropped + released + self._finish_if_closed()

    def _give_up_closing(self, names: Iterable[str]) -> list[Action]:
        late = sorted(names)
        for name in late:
            self._pool.gone(self._pool[name])
        actions: list[Action] = [tell.HostNotClosing(host) for host in late]
        return [*actions, *(do.Abandon(host) for host in late), *self._finish_if_closed()]

    def _finish_if_closed(self) -> list[Action]:
        if self.phase is not Phase.CLOSING or self._pool.open:
            return []
        self.phase = Phase.DONE
        return [do.Finish(self._result())]

    def _result(self) -> JobResult:
        return outcome(self._ending, self._rounds.round, self._interrupted, self._ended_at)

    # Time

    def _tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for host in self._pool.late(self._pool.connecting, now):
            actions += self._start_timed_out(host, now)
        late = [host.name for host in self._pool.late(self._pool.closing, now)]
        if late:
            actions += self._give_up_closing(late)
        decision = Decision(actions)
        if self._health is not None:
            decision = decision.also(self._watch(self._health, now))
        return self._follow(decision, now)

    def _watch(self, health: Health, now: float) -> Decision:
        """Find the workers that hang."""
        decision = Decision()
        if self.phase is Phase.RUNNING and self._elastic is not None:
            for worker in health.silent(now):
                decision = decision.also(self._policy.hangs(worker, "silent", now))
            if health.is_without_commit(now):
                decision = decision.also(self._policy.no_commit(now))
            for worker in health.stragglers(now):
                decision = decision.also(self._policy.hangs(worker, "late", now))
        if self.phase in _WITH_WORKERS:
            for name in health.stuck(now):
                lost = self._host_failed(self._pool[name], stuck(name), now)
                decision = decision.also(Decision([do.Abandon(name), *lost]))
        return decision

    def _next_deadline(self, now: float) -> float | None:
        if self.phase is Phase.DONE:
            return None
        waits = (self._pool.connecting, self._pool.closing)
        found = [next(iter(dues.values())) for dues in waits if dues]
        if self.phase in _AT_WORK:
            found += self._rounds.deadlines(now)
        if self._health is not None:
            ends = self._health.end_deadline(now)
            found += [] if ends is None else [ends]
            if self.phase in _AT_WORK:
                found += self._health.deadlines()
        return min(found, default=None)

    def _tell_group_state(self, wanted: list[Action]) -> None:
        """Add to what is wanted how the workers are, if that has changed. Finish stays the last."""
        current = self._rounds.round
        state = self._state(), None if current is None else current.number
        if state != self._group:
            self._group = state
            is_over = bool(wanted) and isinstance(wanted[-1], do.Finish)
            wanted.insert(len(wanted) - is_over, do.GroupState(*state))

    def _state(self) -> str:
        return self._final or group_state(self._rounds.round, has_workers=self._rounds.workers.size > 0)
