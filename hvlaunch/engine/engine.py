"""The engine of a job: events in, actions out, without I/O, clock, threads or randomness.

`Engine.handle(event, now)` returns the actions; `deadline` is when it needs a Tick. A job passes through its phases in
order, and may go from any of them straight to CLOSING. A static job is an elastic job with a single round, on
all of its hosts; a failure ends the job.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import inf

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.actions import Action
from hvlaunch.engine.causes import Ending
from hvlaunch.engine.events import Lull, Sign
from hvlaunch.engine.health import Draining, Health, Hearing, Overdue
from hvlaunch.engine.hosts import (
    LOOPBACK,
    HostState,
    InvalidHostStep,
    Pool,
    PoolHost,
    gone_unasked,
    no_list,
    no_start,
    stuck,
    unfit,
)
from hvlaunch.engine.lifecycle import AT_WORK, WITH_WORKERS, GroupStates, Lifecycle, Phase
from hvlaunch.engine.policy import Decision, Policy, Then, alone
from hvlaunch.engine.round import Round
from hvlaunch.engine.rounds import Rounds
from hvlaunch.engine.waits import ALWAYS, AT_WORK_ALWAYS, Wait, Waits
from hvlaunch.engine.workers import InvalidTransition, Workers
from hvlaunch.errors import Problem
from hvlaunch.hosts.placement import needed
from hvlaunch.job import Host, JobSpec

__all__ = ["Engine", "apply_idle_summary", "idle_summary", "idle_tally"]


def idle_tally(waits: Waits) -> tuple[int, int]:
    """Return the counts that an early Tick may change; a change means a busy turn."""
    return len(waits.all_of(Wait.DRAINING)), len(waits.all_of(Wait.COOLDOWN))


def idle_summary(rounds: Rounds, waits: Waits, due: float | None, deadline: float | None) -> Lull:
    """Summarize a run of idle turns in one event."""
    current = rounds.round
    commit_at = waits.since(Wait.COMMIT)
    if current is None or commit_at is None:
        return Lull(due=due, deadline=deadline)
    signs = tuple(Sign(worker.host, worker.slot, worker.commit, worker.beat_at) for worker in rounds.workers)
    return Lull(signs, current.commit, commit_at, waits.until(Wait.SILENCE_LOOK), due, deadline)


def apply_idle_summary(event: Lull, rounds: Rounds, waits: Waits, commit_timeout: float) -> None:
    """Bring the engine to the state after the idle turns that the event stands for."""
    for sign in event.signs:
        for worker in rounds.workers.in_seats([(sign.host, sign.slot)]):
            worker.commit, worker.beat_at = sign.commit, sign.beat_at
    if rounds.round is None or not waits.has(Wait.COMMIT):
        return
    rounds.round.committed(event.commit)
    waits.begin(Wait.COMMIT, None, event.commit_at, commit_timeout)
    if event.next_check is None:
        waits.end(Wait.SILENCE_LOOK)
    else:
        waits.begin(Wait.SILENCE_LOOK, None, event.next_check)


_START_MARGIN = 0.5
"""Seconds by which a host's own, more informative timeout comes before ours."""
_LIST_MARGIN = 5.0
"""Seconds by which a discovery script's own timeout comes before ours."""
_RESUMING = 5.0
"""Seconds to catch up with old news after a stop; at most half of the time since the last stop, so that all waits end."""


class Engine:
    """Decides the course of a single job. `rendezvous_port` is the port of the driver's rendezvous."""

    def __init__(self, spec: JobSpec, rendezvous_port: int) -> None:
        self._spec = spec
        self._elastic = spec.elastic
        self._rendezvous_port = rendezvous_port
        hosts: Sequence[Host] = spec.hosts
        if spec.elastic is None:
            least = needed(spec.hosts, spec.np, spec.slots_per_host, spec.map_by)
            # Any host may have the free GPUs.
            hosts = hosts if spec.skip_bad_hosts or spec.leases is not None else least
        self.waits = Waits()
        self._pool = Pool(hosts, spec.slots_per_host, self.waits, spec.gpus_per_worker)
        self._rounds = Rounds(spec, self._pool, self.waits)
        self._hearing = Hearing(spec.lease)
        is_elastic = spec.elastic is not None
        self._health = (
            Health(spec.elastic, self._hearing, self._rounds, self.waits)
            if spec.elastic is not None
            else None
        )
        self._overdue = Overdue(self._rounds.workers, self._hearing, self.waits, is_elastic=is_elastic)
        self._draining = Draining(spec, self._pool, self._rounds, self.waits)
        self._lifecycle = Lifecycle(spec, self._pool, self._rounds)
        self._policy = Policy(spec, self._pool, self._rounds, self._lifecycle, self._health, self.waits)
        self._is_pool_known = spec.elastic is None or not spec.elastic.discovers
        self._resumed_at = -inf
        """Time of the driver's last continuation after a stop."""
        self._discovery_error = ""
        self._has_released = False
        self._group = GroupStates()
        self.deadline: float | None = None
        self._due: float | None = None
        """The deadline without the look for silent workers."""
        self.is_idle = False
        """True if the last event changed only what idle_summary() contains."""

    @property
    def phase(self) -> Phase:
        """The job's phase."""
        return self._lifecycle.phase

    @property
    def hang(self) -> on.JobHangs | None:
        """The newest report of a hang, as long as the job hangs."""
        return self._policy.hang

    def move_refusal(self, host: str, to: str | None, now: float) -> str | None:
        """Return why a host's workers can't move to another now, if so."""
        return self._policy.move_refusal(host, to, now)

    @property
    def workers(self) -> Workers:
        """The living workers."""
        return self._rounds.workers

    @property
    def pool(self) -> Pool:
        """The pool of hosts."""
        return self._pool

    @property
    def round(self) -> Round | None:
        """The newest round."""
        return self._rounds.round

    def handle(self, event: on.Event, now: float) -> list[Action]:
        """Return the actions for `event` at `now` (seconds of the driver's clock)."""
        self.is_idle = False
        # A beat needs no full turn. With thousands of workers they are nearly all events.
        if isinstance(event, on.WorkerBeat | on.WorkerStarted | on.WorkerAlone):
            return self._life_sign(event, now)
        if isinstance(event, on.Lull):
            timeout = self._elastic and self._elastic.commit_timeout
            # Only a replay sees this event: it must set all that the idle turns had set.
            apply_idle_summary(event, self._rounds, self.waits, timeout or inf)
            self._due, self.deadline, self.is_idle = event.due, event.deadline, True
            return []
        # A look for silent workers that finds none is idle, although the deadline was due.
        due = self._due if self._goes_on else self.deadline
        is_early = isinstance(event, on.Tick) and (due is None or now < due)
        before = idle_tally(self.waits) if is_early else None
        actions = self._follow(self._decide(event, now), now)
        # An event may come first when a wait is over: the tick is not awaited then.
        if self.deadline is not None and now >= self.deadline:
            actions += self._follow(self._decide_on_waits(now), now)
        self.deadline = self._next_deadline(now)
        if self._elastic is not None:
            has_workers = self._rounds.workers.size > 0
            self._group.add_to(actions, self._lifecycle.final, self._rounds.round, has_workers=has_workers)
        self.is_idle = is_early and not actions and before == idle_tally(self.waits)
        return actions

    def handle_or_end(self, event: on.Event, now: float) -> list[Action]:
        """Like handle(); but end the job in order if the engine's own records are contradictory, a defect of hvlaunch."""
        try:
            return self.handle(event, now)
        # Workers must not outlive a defect of the engine, so the job still ends in order.
        except (InvalidTransition, InvalidHostStep) as defect:
            actions = self._lifecycle.end_for(defect.problem, now)
        self.deadline = self._next_deadline(now)
        return actions

    def _decide(self, event: on.Event, now: float) -> Decision:
        """Note the event, and decide what to do about it. `then` of the decision says what follows; _follow() does that."""
        match event:
            case on.Interrupted(number):
                return alone(self._lifecycle.interrupt(number, now))
            case on.ThreadFailed(problem):
                return alone([] if self.phase is Phase.DONE else self._lifecycle.end_for(problem, now))
            case on.UserSignal(number):
                return alone(do.Signal(host, number) for host in self._lifecycle.hosts_with_workers())
            case on.StacksTaken(name, number):
                return alone(self._rounds.stacks.taken(name, number, now))
            case on.MoveWanted():
                return self._policy.move(event, now)
            case on.HostJudged():
                return self._policy.host_judged(event, now)
            case on.JobHangs() | on.JobGoesOn():
                return self._policy.judged(event, now)
            case on.WorkerAsked() | on.WorkerSuspended():
                return self._policy.worker_event(event, now)
            case on.WorkerExited() | on.WorkerNotStarted():
                return self._policy.worker_ended(event, now)
            case on.HostQuiet() | on.HostAnswers():
                self._hearing.hears(event, now)
                self._rounds.hears(event)
                host = self._pool.get(event.host) if isinstance(event, on.HostAnswers) else None
                return Decision(then=Then.ROUND) if host is None else self._policy.answers(host, now)
            case on.HostSuspected(name, seconds):
                host = self._pool.get(name)
                return Decision(then=Then.NOTHING) if host is None else self._policy.suspects(host, seconds)
            case on.HostAway() | on.HostBack():
                self._rounds.probing.hears(event)
                return Decision(then=Then.ROUND)
            case on.DriverReplaced(seconds) | on.DriverStopped(seconds):
                # A driver that is late in every turn must still reach its time limits:
                # only half of its waking time may be given back.
                awake, self._resumed_at = now - seconds - self._resumed_at, now
                self._prolong(seconds + min(_RESUMING, max(0.0, awake) / 2), now)
                if isinstance(event, on.DriverReplaced):
                    # A successor opens these connections itself, from the beginning.
                    self._pool.connect_anew(now + self._spec.start_timeout + _START_MARGIN)
                    # The successor asks each host anew for a sign of life.
                    return self._answer_all(now)
            case on.StepReached(number):
                self._rounds.note_step(number)
            case on.MasterPort(name, port, more):
                host = self._pool.get(name)
                if host is not None and host.facts is not None:
                    host.facts = host.facts._replace(master_port=port, more_ports=more)
            case on.Began() | on.HostsDiscovered() | on.DiscoveryFailed():
                return self._pool_event(event, now)
            case on.Tick() | on.HostStage() | on.Lull():
                pass
            case _:
                host = self._pool.get(event.host)
                if host is not None and host.state is not HostState.NONE:
                    return self._host_event(host, event, now)
        return Decision(then=Then.NOTHING)

    def _answer_all(self, now: float) -> Decision:
        """Suspect no host any more."""
        decision = Decision(then=Then.NOTHING)
        for host in self._pool:
            if host.silent_for is not None:
                decision = decision.also(self._policy.answers(host, now))
        return decision

    # The pool

    def _pool_event(self, event: on.Began | on.HostsDiscovered | on.DiscoveryFailed, now: float) -> Decision:
        match event:
            case on.Began():
                if self._lifecycle.has_begun:
                    return Decision(then=Then.NOTHING)
                self._lifecycle.has_begun = True
                if self._elastic is None:
                    return alone(self._connect(self._pool, now))
                if not self._is_pool_known:
                    by = now + self._elastic.discovery_timeout + _LIST_MARGIN
                    self.waits.begin(Wait.FIRST_LIST, None, by)
                return Decision()
            case _ if self._elastic is None or not self._elastic.discovers:
                return Decision(then=Then.NOTHING)
            case on.HostsDiscovered(hosts):
                return self._discovered(hosts)
            case on.DiscoveryFailed(problem):
                return self._discovery_failed(problem)

    def _discovered(self, hosts: Sequence[Host]) -> Decision:
        self._discovery_error = ""
        # An empty list is more likely a mistake of the script than a wish to end the job.
        if not hosts and self._is_pool_known:
            return alone([tell.PoolEmpty(keeps_hosts=True)])
        actions: list[Action] = [] if hosts else [tell.PoolEmpty(keeps_hosts=False)]
        self._is_pool_known = True
        self.waits.end(Wait.FIRST_LIST)
        self._pool.update(hosts)
        self._rounds.changed()
        return Decision(actions)

    def _discovery_failed(self, problem: Problem) -> Decision:
        self.waits.end(Wait.FIRST_LIST)
        if not self._is_pool_known:
            return Decision((), Ending(error=problem), then=Then.NOTHING)
        # The script runs repeatedly; the same error is reported once.
        if str(problem) == self._discovery_error:
            return Decision(then=Then.NOTHING)
        self._discovery_error = str(problem)
        return alone([tell.KeepingHosts(problem)])

    def _connect(self, hosts: Iterable[PoolHost], now: float) -> list[Action]:
        due = now + self._spec.start_timeout + _START_MARGIN
        actions: list[Action] = []
        for host in hosts:
            self._pool.connect(host, due)
            actions.append(do.Connect(host.host))
        return actions

    def _tend_pool(self, now: float) -> list[Action]:
        """Connect to the hosts that are needed, and release the others."""
        usable = self._policy.needed_hosts(now)
        actions = self._connect([host for host in usable if host.state is HostState.NONE], now)
        names = {host.name for host in usable}
        for host in self._pool:
            if host.state is not HostState.READY or self._rounds.workers.on(host.name):
                continue
            if host.name not in names and (self.phase is Phase.RUNNING or not host.is_usable(now)):
                actions += self._lifecycle.release(host, now)
        return actions

    # Hosts

    def _host_event(self, host: PoolHost, event: on.Event, now: float) -> Decision:
        actions: list[Action] = []
        match event:
            case on.HostReady(_, facts) if host.state is HostState.CONNECTING:
                return self._ready(host, facts, now)
            case on.RendezvousReached(name, address, tried, relay_port):
                host.has_tried_rendezvous = True
                host.rendezvous = None if address is None else (address, relay_port or self._rendezvous_port)
                if address is None:
                    actions = [tell.RendezvousUnreachable(name, tried, self._rendezvous_port)]
                self._rounds.reached(name)
                return Decision(actions)
            case on.HostProbed():
                self._rounds.probing.add(event)
                return Decision(then=Then.ROUND)
            case on.HostFailed(_, problem) | on.HostGone(_, problem):
                return self._host_failed(host, problem, now)
            case on.HostParting(_, problem) if host.state is HostState.READY:
                return self._parting(host, problem, now)
            case on.HostClosed(_, remaining, pids):
                actions = [tell.HostLeftOver(host.name, remaining, pids)] if remaining else []
                # An agent may close when it was released, or has announced its end. Otherwise its workers are lost.
                if host.state in (HostState.CONNECTING, HostState.READY):
                    return Decision(actions).also(self._host_failed(host, gone_unasked(host.name), now))
                self._gone(host, now)
                return Decision(actions)
            case on.HostConnected():
                host.is_connected = True
            case on.HostPreparing() if host.state in (HostState.CONNECTING, HostState.CLOSING):
                self._pool.prepares(host, now)
            case _:
                pass
        return Decision(then=Then.NOTHING)

    def _ready(self, host: PoolHost, facts: on.HostFacts, now: float) -> Decision:
        self._pool.ready(host, facts)
        if facts.peer_address is None:  # the driver's own machine reaches it by loopback, and tries nothing
            host.rendezvous, host.has_tried_rendezvous = (LOOPBACK, self._rendezvous_port), True
        actions: list[Action] = []
        if facts.trouble is not None:
            actions.append(tell.KernelLacks(host.name, facts.trouble))
        problem = unfit(host.name, facts, self._pool.slots(host), self._spec)
        if problem is not None:
            self._pool.errors[host.name] = problem
            actions += self._policy.host_failed(host, problem, now)
        self._rounds.changed()
        return Decision(actions)

    def _host_failed(self, host: PoolHost, problem: Problem, now: float) -> Decision:
        """Handle a host that did not get ready, or was ready and is lost."""
        # The state counts before the host is forgotten below.
        before = host.state
        if before is not HostState.CLOSING:
            self._pool.errors[host.name] = problem
        if self.phase in (Phase.CLOSING, Phase.DONE) or before is HostState.CLOSING:
            decision = Decision([tell.HostLostAtEnd(problem)])
        elif host.has_agent:
            decision = self._lost(host, problem, now)
        else:
            decision = Decision(self._policy.host_failed(host, problem, now))
        self._gone(host, now)
        return decision

    def _gone(self, host: PoolHost, now: float) -> None:
        """Forget the connection to a host, and its workers."""
        self._pool.gone(host)
        self._rounds.workers.lose(host.name, now)
        if self.phase in AT_WORK:
            self._rounds.lost(host.name)

    def _lost(self, host: PoolHost, problem: Problem, now: float) -> Decision:
        if self.phase in AT_WORK and host.state is not HostState.PARTING:
            return self._policy.host_lost(host, problem, now)
        return Decision([tell.HostLostAtEnd(problem)] if self._lifecycle.ending.error is None else [])

    def _parting(self, host: PoolHost, problem: Problem, now: float) -> Decision:
        self._lifecycle.parting(host, now)
        self._pool.errors[host.name] = problem
        if self.phase in AT_WORK:
            return self._policy.host_lost(host, problem, now)
        self._policy.agent_ends(host.name, now)
        return alone([tell.HostLostAtEnd(problem)])

    def _start_timed_out(self, host: PoolHost, now: float) -> list[Action]:
        problem = no_start(host.name, self._spec.start_timeout, is_connected=host.is_connected)
        self._pool.gone(host)
        self._pool.errors[host.name] = problem
        return [do.Abandon(host.name), *self._policy.host_failed(host, problem, now)]

    # Workers

    def _life_sign(
        self, event: on.WorkerBeat | on.WorkerStarted | on.WorkerAlone, now: float
    ) -> list[Action]:
        """Handle the thousands of events without actions."""
        worker = self._rounds.workers.find((event.host, event.slot), event.start)
        if worker is None:
            return []
        if isinstance(event, on.WorkerStarted):
            self._rounds.started(worker)
        elif isinstance(event, on.WorkerAlone):
            self._rounds.is_alone(worker, event.library)
        elif worker.is_done and not event.is_done:
            # The network held back an old beat until after the last one. Another training begins with a request.
            self.is_idle = self._goes_on
        elif self._health is not None and self.phase in AT_WORK:
            due = self._health.beat(worker, event.commit, now, is_last=event.is_last)
            self.is_idle = not self._rounds.beat(worker, event) and self._goes_on
            self.deadline = due if self.deadline is None else min(self.deadline, due)
        return []

    # What follows

    def _follow(self, decision: Decision, now: float) -> list[Action]:
        """Return a decision's actions, and those that the new situation needs then. The only way from an event to the next round."""
        actions = [*decision.actions]
        # A job that is ending already keeps its first reason.
        if self.phase in AT_WORK and decision.ending is not None:
            return actions + self._lifecycle.end_early(decision.ending, now)
        if self.phase in AT_WORK and decision.is_done:
            self._lifecycle.phase = Phase.FINISHING
        if decision.then is Then.NOTHING:
            return actions
        return actions + self._proceed(now, is_minor=decision.then is Then.ROUND)

    def _proceed(self, now: float, *, is_minor: bool = False) -> list[Action]:
        """Take the next steps in this situation. `is_minor`: hosts and workers did not change."""
        if self.phase not in AT_WORK:
            return self._lifecycle.close_if_over(now) + self._lifecycle.finish_if_closed()
        decision = Decision()
        # Excluding one of two hosts may allow another plan at once.
        while decision.ending is None:
            step, problem = self._advance(now, is_minor=is_minor)
            decision = decision.also(step)
            if problem is None:
                break
            decision = decision.also(self._policy.blame(problem, now))
            is_minor = False
        actions = [*decision.actions]
        if decision.ending is not None:
            return actions + self._lifecycle.end_early(decision.ending, now)
        return actions + self._lifecycle.close_if_over(now)

    def _advance(self, now: float, *, is_minor: bool) -> tuple[Decision, Problem | None]:
        """Work towards the next round; also return why no round is possible, if that is certain."""
        if self._elastic is None:
            # All connections are awaited, so that the report names every bad host.
            is_hopeless = bool(self._pool.errors) and not self._spec.skip_bad_hosts
            if is_hopeless and not self._pool.connecting and not self._rounds.has_begun:
                return Decision((), Ending(error=self._pool.failure)), None
            settled = self._rounds.settle(now)
            return Decision([*settled.actions, *self._note_start(now)]), settled.problem
        if not self._is_pool_known:
            return Decision(), None
        actions: list[Action] = []
        if not is_minor:
            # A move decides which workers have to leave.
            actions += [*self._policy.advance_move(now), *self._policy.pardon(now)]
            actions += [*self._policy.set_aside(now), *self._draining.go_on(now)]
        settled = self._rounds.settle(now)
        actions += [*settled.actions, *self._note_start(now), *self._policy.finish_move(now)]
        if is_minor:
            return Decision(actions), settled.problem
        actions += self._rounds.fill(now) + self._tend_pool(now)
        hopeless = self._policy.hopeless() if settled.problem is None else None
        return Decision(actions, hopeless), settled.problem

    def _note_start(self, now: float) -> list[Action]:
        """Release the unused hosts of a static job once its round is planned, and note the start."""
        current = self._rounds.round
        if current is not None:
            self._lifecycle.phase = Phase.RUNNING
        if self._elastic is not None or self._has_released:
            return []
        used = set(self._rounds.next_hosts if current is None else current.hosts)
        # Hosts that were not needed so far may replace one that fails before the start.
        may_replace = current is None and self._spec.skip_bad_hosts  # others may have to take a host's place
        if not used or may_replace:
            return []
        self._has_released = True
        return self._lifecycle.let_go([host for host in self._pool if host.name not in used], now)

    # Time

    def _prolong(self, seconds: float, now: float) -> None:
        """Extend all waits: for `seconds` the driver could neither hear nor do anything."""
        self.waits.prolong(seconds)
        self._rounds.probing.forget_silence()
        self._hearing.hears_all(now)

    def _decide_on_waits(self, now: float) -> Decision:
        """Decide what to do about the waits that are over."""
        actions: list[Action] = []
        for host in self._pool.late(Wait.CONNECTING, now):
            actions += self._start_timed_out(host, now)
        # Their agents end by themselves, without the driver, so nothing of them is left.
        late = [*self._pool.late(Wait.PARTING, now), *self._pool.late(Wait.CLOSING, now)]
        for host in late:
            self._gone(host, now)
        actions += self._lifecycle.give_up_closing([host.name for host in late]) if late else []
        decision = Decision(actions)
        if self.waits.is_over(Wait.FIRST_LIST, now):
            decision = decision.also(self._discovery_failed(no_list()))
        if self.phase is Phase.RUNNING and self.waits.is_over(Wait.SETTLING, now):
            decision = decision.also(self._policy.settle(now))
        if self.phase is Phase.RUNNING and decision.ending is None:
            decision = decision.also(self._policy.restart(now))
        decision = decision.also(self._policy.watch(now))
        return decision.also(Decision(self._give_up_stuck(now)))

    def _give_up_stuck(self, now: float) -> list[Action]:
        """Give up waiting for workers that survive SIGKILL: their hosts are lost, or report them when they close."""
        actions: list[Action] = []
        for name in self._overdue.hosts(now) if self.phase in WITH_WORKERS else ():
            if self.phase in AT_WORK:
                # Another round can start on the other hosts only if this one is given up.
                lost = self._host_failed(self._pool[name], stuck(name), now)
                actions += [do.Abandon(name), *self._follow(lost, now)]
            else:
                self._rounds.workers.lose(name, now)
                actions.append(tell.HostLostAtEnd(stuck(name)))
        return actions

    @property
    def _goes_on(self) -> bool:
        """True if an elastic job's round runs: idle turns may be compacted."""
        return self._health is not None and self.phase is Phase.RUNNING and self._rounds.is_running

    def idle_summary(self) -> on.Lull:
        """Return an event for the newest run of idle turns."""
        return idle_summary(self._rounds, self.waits, self._due, self.deadline)

    def _next_deadline(self, now: float) -> float | None:
        self._due = None
        if self.phase is Phase.DONE:
            return None
        # Before the deadline: both change what is waited for.
        self._overdue.plan_look(now)
        self.waits.forget_over(Wait.COOLDOWN, now)
        self._due = self.waits.next(self._open_waits(), now)
        if self.phase not in AT_WORK:
            return self._due
        look = self.waits.until(Wait.SILENCE_LOOK)
        return min((due for due in (self._due, look) if due is not None), default=None)

    def _open_waits(self) -> Iterator[Wait]:
        """Return the waits that count in this situation, except looks for silent workers. Other waits may count again later."""
        yield from ALWAYS
        if self.phase in AT_WORK:
            yield from AT_WORK_ALWAYS
            yield from self._rounds.open_waits()
            if self._health is not None and self._health.may_lack_commits:
                yield Wait.COMMIT
