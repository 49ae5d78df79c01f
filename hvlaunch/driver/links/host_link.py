"""One host's thread: it connects, starts the agent, and turns the agent's frames into events and output."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from hvlaunch.agent.wire.frames import FRAME_COST, MOST_RELAYED, PROTOCOL, BadFrame, plain
from hvlaunch.console.lines import Stream
from hvlaunch.driver.links.agent_channel import AgentConnection, Expected, Garbled
from hvlaunch.driver.links.session import AckedFrames, HostSession
from hvlaunch.driver.program import AgentProgram
from hvlaunch.driver.turn import Arrival
from hvlaunch.engine import events as on
from hvlaunch.engine.events import HostFacts, WorkerPackages
from hvlaunch.errors import (
    AgentFailed,
    HostError,
    HostFault,
    HvlaunchError,
    NoFreePort,
)
from hvlaunch.job import Host, Look, PortHolder
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.ssh import Stage, listen

if TYPE_CHECKING:
    from hvlaunch.console.recent import Origin
    from hvlaunch.driver.job_record import FrameNumbers, FrameRecord, PastTurn
    from hvlaunch.driver.links.errands import HostErrands
    from hvlaunch.driver.links.relay import HostRelay
    from hvlaunch.driver.worker_files import ResultFiles

__all__ = [
    "HostLink",
    "HostOutput",
    "Opening",
    "OutputPrinter",
    "Prepare",
    "host_facts",
    "in_thread",
    "worker_packages",
]


class OutputPrinter(Protocol):
    """The printer, as links use it.

    `origin` names the link and the frame; the printer skips output whose origin it has printed before. `note` is called
    before printing, as in Output; `done` is called after printing, with the number of bytes.
    """

    def output(
        self,
        rank: int,
        stream: Stream,
        data: bytes,
        done: Callable[[int], None],
        origin: "Origin",
        note: Callable[[bool], None] | None,
    ) -> None: ...

    def end_stream(
        self, rank: int, stream: Stream, done: Callable[[int], None], origin: "Origin"
    ) -> None: ...

    def tail(self, rank: int) -> bytes:
        """Return the last bytes of the rank's stderr."""


class Credit:
    """Credit for processed output, sent to the agent in large portions. For any thread; `give` sends credit."""

    # Portions, since a frame for each line would double the number of writes.

    def __init__(self, window: int, give: Callable[[int], None]) -> None:
        self._portion = window // 4
        self._give = give
        self._lock = Lock()
        self._due = 0

    def add(self, size: int) -> None:
        """Count a processed frame with `size` bytes of output."""
        with self._lock:
            self._due += size + FRAME_COST
            if self._due >= self._portion:
                self._give(self._due)
                self._due = 0


class HostOutput:
    """Passes the output of one host's workers to the printer, in the link's thread. The printer's thread calls back.

    `rank_of` returns a worker's rank by slot and start. `send_credit` grants the agent further bytes, `acknowledge` marks
    a frame as acked. `frame_record` records printed frames; without it nothing outlives this driver.
    """

    def __init__(
        self,
        number: int,
        window: int,
        printer: OutputPrinter,
        results: "ResultFiles | None",
        frame_record: "FrameRecord | None",
        rank_of: Callable[[int, int], int | None],
        send_credit: Callable[[int], None],
        acknowledge: Callable[[int], None],
    ) -> None:
        self._number = number
        self._printer = printer
        self._results = results
        self._frame_record = frame_record
        self._rank_of = rank_of
        self._acknowledge = acknowledge
        self._credit = Credit(window, send_credit)
        self._printed_before: Mapping[Stream, int] = {}
        """The last frames that a killed driver has printed."""
        self.last_output: dict[int, float] = {}
        """When each rank has printed last."""

    def skip_printed(self, record: "FrameNumbers") -> None:
        """Skip the output that a killed driver has printed without telling its agent."""
        self._printed_before = {"stdout": record.stdout, "stderr": record.stderr}

    def was_printed(self, header: Mapping[str, Any], frame: int) -> bool:
        """True if a killed driver has printed the output of this frame."""
        return header["type"] == "output" and frame <= self._printed_before.get(header["stream"], 0)

    def tail(self, slot: int, start: int) -> bytes:
        """Return the last stderr of a worker."""
        rank = self._rank_of(slot, start)
        return b"" if rank is None else self._printer.tail(rank)

    def print(self, header: Mapping[str, Any], body: bytes, frame: int, now: float) -> None:
        """Pass on a frame with output; an empty one ends the stream. Raises BadFrame."""
        slot, start, stream = header["slot"], header["start"], header["stream"]
        rank = self._rank_of(slot, start)
        if rank is None:
            raise BadFrame(f"output of a worker without a rank, in slot {slot}")
        if stream == "result":
            self._keep_result((self._number, slot, start), rank, body)
            return
        # The agent gets credit only for printed output: a slow reader of stdout slows the workers down.
        done = partial(self._printed, stream, frame)
        origin = str(self._number), frame
        if body:
            self.last_output[rank] = now
            note = None if self._frame_record is None else partial(_note, self._frame_record, stream, frame)
            self._printer.output(rank, stream, body, done, origin, note)
        else:
            self._printer.end_stream(rank, stream, done, origin)

    def _keep_result(self, worker: tuple[int, int, int], rank: int, body: bytes) -> None:
        """Keep a part of a worker's result. Raises BadFrame."""
        if self._results is None:
            raise BadFrame("a result, and the job calls no function")
        self._results.write_part(worker, rank, body)
        # A result is written at once, and needs no printer for its credit.
        if body:
            self._credit.add(len(body))

    def _printed(self, stream: Stream, frame: int, size: int) -> None:
        """Record and acknowledge a printed frame; in the printer's thread."""
        # Recorded before the acknowledgement: a successor must not ask for the frame again.
        if self._frame_record is not None:
            self._frame_record.record_printed(stream, frame)
            self._acknowledge(frame)
        if size:
            self._credit.add(size)


def _note(frame_record: "FrameRecord", stream: Stream, frame: int, is_printed: bool) -> None:
    """Record whether a frame is printed in the next moment; in the printer's thread."""
    (frame_record.record_printed if is_printed else frame_record.take_back)(stream, frame)


_NOISE_KEPT = 4096
_NOISE_QUOTED = 80
_MOST_PARTINGS = 4
"""Announcements of its end to post, from an agent with any number of them."""
_PREPARING_TOLD = 10.0
"""Seconds between two events of a host that gets its files: each is an entry of the journal."""
_UNREAD = 5.0
"""Seconds that a parting agent waits for unread output of its workers."""
# One lock for all links: errands are made once for each host, and rarely.
_MAKING_ERRANDS = threading.Lock()


Prepare: TypeAlias = Callable[
    ["HostLink", HostFacts, Callable[[HostFacts], None], Callable[[HostError], None]], None
]
"""Called with the link and the host's facts; calls the first function with all facts, or the second, in any thread."""


def in_thread(
    step: Callable[["HostLink", HostFacts, Callable[[HostFacts], None]], object], stage: str
) -> Prepare:
    """Return a step that takes time as one that runs in another thread. It raises HostError where it would call the second function.

    `stage` says for the user what the host is waiting for.
    """

    def prepare(
        link: "HostLink",
        facts: HostFacts,
        ready: Callable[[HostFacts], None],
        failed: Callable[[HostError], None],
    ) -> None:
        def run() -> None:
            try:
                step(link, facts, ready)
            except HostError as error:
                failed(error)

        link.tell_preparing(stage)
        threading.Thread(target=run, name=f"{stage} {link.host.name}", daemon=True).start()

    return prepare


class Opening(NamedTuple):
    """The parts of a new link."""

    connect: Callable[[Host], AgentConnection]
    program: AgentProgram
    hello: Callable[[AgentConnection], Mapping[str, Any]]
    """Makes the first frame."""
    relay: Callable[[Callable[[Mapping[str, Any], bytes], None]], "HostRelay"]
    """Makes the end of relayed connections for the first of them; its argument sends frames to the agent."""
    window: int
    """Bytes of output that may be on their way from this host."""
    spill: int = 0
    """Bytes of output that its agent may keep while the connection is lost."""
    reconnect: float = 0.0
    """Seconds for which its agent waits for another connection."""
    number: int = 0
    """Number of the connection, counted over the job."""
    call: Sequence[bytes] = ()
    """The program of a job that calls a function, in parts."""
    results: "ResultFiles | None" = None
    """The files for the function's results."""
    frame_record: "FrameRecord | None" = None
    """The record of acked and printed frames; None for a job without a successor."""
    prepare: "Prepare | None" = None
    """Brings to the host what workers need, before it counts as ready; None if all is there."""
    links: "Callable[[], Sequence[HostLink]]" = tuple
    """Returns the links to all hosts of the job."""


class _Noise:
    """Output of other programs on the host: the login shell before the agent, or programs of start-up files."""

    def __init__(self) -> None:
        self.kept = b""
        """The newest output, for the error of an agent without a hello."""
        self.is_posted = False

    def add(self, data: bytes) -> str:
        """Keep `data`; return its first line, empty if there is only space."""
        self.kept = (self.kept + data)[-_NOISE_KEPT:]
        lines = data.decode("utf-8", "replace").strip().splitlines() or [""]
        return plain(lines[0], _NOISE_QUOTED)


class HostLink:
    """The link to a host's agent. `post` takes events, `clock` is the driver's.

    An event comes as an Arrival with the number of its frame if frames are recorded; acknowledge() is called with this
    number after the event was recorded.

    `rank_of` returns the rank of a worker, by slot and start, `born` the round that it was started for; both return None
    if no such worker was started.
    """

    def __init__(
        self,
        host: Host,
        opening: Opening,
        post: Callable[[on.Event | Arrival], None],
        printer: OutputPrinter,
        rank_of: Callable[[int, int], int | None],
        born: Callable[[int, int], int | None],
        clock: Callable[[], float],
    ) -> None:
        self.host = host
        self.number = opening.number
        self.offset: float | None = None
        self.last_heard: float | None = None
        """When the agent's last bytes came; None before its hello."""
        self.hello: Mapping[str, Any] = {}
        """The first frame to its agent."""
        self.stdin_taken: Callable[[int, int], None] = lambda _slot, _size: None
        self.held: Callable[[Mapping[str, Any]], None] = lambda _header: None
        """Takes the agent's answers about leases."""
        self.no_preload: Callable[[str], None] = lambda _cause: None
        """Takes the reason for which the agent does without --preload."""
        self.vouched: Callable[[str], None] = lambda _host: None
        """Takes the name of another host in the agent's reach."""
        self.facts: HostFacts | None = None
        """Facts of the host; None before its hello."""
        self.pids: dict[tuple[int, int], int] = {}
        """The living workers, by slot and start."""
        self._errands: HostErrands | None = None
        self._opening = opening
        self._post = post
        self._expected = Expected(born, opening.window, opening.spill)
        self._clock = clock
        self._output = HostOutput(
            opening.number,
            opening.window,
            printer,
            opening.results,
            opening.frame_record,
            rank_of,
            lambda size: self.send({"type": "ack", "bytes": size}),
            self.acknowledge,
        )
        self.last_output = self._output.last_output
        """When each rank has printed last."""
        self._parting: str | None = None
        self._partings = 0
        self._closed: on.HostClosed | None = None
        """The agent's last word, which becomes the link's end when the agent has ended."""
        self._closed_at = 0.0
        self._noise = _Noise()
        self._has_stopped = False
        """True if any of its workers was told to end."""
        self._peer_address: str | None = None
        self._relay: HostRelay | None = None
        self._has_ended = False
        """True if no more frames will come."""
        self._has_released = False
        """True if its agent was told to end."""
        self._acked_before: list[int] = []
        """Frames recorded by a killed driver."""
        self._is_taken_up = False
        self._preparing_told = -inf
        record = opening.frame_record
        note = (lambda _number: None) if record is None else record.acknowledge
        self.session = HostSession(host, opening.program, self, post, clock, opening.reconnect, note)

    @property
    def is_closed(self) -> bool:
        return self.session.is_closed

    @property
    def is_away(self) -> bool:
        return self.session.is_away

    @property
    def scratch(self) -> str:
        """The job's directory on the host; empty before the agent's hello."""
        return self.session.scratch or ""

    @property
    def has_parted(self) -> bool:
        """True if the agent has sent its last word, and waits for the acknowledgement of earlier frames."""
        return self._closed is not None

    def open(self) -> None:
        """Begin to connect, in a thread of its own, which posts events."""
        threading.Thread(target=self._run, name=f"host {self.host.name}", daemon=True).start()

    def remember(self, turn: "PastTurn", hello: Mapping[str, Any]) -> None:
        """Take on the state after a turn of a killed driver. `hello` was the first frame to the agent."""
        if turn.frame:
            self._acked_before.append(turn.frame)
        if turn.offset is not None:
            self.offset = turn.offset
        self._expected.remember(turn.event)
        match turn.event:
            case on.HostReady(_, facts):
                self.hello = hello
                self._expected.sent(hello)
                self.session.scratch = facts.scratch
                self.facts = facts
                self.last_heard = turn.at
            case on.HostParting(_, problem):
                self.session.is_over = True
                self._parting = problem.cause
            case on.WorkerStarted():
                self.pids[turn.event.slot, turn.event.start] = turn.event.pid
            case on.WorkerExited():
                self.pids.pop((turn.event.slot, turn.event.start), None)
            case on.HostFailed() | on.HostGone() | on.HostClosed():
                self.close()
            case _:
                pass

    def take_up(self, epoch: int, key: str, connection: AgentConnection) -> None:
        """Continue the session of a killed driver. `connection` is lost."""
        acked = 0
        if self._opening.frame_record is not None:
            record = self._opening.frame_record.numbers
            acked = record.acked
            self._output.skip_printed(record)
        self._expected.begin_epoch()
        # The agent has the lease's time again: it could not be heard until now.
        self.last_heard = self._clock()
        self.session.take_up(
            epoch, key, self.session.scratch or "", connection, AckedFrames(acked, self._acked_before)
        )
        self._is_taken_up = True
        self.open()

    @property
    def errands(self) -> "HostErrands":
        """The errands of this host."""
        from hvlaunch.driver.links.errands import HostErrands  # noqa: PLC0415 (few jobs have any)

        with _MAKING_ERRANDS:
            if self._errands is None:
                send = partial(self.send, relayed=True)
                self._errands = HostErrands(self.host.name, send, is_near=self.session.is_near)
                if self._has_ended:
                    self._errands.lose()
            return self._errands

    def send(self, header: Mapping[str, Any], body: bytes = b"", *, relayed: bool = False) -> None:
        """Queue a frame; relayed frames have a queue of their own. Never blocks."""
        self._has_stopped = self._has_stopped or header["type"] == "stop"
        # Before the frame is queued: its answer may come at once, in the link's thread.
        self._expected.sent(header, body)
        if header["type"] == "bye":
            self._has_released = True
        self.session.send(header, body, relayed=relayed)

    def acknowledge(self, frame: int) -> None:
        """Mark this frame of the lasting stream as acked: the agent need not keep its copy. For any thread."""
        if frame:
            self.session.acked.add(frame)
            # The agent waits for this to end: the next ping would be seconds away.
            if self._has_released:
                self.session.acknowledge()

    def let_go(self) -> None:
        """Let an agent end after a long wait for the acknowledgement of output: perhaps stdout has no reader."""
        if self.has_parted and self._clock() >= self._closed_at + _UNREAD:
            self.session.send({"type": "leave"})

    def close(self) -> None:
        """Give the host up, in whatever state its threads are. May be repeated."""
        self.session.close()

    def _run(self) -> None:
        try:
            ending = self._serve()
        except HostError as error:
            ending = on.HostFailed(self.host.name, error.problem)
        except HvlaunchError as error:
            failed = AgentFailed(error.cause, host=self.host.name, hint=error.hint)
            ending = on.HostFailed(self.host.name, failed.problem)
        except Exception as error:  # noqa: BLE001 (the loop must hear of every end of this thread)
            cause = f"internal error: {type(error).__name__}: {error}"
            ending = on.HostFailed(self.host.name, HostFault(cause, host=self.host.name).problem)
        # The event first: a closed link posts no events.
        self._post(ending)
        self.close()
        if self._relay is not None:
            self._relay.close()
        with _MAKING_ERRANDS:
            self._has_ended = True
        if self._errands is not None:
            self._errands.lose()

    def _serve(self) -> on.Event:
        if not self._is_taken_up:
            self._begin()
        try:
            for header, body in self.session.frames():
                if self._output.was_printed(header, self.session.number):
                    self.acknowledge(self.session.number)
                    continue
                self._expected.check(header, body)
                self._obey(header, body)
                if self._opening.frame_record is None:
                    self.acknowledge(self.session.number)
        except (BadFrame, Garbled) as error:
            return self._broken(error)
        return self._ending()

    def _report_stage(self, stage: Stage) -> None:
        if stage == "log in":
            self._opening.program.prepare()
        self._post(on.HostStage(self.host.name, stage))

    def _begin(self) -> None:
        """Start the agent. Raises HostError."""
        listen(self._report_stage)
        connection = self._opening.connect(self.host)
        self.session.begin(connection)
        self._post(on.HostConnected(self.host.name))
        self._peer_address = connection.remote_address
        self.hello = self._opening.hello(connection)
        self._expected.sent(self.hello)
        if connection.is_launched:
            self._expected.may_end()
        self.session.greet(self.hello)
        for part in self._opening.call:
            self.session.send({"type": "call"}, part)

    def heard_agent(self) -> None:
        """Note that the agent lives; for the session, as a Listener."""
        self.last_heard = self._clock()

    def heard_noise(self, data: bytes) -> None:
        """Keep output of other programs, and post its first line; for the session, as a Listener."""
        line = self._noise.add(data)
        if self.last_heard is None and self._opening.program.container is not None:
            self._tell_of_image(line)
        # Before the agent begins, the login shell may print as it likes.
        if self.last_heard is not None and not self._noise.is_posted and line:
            self._noise.is_posted = True
            self._post(on.HostNoise(self.host.name, line))

    def _tell_of_image(self, line: str) -> None:
        """Show the progress of the container's image, by a line of agent/container.py."""
        from hvlaunch.agent.container import PROGRESS  # noqa: PLC0415 (few jobs have a container)

        if line.startswith(PROGRESS):
            self.tell_preparing(line.removeprefix(PROGRESS))

    def _obey(self, header: Mapping[str, Any], body: bytes) -> None:
        name = self.host.name
        match header["type"]:
            case "output":
                self._output.print(header, body, self.session.number, self.last_heard or 0.0)
            case "relay":
                self._pass_on_relayed(header, body)
            case "hello":
                self._greet(header)
            case "reached":
                tried = tuple(header["tried"])
                self._post_event(on.RendezvousReached(name, header["address"], tried, header["relay_port"]))
            case "probed":
                if header["address"] is not None:
                    self.vouched(header["target"])
                self._post_event(on.HostProbed(name, header["target"], header["address"], header["agent"]))
            case "started":
                self._compare_clocks(header["at"])
                worker = header["round"], header["slot"], header["pid"], header["start"]
                self.pids[header["slot"], header["start"]] = header["pid"]
                self._post_event(on.WorkerStarted(name, *worker))
            case "not_started":
                why = header["code"], header["cause"], header["start"]
                self._post_event(on.WorkerNotStarted(name, header["round"], header["slot"], *why))
            case "exited":
                self.pids.pop((header["slot"], header["start"]), None)
                self._post_event(self._exit_event(header, body))
            case "suspended":
                self._post_event(on.WorkerSuspended(name, header["round"], header["slot"], header["start"]))
            case "alone":
                worker_and_library = header["round"], header["slot"], header["library"], header["start"]
                self._post_event(on.WorkerAlone(name, *worker_and_library))
            case "master_port":
                self._post_event(on.MasterPort(name, header["port"], tuple(header.get("more", ()))))
            case "stdin_taken":
                self.stdin_taken(header["slot"], header["bytes"])
            case "vouched":
                self.vouched(header["target"])
            case "held":
                self.held(header)
            case "no_preload":
                self.no_preload(header["cause"])
            case "errand":
                self.errands.obey(header, body)
            case "pong":
                self._compare_clocks(header["at"])
            case "parting" | "fault":
                self._part(header["cause"], body)
            case "bye":
                # Not posted yet: the agent still waits for its acknowledgement, and may be lost until it has ended.
                self._closed_at = self._clock()
                self._closed = on.HostClosed(name, header["left"], tuple(header["pids"]))
                self.session.acknowledge()

    def _post_event(self, event: on.Event) -> None:
        """Post an event made of the newest frame."""
        is_recorded = self._opening.frame_record is not None
        self._post(Arrival(event, self, self.session.number) if is_recorded else event)

    def _part(self, cause: str, traceback: bytes) -> None:
        """The agent announces its end."""
        from hvlaunch.driver.links.host_ends import lost, quoted  # noqa: PLC0415 (few agents end by themselves)

        self.session.is_over = True
        self._parting = cause
        self._partings += 1
        # Each is an event in the journal, and an agent could send any number of them.
        if self._partings <= _MOST_PARTINGS:
            error = lost(self.host.name, f"its agent ends: {cause}")
            self._post_event(on.HostParting(self.host.name, error.problem, quoted(traceback)))

    def _greet(self, header: Mapping[str, Any]) -> None:
        """The agent's hello has come. Raises AgentFailed, NoFreePort."""
        # Agents of a launcher or a warm pool come from another start, perhaps of another version.
        if header["protocol"] != PROTOCOL:
            raise AgentFailed(
                f"its agent speaks protocol {header['protocol']}, this hvlaunch speaks {PROTOCOL}",
                host=self.host.name,
            )
        if header["master_port"] is None:
            raise NoFreePort(host=self.host.name)
        self.session.scratch = header["scratch"]
        self.facts = facts = host_facts(header, self._peer_address)
        ready = partial(self._post_ready, self.session.number)
        if self._opening.prepare is None:
            ready(facts)
        else:
            self._opening.prepare(self, facts, ready, self._fail)

    def _post_ready(self, frame: int, facts: HostFacts) -> None:
        """Post that the host can start workers; for any thread. `frame` is the number of its hello."""
        event = on.HostReady(self.host.name, facts)
        self._post(event if self._opening.frame_record is None else Arrival(event, self, frame))

    def _fail(self, error: HostError) -> None:
        """Give the host up before it was ready; for any thread."""
        self._post(on.HostFailed(self.host.name, error.problem))
        self.close()

    def neighbors(self) -> "Sequence[HostLink]":
        """Return the open links to other hosts, the ones heard last first: lost hosts are silent. For any thread."""
        answering = [
            (at, link)
            for link in self._opening.links()
            if link is not self and not link.is_closed and (at := link.last_heard) is not None
        ]
        return [link for _, link in sorted(answering, key=lambda pair: -pair[0])]

    def tell_preparing(self, stage: str) -> None:
        """Show how far the host's files are, and tell the engine now and then that they make progress; for any thread."""
        self._post(on.HostStage(self.host.name, stage))
        if self._clock() >= self._preparing_told + _PREPARING_TOLD:
            self._preparing_told = self._clock()
            self._post(on.HostPreparing(self.host.name))

    def _pass_on_relayed(self, header: Mapping[str, Any], body: bytes) -> None:
        if self._relay is None:
            self._relay = self._opening.relay(partial(self.send, relayed=True))
        # A host that does not take the answers of its connections opens no more of them.
        if header["what"] == "open":
            self.session.wait_for_relayed(MOST_RELAYED)
        self._relay.obey(header, body)

    def _compare_clocks(self, at: float) -> None:
        """Estimate the offset of the host's clock."""
        # A frame's delay only adds to the difference: the smallest difference is the closest to the true offset.
        offset = self._clock() - at
        self.offset = offset if self.offset is None else min(self.offset, offset)

    def _exit_event(self, header: Mapping[str, Any], body: bytes) -> on.WorkerExited:
        self._compare_clocks(header["at"])
        slot, start = header["slot"], header["start"]
        error_file = body.decode("utf-8", "replace") or None
        holder = header["port_taken_by"]
        return on.WorkerExited(
            host=self.host.name,
            round=header["round"],
            slot=slot,
            code=header["code"],
            signal=header["signal"],
            at=header["at"] + (self.offset or 0.0),
            max_rss=header["max_rss"],
            oom_killed=header["oom_killed"],
            port_taken_by=holder and holder["uid"],
            port_holder=holder and PortHolder(holder["port"], holder["user"], holder["program"]),
            error_file=error_file,
            start=start,
            look="silent" if header["code"] == 0 else self._look(slot, start, error_file),
        )

    def _look(self, slot: int, start: int, error_file: str | None) -> Look:
        """Return how the end of a worker looks by its last output, which has come before its exit."""
        from hvlaunch.report.evidence import look  # noqa: PLC0415 (after a failure)

        return look(self._output.tail(slot, start), error_file, is_urgent=not self._has_stopped)

    def _broken(self, error: BadFrame | Garbled) -> on.Event:
        from hvlaunch.driver.links.host_ends import broken, garbled  # noqa: PLC0415 (few hosts are lost)

        name = self.host.name
        lost = broken(name, error) if isinstance(error, BadFrame) else garbled(name)
        return on.HostGone(name, lost.problem)

    def _ending(self) -> on.Event:
        """Return the event for the end of the frames."""
        name, session = self.host.name, self.session
        if self._closed is not None:
            return self._closed
        from hvlaunch.driver.links.host_ends import ended, never_began, unread  # noqa: PLC0415 (few hosts are lost)

        if self._is_taken_up and self._has_released and session.lost is not None:
            # Its last word went to the killed driver; but the ends of workers may have come, and output before them not.
            return on.HostClosed(name) if session.acked.is_whole else on.HostGone(name, unread(name).problem)

        status, broken, stderr = session.status, session.broken, session.stderr()
        if self.last_heard is None:
            container = self._opening.program.container
            image = None if container is None else container["image"] or container["name"]
            return on.HostFailed(
                name, never_began(name, status, stderr, broken, bytes(self._noise.kept), image).problem
            )
        return on.HostGone(name, ended(name, self._parting, session.lost, broken, stderr, status).problem)


def worker_packages(packages: Mapping[str, Any] | None) -> WorkerPackages | None:
    """Return the packages of a host's Python by the words of its agent."""
    return None if packages is None else WorkerPackages(packages["hvlaunch"], tuple(packages["editable"]))


def host_facts(hello: Mapping[str, Any], peer_address: str | None) -> HostFacts:
    """Return the facts of a host by its agent's `hello`."""
    facts = hello["facts"]
    return HostFacts(
        addresses={name: tuple(listed) for name, listed in facts["addresses"].items()},
        cpus=facts["cpus"],
        gpus=facts.get("gpus"),
        scratch=hello["scratch"],
        beacon_port=hello["beacon_port"],
        master_port=hello["master_port"],
        peer_address=peer_address,
        python=facts.get("python"),
        cwd_error=hello["cwd_error"],
        trouble=hello["trouble"],
        boot_id=facts.get("boot_id"),
        machine_id=facts.get("machine_id"),
        more_ports=tuple(hello.get("more_ports", ())),
        packages=worker_packages(facts.get("packages")),
    )
