"""The driver's loop: it takes events off one queue, has the engine decide, and carries the actions out.

turn.py states the contract: the six steps of the loop, and the reasons for their order.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from hvlaunch.console.printer import Printer
from hvlaunch.driver.links.agent_channel import AgentConnection
from hvlaunch.driver.links.links import Heartbeat, HostLinks
from hvlaunch.driver.observing import (
    Collector,
    CollectWanted,
    Inquiry,
    MoveRequest,
    Observe,
    StacksWanted,
)
from hvlaunch.driver.observing.observing import Observing
from hvlaunch.driver.process import StdinFeed
from hvlaunch.driver.program import Keys
from hvlaunch.driver.program.start_frame import gets_stdin, start_frame
from hvlaunch.driver.turn import Arrival, Turn
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.engine import Engine
from hvlaunch.job import ElasticOptions, Host, JobResult, JobSpec
from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.watch.narrator import Narrator
from hvlaunch.watch.rounds import Ranks

if TYPE_CHECKING:
    from hvlaunch.console.notes import FileSizes
    from hvlaunch.driver.job_record import JobRecord, Takeover, TurnRecord
    from hvlaunch.driver.links.host_link import Prepare
    from hvlaunch.driver.worker_files import RoundFiles
    from hvlaunch.driver.worker_messages import Message, WorkerMessages
    from hvlaunch.hosts.discovery import Discovery

__all__ = ["Driver", "Item", "Watcher"]

Item: TypeAlias = on.Event | Arrival | CollectWanted | Inquiry | MoveRequest | Observe | StacksWanted
"""An entry of the driver's queue."""

Watcher: TypeAlias = "Callable[[on.Event, Sequence[do.Action], float], None]"
"""Called with each event, its actions before they are carried out, and the time."""

_MOST_AT_ONCE = 256
_LATE = 5.0
"""Seconds of delay of a turn from which the loop concludes: this process itself was stopped."""
_RECORDED_WITHIN = 0.05
"""Seconds in which a turn without actions is recorded."""


class _Replay:
    """A killed driver's turns, and its actions that this driver repeats at the end."""

    def __init__(self, takeover: "Takeover", lost: Callable[[Host], AgentConnection]) -> None:
        self.takeover = takeover
        self.lost = lost
        self.is_running = True
        self.messages: list[Message] = []
        """The messages to workers asking for their places."""
        self.released: list[str] = []
        """Hosts that were told to end, perhaps before all of their files had come."""
        self.newest_starts: Sequence[do.Start] = ()
        """The newest orders to start workers, of one turn."""


class Driver:
    """Runs one job with the engine, the links to the hosts, and a console. `connect` makes connections.

    `write_event` takes records for --events; `watchers` see each turn before the driver's own; `record` has the files for
    a takeover of the job; `directory` is the job's; `prepare` makes hosts ready for workers. `collector` returns
    what brings their files back. `wall` is the time in seconds since 1970.
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
        write_event: Callable[[Mapping[str, object]], None] | None = None,
        watchers: Sequence[Watcher] = (),
        record: "JobRecord | None" = None,
        directory: Path | None = None,
        prepare: "Prepare | None" = None,
        collector: Callable[[], Collector | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._spec = spec
        self._events = events
        self._printer = printer
        self._rendezvous = rendezvous
        self._keys = keys
        self._clock = clock
        self._record = record
        self._collector = collector
        self.directories: dict[str, str] = {}
        """The workers' directory on each host that had workers."""
        self._engine = Engine(spec, rendezvous.port)
        self.ranks = Ranks()
        self._replay: _Replay | None = None
        # The narrator stands behind the journal of HVLAUNCH_JOURNAL: a turn is written there before it is shown.
        self._watchers = [
            *watchers,
            Narrator(spec, self._say, printer.status, clock, printer.hide_tracebacks).watch,
        ]
        if write_event is not None:
            from hvlaunch.watch.recorder import Recorder  # noqa: PLC0415 (few jobs have one)

            self._watchers.append(Recorder(spec, keys.job_id, write_event, self.ranks.rank_of, wall).watch)
        self._worker_messages = (
            None if spec.elastic is None else _worker_messages(rendezvous, events.put, self.ranks)
        )
        self._discovery = None if spec.elastic is None else _host_discovery(spec.elastic, events.put)
        self._links = HostLinks(
            spec,
            keys,
            printer,
            rendezvous,
            self.ranks,
            connect,
            events.put,
            clock=clock,
            record=record,
            prepare=prepare,
            say=self._say,
        )
        self._stdin = StdinFeed(stdin, printer)
        self.observing = Observing(
            spec,
            self._links,
            self.ranks,
            self._engine,
            rendezvous,
            directory,
            events.put,
            clock,
            reading=lambda: self._stdin.reading,
            tail=printer.tail,
            say=self._say,
        )
        self._watchers.append(self.observing.hang_watch.watch)
        if self.observing.slow_watch is not None:
            self._watchers.append(self.observing.slow_watch.watch)
        if self.observing.bindings is not None:
            self._watchers.append(self.observing.bindings.watch)
        self._turns = None if record is None else self._turn_record(record)
        self._files = None if spec.output_dir is None else self._round_files(spec.output_dir)
        self._heartbeat = Heartbeat(
            spec, self._links, events.put, clock, lambda: record is not None and record.renew()
        )
        self._result: JobResult | None = None

    @property
    def size(self) -> int:
        """The number of workers in the last round."""
        return self.ranks.size

    @property
    def output_dir(self) -> Path | None:
        """The directory with the output of the last round; None without --output-filename."""
        return None if self._files is None else self._files.path

    def run(self) -> JobResult:
        """Take events until the engine has finished. Leaves no connection open, whatever happens."""
        try:
            if self._replay is None:
                self._begin()
            else:
                self._resume(self._replay)
            self.observing.progress.open()
            if self.observing.copies is not None:
                self.observing.copies.open()
            if self._discovery is not None:
                self._discovery.start()
            # The contract of the loop, step by step: turn.py.
            while self._result is None:
                turns = self._decide(self._next_items())
                recorded = self._record_turns(turns)
                self._show(recorded)
                self._acknowledge(recorded)
                self._carry_out_turns(turns)
                self._heartbeat.beat()
        finally:
            if self._discovery is not None:
                self._discovery.stop()
            self.observing.stop()
            self._links.close()
            if self._files is not None:
                self._files.close()
        return self._result

    def _begin(self) -> None:
        if self._worker_messages is not None:
            self._worker_messages.open()
        turns = self._decide([on.Began()])
        # First of all, connect: the files of the record are made while the hosts answer.
        self._carry_out_turns(turns)
        if self._record is not None:
            self._printer.keep_unfinished(self._record.unfinished)
        # Began comes from no frame: there is nothing to acknowledge.
        self._show(self._record_turns(turns))

    def take_over(self, takeover: "Takeover", lost: Callable[[Host], AgentConnection]) -> None:
        """Replay the journal of a killed driver; run() continues from its end. Raises OtherVersion.

        `lost` returns the lost connection to a host's agent.
        """
        replay = self._replay = _Replay(takeover, lost)
        if self._files is not None:
            self._files.is_successor = True
        for number, turn in takeover.turns():
            actions = self._engine.handle_or_end(turn.event, turn.at)
            takeover.check(number, actions)
            self.ranks.update(actions)
            for watch in self._watchers:
                watch(turn.event, actions, turn.at)
            self._links.remember(turn, takeover.past.hellos)
            for action in actions:
                self._carry_out(action)
            replay.newest_starts = _starts(actions) or replay.newest_starts
        replay.is_running = False

    def _resume(self, replay: _Replay) -> None:
        """Repeat actions that the killed driver may not have reached, and resume its sessions."""
        takeover = replay.takeover
        if self._record is not None:
            self._record.resume(takeover.past, takeover.epoch, takeover.shift)
        self._open_to_horovod(replay.newest_starts)
        self._stdin.drop_readers()
        self._printer.learn_places(self.ranks.places())
        if self._record is not None:
            unfinished = self._record.unfinished
            self._printer.begun(unfinished.read(), lambda _: unfinished.forget())
        if self._worker_messages is not None:
            self._worker_messages.carry_out_again(replay.messages)
            self._worker_messages.open(takeover.past.version)
        if self._files is not None and self._result is None:
            self._files.reopen(is_known=takeover.is_same_boot)
        # After the files and messages: the agents repeat output at once.
        self._links.take_up(takeover.epoch, replay.lost)
        for host in replay.released:
            self._release(host)
        if self._result is None:
            turns = self._decide([on.DriverReplaced(self._clock() - takeover.past.turns[-1].at)])
            recorded = self._record_turns(turns)
            self._show(recorded)
            self._acknowledge(recorded)
            self._carry_out_turns(turns)

    @property
    def _is_replaying(self) -> bool:
        """True while the turns of a killed driver are replayed: it has carried out their actions."""
        return self._replay is not None and self._replay.is_running

    def _say(self, text: str) -> None:
        if not self._is_replaying:
            self._printer.say(text)

    # The steps

    def _next_items(self) -> list[Item]:
        """Wait for entries of the queue. Returns a Tick at a deadline, and no entry if only waiting turns must be recorded."""
        deadline = self._heartbeat.deadline
        if self._engine.deadline is not None:
            deadline = min(deadline, self._engine.deadline)
        patience = max(0.0, deadline - self._clock())
        is_unrecorded = self._turns is not None and self._turns.is_waiting
        items: list[Item] = []
        with suppress(Empty):
            items.append(
                self._events.get(timeout=min(patience, _RECORDED_WITHIN) if is_unrecorded else patience)
            )
            # A bound, so that pings and records are not late however many events arrive.
            while len(items) < _MOST_AT_ONCE:
                items.append(self._events.get_nowait())
        if (late := self._clock() - deadline) > _LATE:
            items.insert(0, on.DriverStopped(late))
        if not items and (not is_unrecorded or patience <= _RECORDED_WITHIN):
            items.append(on.Tick())
        return items

    def _decide(self, items: Sequence[Item]) -> list[Turn]:
        """Have the engine handle the events, in order, and answer the requests between them."""
        turns: list[Turn] = []
        for item in items:
            match item:
                case StacksWanted():
                    self.observing.take_stacks(item)
                case CollectWanted():
                    self._collect(item)
                case Inquiry(answer):
                    answer(self.observing.overview())
                case Observe(answer):
                    answer(self.observing.observation)
                case MoveRequest(event, answer):
                    reason = self._engine.move_refusal(event.host, event.to, self._clock())
                    answer(reason)
                    turns += self._decide_arrival(Arrival(event)) if reason is None else []
                case _:
                    turns += self._decide_arrival(item if isinstance(item, Arrival) else Arrival(item))
                    if turns and any(isinstance(action, do.Finish) for action in turns[-1].actions):
                        break  # the engine has ended, and handles no other event
        return turns

    def _decide_arrival(self, arrival: Arrival) -> list[Turn]:
        if isinstance(arrival.event, on.WorkerAlone) and self._rendezvous.was_asked:
            arrival.acknowledge()  # its workers have met by the rendezvous
            return []
        if self._is_for_watchers(arrival.event):
            return [Turn(self._clock(), arrival, (), is_decided=False)]
        now = self._clock()
        actions = self._engine.handle_or_end(arrival.event, now)
        places = [launch.place for launch in self.ranks.update(actions)]
        if places:
            self._printer.learn_places({place.rank: (place.host, place.local_rank) for place in places})
        return [Turn(now, arrival, actions, is_idle=self._engine.is_idle)]

    def _is_for_watchers(self, event: on.Event) -> bool:
        """True if the event changes nothing in the engine, and no deadline of the engine is due."""
        deadline = self._engine.deadline
        return isinstance(event, on.HostStage) and (deadline is None or self._clock() < deadline)

    def _record_turns(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        """Record the turns, and return the newly recorded ones. A turn without actions may wait for a later call."""
        return turns if self._turns is None else self._turns.keep(turns)

    def _show(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            for watch in self._watchers:
                watch(turn.arrival.event, turn.actions, turn.at)

    def _acknowledge(self, turns: Sequence[Turn]) -> None:
        # Without a record the link acknowledges each frame when it arrives: no other driver could use it.
        if self._turns is not None:
            for turn in turns:
                if turn.is_decided:
                    turn.arrival.acknowledge()

    def _carry_out_turns(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            starts = _starts(turn.actions)
            self._expect(starts)
            self._open_to_horovod(starts)
            self.observing.take_stacks_before_kill(turn.arrival.event, turn.actions)
            for action in turn.actions:
                self._carry_out(action)
            if starts:
                self._stdin.begin(self.observing.hang_watch.note_input)

    # Carrying out

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
                self._release(host)
            case do.Abandon(host):
                if host in self._links:  # an engine that ended for a defect may not have connected to it
                    self._links[host].close()
            case do.Assign() | do.Leave() | do.Break() | do.Change():
                self._send_message(action)
            case do.Finish(result):
                self._result = result
            case _:
                pass  # facts and group states are for watchers

    def _expect(self, starts: Sequence[do.Start]) -> None:
        """Let the rendezvous expect the addresses of these hosts."""
        # Once for all hosts of a round, since the rendezvous records each call.
        for facts in {id(start.facts): start.facts for start in starts}.values():
            self._rendezvous.expect(
                [address for addresses in facts.addresses.values() for address in addresses]
            )

    def _open_to_horovod(self, starts: Sequence[do.Start]) -> None:
        if starts and self._spec.horovod:
            from hvlaunch.driver.worker_messages import let_in  # noqa: PLC0415 (few jobs have such workers)

            let_in(starts, self._rendezvous)

    def _start(self, start: do.Start) -> None:
        self._begin_files(start.round, start.launches[0].place.size)
        link = self._links[start.host]
        self.directories[start.host] = start.facts.directory or self._spec.cwd
        if not self._is_replaying:
            self.observing.prepare()
        for launch in start.launches:
            if gets_stdin(launch.place, self._spec):
                self._stdin.add_reader(link, launch.slot, launch.place.rank)
        link.send(*start_frame(start, self._spec, job_id=self._keys.job_id, keys=self._keys))

    def _release(self, host: str) -> None:
        """Let a host end, as soon as its files have come."""
        link, directory = self._links[host], self.directories.get(host)
        collector = self._collector() if directory is not None and self._spec.collect else None
        if collector is None or directory is None:
            link.send({"type": "bye"})
        elif self._replay is not None and self._replay.is_running:
            self._replay.released.append(host)
        else:
            collector.release(link, directory, lambda: link.send({"type": "bye"}))

    def _collect(self, request: CollectWanted) -> None:
        hosts = [
            (self._links[name], directory)
            for name, directory in self.directories.items()
            if name in self._links and not self._links[name].is_closed
        ]
        collector = self._collector()
        if collector is None:
            request.answer({})
        else:
            collector.collect(hosts, request)

    def _send_message(self, action: "Message") -> None:
        """Send a message to a worker that asks for its place, by the rendezvous."""
        if isinstance(action, do.Assign):
            self._begin_files(action.round, action.launch.place.size)
        if self._replay is not None and self._replay.is_running:
            self._replay.messages.append(action)
        elif self._worker_messages is not None:
            self._worker_messages.carry_out(action)

    def _begin_files(self, number: int, size: int) -> None:
        if self._files is not None:
            self._files.begin_round(number, size, is_replay=self._is_replaying)

    # Parts that few jobs have

    def _turn_record(self, record: "JobRecord") -> "TurnRecord":
        from hvlaunch.driver.job_record import TurnRecord  # noqa: PLC0415 (not for a local job)

        begin = partial(record.begin, self._spec, self._keys, self._rendezvous.port)
        return TurnRecord(record, self._engine, begin)

    def _round_files(self, directory: Path) -> "RoundFiles":
        from hvlaunch.driver.worker_files import RoundFiles  # noqa: PLC0415 (few jobs have files)

        def sizes(number: int, size: int, is_known: bool) -> "FileSizes | None":
            return None if self._record is None else self._record.sizes(number, size, is_known=is_known)

        is_elastic = self._spec.elastic is not None
        return RoundFiles(directory, self._keys.job_id, self._printer, sizes, is_elastic=is_elastic)


def _starts(actions: Sequence[do.Action]) -> list[do.Start]:
    return [action for action in actions if isinstance(action, do.Start)]


def _worker_messages(
    rendezvous: RendezvousServer, post: Callable[[Arrival], None], ranks: Ranks
) -> "WorkerMessages":
    from hvlaunch.driver.worker_messages import WorkerMessages  # noqa: PLC0415 (only elastic jobs have one)

    return WorkerMessages(rendezvous, post, lambda *worker: ranks.rank_of(*worker) is not None)


def _host_discovery(options: ElasticOptions, post: Callable[[on.Event], None]) -> "Discovery | None":
    """Return the discovery of hosts by a script or a file; None for a fixed pool."""
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
