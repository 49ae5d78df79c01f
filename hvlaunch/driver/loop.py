"""The loop: events off one queue, into the engine, and what it wants carried out."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from hvlaunch.console.printer import Printer
from hvlaunch.driver.links.agent_channel import AgentConnection
from hvlaunch.driver.links.host_link import HostLink
from hvlaunch.driver.links.lease import Lease, patience_alone
from hvlaunch.driver.links.links import HostLinks
from hvlaunch.driver.observing.clues import Clues
from hvlaunch.driver.observing.hang_watch import HangWatch
from hvlaunch.driver.observing.inquiry import Inquiry, Observe, StacksWanted
from hvlaunch.driver.observing.observers import Observers
from hvlaunch.driver.observing.progress import Progress
from hvlaunch.driver.observing.stack_taking import StackTaking
from hvlaunch.driver.program.keys import Keys
from hvlaunch.driver.program.start_frame import gets_stdin, start_frame
from hvlaunch.driver.stdin import StdinPump
from hvlaunch.driver.turn import Arrival, Turn
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.engine import Engine
from hvlaunch.errors import BadUsage, HostLost
from hvlaunch.job import ElasticOptions, Host, JobResult, JobSpec
from hvlaunch.rendezvous.serving.server import RendezvousServer
from hvlaunch.watch.narrator import Narrator
from hvlaunch.watch.rounds import Ranks

if TYPE_CHECKING:
    from hvlaunch.console.files import JobFolder
    from hvlaunch.driver.links.takeover import Takeover
    from hvlaunch.driver.observing.observation import Observation
    from hvlaunch.driver.record.keeping import Keeping
    from hvlaunch.driver.record.turn_keeping import TurnKeeping
    from hvlaunch.driver.worker_messages import Message, WorkerMessages
    from hvlaunch.hosts.discovery import Discovery

__all__ = ["Driver", "Item", "Watcher"]


Item: TypeAlias = on.Event | Arrival | Inquiry | Observe | StacksWanted
"""What comes by the driver's queue."""

Watcher: TypeAlias = "Callable[[on.Event, Sequence[do.Action], float], None]"
"""Sees each event, what the engine made of it before that is carried out, and the time."""

_FIRST_PING = 1.0
"""Seconds in which hosts hear from us in any case, and short jobs end."""
_PULSES_PER_WORKER_TIMEOUT = 8
"""So it is known of a silent host before one of its workers has been silent for too long."""
_MOST_AT_ONCE = 256
_LATE = 5.0
"""Seconds after which a turn that comes late means that this process was stopped itself."""
_KEPT_WITHIN = 0.05
"""Seconds in which is on record of what nothing follows."""


class Driver:
    """Runs one job with the engine, the links to the hosts, and a console. `connect` makes connections. `wall` tells when
    what is seen was, in seconds since 1970.

    `record` takes records for --events; `watchers` see all before anybody else does; `keeping` keeps what another
    driver needs to take the job over; `directory` is the job's.
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
        directory: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._spec = spec
        self._events = events
        self._printer = printer
        self._rendezvous = rendezvous
        self._keys = keys
        self._stdin = stdin
        self._clock = clock
        self._keeping = keeping
        self._engine = Engine(spec, rendezvous.port)
        self._ranks = Ranks()
        self._past: Takeover | None = None
        self._told: list[Message] = []
        """What workers that ask for their places were told by a driver before us."""
        self._began_last: Sequence[do.Start] = ()
        """The newest workers that it began to start together."""
        self._is_replaying = False
        """What happens has happened to a driver before us, which has carried out what follows of it."""
        self._watchers = [*watchers, Narrator(spec, self._say, printer.status, clock).see]
        if record is not None:
            from hvlaunch.watch.recorder import Recorder  # noqa: PLC0415 (few jobs have one)

            self._watchers.append(Recorder(spec, keys.job_id, record, self._ranks.of, wall).see)
        self._worker_messages = (
            None if spec.elastic is None else _worker_messages(rendezvous, events.put, self._ranks)
        )
        self._discovery = None if spec.elastic is None else _host_discovery(spec.elastic, events.put)
        self._links = HostLinks(
            spec, keys, printer, rendezvous, self._ranks, connect, events.put, clock=clock, keeping=keeping
        )
        self.observers = Observers(lambda: self._links, self._ranks.of, clock)
        tell = None if spec.elastic is None else self._say
        clues = Clues(self._ranks.of, printer.tail, lambda: self.observation)
        self.stacks = StackTaking(self.observers, directory, self._engine, events.put, tell, clues)
        self._progress = Progress(rendezvous, lambda *worker: self._ranks.of(*worker) is not None, clock)
        self.directory, self.rank_of = directory, self._ranks.of
        self._hang_watch = HangWatch(
            spec.hang_timeout,
            self._links,
            self._ranks,
            self._progress,
            self._reading,
            events.put,
            self.observers,
            clock,
            say=self._say,
        )
        self._watchers.append(self._hang_watch.see)
        self._turn_keeping = None if keeping is None else self._keep_turns(keeping)
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
        self._lease = Lease(spec.lease, clock() + _FIRST_PING, pulse=pulse)
        self._quiet: set[str] = set()
        """Hosts that the engine knows to be."""
        self._result: JobResult | None = None

    @cached_property
    def observation(self) -> "Observation":
        """What the hosts do; nothing is asked before somebody subscribes."""
        from hvlaunch.driver.observing.observation import Observation  # noqa: PLC0415 (when somebody asks)

        return Observation(self.observers, self._spec.cwd, self._clock)

    def run(self) -> JobResult:
        """Take events until the engine has finished. Leaves no connection open, whatever happens."""
        try:
            if self._past is None:
                self._begin()
            else:
                self._go_on(self._past)
            self._progress.open()
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
            self._hang_watch.end()
            self._links.close()
            if self._job_folder is not None:
                self._job_folder.close()
        return self._result

    def _begin(self) -> None:
        if self._worker_messages is not None:
            self._worker_messages.open()
        began = self._decide([on.Began()])
        self._carry_out_all(began)
        if self._keeping is not None:
            self._printer.keep_unfinished(self._keeping.unfinished)
        self._keep(began)

    def take_over(self, takeover: "Takeover") -> None:
        """Be where the driver was that has written this journal: run() goes on from there. Raises OtherVersion."""
        self._past = takeover
        self._is_replaying = True
        for number, turn in takeover.turns():
            actions = self._engine.handle_or_end(turn.event, turn.at)
            takeover.check(number, actions)
            self._ranks.see(actions)
            for watch in self._watchers:
                watch(turn.event, actions, turn.at)
            self._links.remember(turn, takeover.past.hellos)
            for action in actions:
                self._carry_out(action)
            self._began_last = _starts(actions) or self._began_last
        self._is_replaying = False

    def _go_on(self, takeover: "Takeover") -> None:
        """Do what a driver that was killed may not have come to, and take up the sessions."""
        if self._keeping is not None:
            self._keeping.go_on(takeover.past, takeover.epoch, takeover.shift)
        self._open_to_horovod(self._began_last)
        self._readers.clear()  # whoever reads stdin has got its end
        self._printer.place(self._ranks.places())
        if self._keeping is not None:
            unfinished = self._keeping.unfinished
            self._printer.begun(unfinished.read(), lambda _: unfinished.forget())
        if self._worker_messages is not None:
            self._worker_messages.carry_out_again(self._told)
            self._worker_messages.open(takeover.past.version)
        if self._files_of is not None and self._result is None:
            try:
                self._open_files(self._files_of, goes_on=True, is_known=takeover.is_same_boot)
            except BadUsage as error:
                self._printer.say(str(error))
        self._links.take_up(takeover)
        if self._result is None:
            replaced = self._decide([on.DriverReplaced(self._clock() - takeover.past.turns[-1].at)])
            self._keep(replaced)
            self._carry_out_all(replaced)

    def _say(self, text: str) -> None:
        if not self._is_replaying:
            self._printer.say(text)

    def _next_items(self) -> list[Item]:
        """What waits in the queue, or a Tick; nothing where it is only time to put on record what was decided."""
        deadline = self._lease.deadline
        if self._engine.deadline is not None:
            deadline = min(deadline, self._engine.deadline)
        patience = max(0.0, deadline - self._clock())
        is_unkept = self._turn_keeping is not None and self._turn_keeping.is_waiting
        items: list[Item] = []
        with suppress(Empty):
            items.append(self._events.get(timeout=min(patience, _KEPT_WITHIN) if is_unkept else patience))
            while len(items) < _MOST_AT_ONCE:
                items.append(self._events.get_nowait())
        if (late := self._clock() - deadline) > _LATE:
            items.insert(0, on.DriverStopped(late))
        if not items and (not is_unkept or patience <= _KEPT_WITHIN):
            items.append(on.Tick())
        return items

    def _decide(self, items: Sequence[Item]) -> list[Turn]:
        """What the engine makes of these, one after the other."""
        turns: list[Turn] = []
        for item in items:
            if isinstance(item, StacksWanted):
                self.stacks.take(item)
                continue
            if isinstance(item, Inquiry):
                from hvlaunch.watch.overview import overview  # noqa: PLC0415 (when somebody asks)

                item.answer(overview(self._engine, self._clock(), self._progress.of))
                continue
            if isinstance(item, Observe):
                item.answer(self.observation)
                continue
            arrival = item if isinstance(item, Arrival) else Arrival(item)
            if isinstance(arrival.event, on.WorkerAlone) and self._rendezvous.was_asked:
                arrival.settle()
                continue
            if self._is_for_watchers(arrival.event):
                turns.append(Turn(self._clock(), arrival, (), is_decided=False))
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
        return Turn(now, arrival, actions, is_idle=self._engine.is_idle)

    def _show(self, turns: Sequence[Turn]) -> None:
        """Nobody is told what is not on record: whoever takes the job over would tell it again."""
        for turn in turns:
            for watch in self._watchers:
                watch(turn.arrival.event, turn.actions, turn.at)

    def _is_for_watchers(self, event: on.Event) -> bool:
        """Whether it changes nothing; else it may be time for the engine to look at its clock."""
        deadline = self._engine.deadline
        return isinstance(event, on.HostStage) and (deadline is None or self._clock() < deadline)

    def _keep_turns(self, keeping: "Keeping") -> "TurnKeeping":
        from hvlaunch.driver.record.turn_keeping import TurnKeeping  # noqa: PLC0415 (not for a local job)

        begin = partial(keeping.begin, self._spec, self._keys, self._rendezvous.port)
        return TurnKeeping(keeping, self._engine, begin, self._show)

    def _keep(self, turns: Sequence[Turn]) -> None:
        if self._turn_keeping is None:
            self._show(turns)
        else:
            self._turn_keeping.keep(turns)

    def _carry_out_all(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            starts = _starts(turn.actions)
            self._expect(starts)
            self._open_to_horovod(starts)
            self.stacks.carry_out(turn.arrival.event, turn.actions)
            for action in turn.actions:
                self._carry_out(action)
            if starts and self._readers:
                self._feed_stdin()

    def _keep_alive(self) -> None:
        """Let the agents hear from us, and give up those that are silent for the lease."""
        now = self._clock()
        if now < self._lease.deadline:
            return
        links = {link.host.name: link for link in self._links if not (link.is_closed or link.has_parted)}
        heard = {name: link.last_heard for name, link in links.items() if link.last_heard is not None}
        is_due, silent = self._lease.look(heard, lambda name: links[name].last_acknowledged, now)
        for name in silent:
            cause = f"lost: silent for {self._spec.lease:g} s (--lease)"
            hint = f"ping {name}: the host is down, or the network is cut"
            self._events.put(on.HostGone(name, HostLost(cause, host=name, hint=hint).problem))
            links[name].close()
        self._tell_quiet()
        if is_due:
            patience = (
                None if self._keeping is not None and self._keeping.is_whole else patience_alone(self._spec)
            )
            for name in heard.keys() - silent:
                links[name].ping(patience)
            for link in self._links:
                link.let_go()
            for name in set(self._lease.doubtful) - set(silent):
                links[name].renew()

    def _tell_quiet(self) -> None:
        """Let the engine know of whom it can't hear that their workers live, or have ended."""
        quiet = self._lease.quiet
        for name in sorted(quiet ^ self._quiet):
            self._events.put(on.HostQuiet(name) if name in quiet else on.HostAnswers(name))
        self._quiet = quiet

    def _carry_out(self, action: do.Action) -> None:
        match action:
            case do.Connect(host):
                link = self._links.add(host)
                if not self._is_replaying:
                    link.open()
            case do.Probe():
                self._links.probe(action)
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
            case do.Finish(result):
                self._result = result
            case _:
                pass  # facts and group states are for those who look on

    def _expect(self, starts: Sequence[do.Start]) -> None:
        """Once for all hosts of a round: it is put on record."""
        for facts in {id(start.facts): start.facts for start in starts}.values():
            self._rendezvous.expect([address for own in facts.addresses.values() for address in own])

    def _open_to_horovod(self, starts: Sequence[do.Start]) -> None:
        if starts and self._spec.horovod:
            from hvlaunch.driver.worker_messages import let_in  # noqa: PLC0415 (few jobs have such workers)

            let_in(starts, self._rendezvous)

    def _start(self, start: do.Start) -> None:
        self._keep_files(start.round, start.launches[0].place.size)
        link = self._links[start.host]
        if not self._is_replaying:
            self.stacks.prepare(self._clock())
        for launch in start.launches:
            if gets_stdin(launch.place, self._spec):
                self._readers.append((link, launch.slot, launch.place.rank))
        link.send(*start_frame(start, self._spec, job_id=self._keys.job_id, keys=self._keys))

    def _reading(self) -> list[int]:
        """The ranks that what comes by stdin goes to."""
        has_ended = self._stdin_pump is None or self._stdin_pump.has_ended
        return [] if has_ended else [rank for _, _, rank in self._readers]

    def _tell(self, action: "Message") -> None:
        """Pass on what is for workers that ask for their places."""
        if isinstance(action, do.Assign):
            self._keep_files(action.round, action.launch.place.size)
        if self._is_replaying:
            self._told.append(action)
        elif self._worker_messages is not None:
            self._worker_messages.carry_out(action)

    def _keep_files(self, number: int, size: int) -> None:
        """From here on output goes to files of this round. Raises BadUsage where those of the first can't be made."""
        self.size = size
        if self._spec.output_dir is None or self._files_of == number:
            return
        is_first, self._files_of = self._files_of is None, number
        if not self._is_replaying:
            try:
                self._open_files(number)
            except BadUsage as error:
                if is_first:
                    raise
                self._printer.say(str(error))

    def _open_files(self, number: int, *, goes_on: bool = False, is_known: bool = False) -> None:
        """Those of this round; where a driver before us has written there, behind what it has. Raises BadUsage.

        `is_known`: it is on record how much that was.
        """
        if self._spec.output_dir is None:
            return
        if self._job_folder is None:
            self._job_folder = _job_folder(
                self._spec.output_dir, self._keys.job_id, goes_on=self._past is not None
            )
        below = "" if self._spec.elastic is None else f"round.{number}"
        sizes = None if self._keeping is None else self._keeping.sizes(number, self.size, is_known=is_known)
        self._printer.keep(self._job_folder.files(self.size, below, sizes=sizes, goes_on=goes_on))
        self.output_dir = self._job_folder.path / below

    def _feed_stdin(self) -> None:
        """Pass stdin on to the workers that get it."""
        readers = self._readers

        def sender(link: HostLink, slot: int) -> Callable[[bytes], None]:
            return lambda data: link.send({"type": "stdin", "slot": slot}, data)

        if os.isatty(self._stdin):
            self._printer.read_by([rank for _, _, rank in readers])
        targets = [sender(link, slot) for link, slot, _ in readers]
        pump = StdinPump(self._stdin, targets, self._printer.answered, self._hang_watch.note_input)
        index = {(link.host.name, slot): number for number, (link, slot, _) in enumerate(readers)}
        for link, _, _ in readers:
            name = link.host.name
            link.stdin_taken = lambda slot, size, name=name: pump.taken(index[name, slot], size)  # type: ignore[misc]
        self._stdin_pump = pump
        pump.start()


def _starts(actions: Sequence[do.Action]) -> list[do.Start]:
    return [action for action in actions if isinstance(action, do.Start)]


def _job_folder(directory: Path, job_id: str, *, goes_on: bool) -> "JobFolder":
    from hvlaunch.console.files import JobFolder  # noqa: PLC0415 (few jobs have one)

    return JobFolder(directory, job_id, goes_on=goes_on)


def _worker_messages(
    rendezvous: RendezvousServer, post: Callable[[Arrival], None], ranks: Ranks
) -> "WorkerMessages":
    from hvlaunch.driver.worker_messages import WorkerMessages  # noqa: PLC0415 (only elastic jobs have one)

    return WorkerMessages(rendezvous, post, lambda *worker: ranks.of(*worker) is not None)


def _host_discovery(options: ElasticOptions, post: Callable[[on.Event], None]) -> "Discovery | None":
    """What finds hosts; None where the pool is what it is."""
    from hvlaunch.hosts.discovery import Discovery, host_source  # noqa: PLC0415 (few jobs are elastic)

    source = host_source(options)
    if source is None:
        return None
    return Discovery(
        source,
        lambda hosts: post(on.HostsDiscovered(tuple(hosts))),
        lambda error: post(on.DiscoveryFailed(error.problem)),
        interval=options.discovery_interval,
    )
