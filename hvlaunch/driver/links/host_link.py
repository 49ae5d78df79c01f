"""One host's thread: connect, send the agent, turn its frames into events and output."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hvlaunch.agent.wire.frames import MOST_RELAYED, PROTOCOL, BadFrame
from hvlaunch.agent.wire.shapes import plain
from hvlaunch.console.lines import Stream
from hvlaunch.driver.links import host_ends
from hvlaunch.driver.links.agent_channel import AgentConnection
from hvlaunch.driver.links.expected import Expected
from hvlaunch.driver.links.flow import Credit, DurableFrames
from hvlaunch.driver.links.piece_reader import Garbled
from hvlaunch.driver.links.session import HostSession
from hvlaunch.driver.program.agent_program import AgentProgram
from hvlaunch.driver.record.seen import Seen, SeenFrames
from hvlaunch.driver.turn import Arrival
from hvlaunch.engine import events as on
from hvlaunch.engine.events import HostFacts
from hvlaunch.errors import (
    AgentFailed,
    HostError,
    HostFault,
    HvlaunchError,
    NoFreePort,
)
from hvlaunch.job import Host, Look, PortHolder
from hvlaunch.ssh.connection import listen

if TYPE_CHECKING:
    from hvlaunch.console.recent import Origin
    from hvlaunch.driver.links.errands import HostErrands
    from hvlaunch.driver.links.relay import HostRelay
    from hvlaunch.driver.record.journal import PastTurn
    from hvlaunch.driver.result_files import ResultFiles

__all__ = ["HostLink", "Opening", "OutputPrinter", "host_facts"]


_NOISE_KEPT = 4096
_NOISE_QUOTED = 80
_MOST_PARTINGS = 4  # that are passed on, of an agent that says so again and again
_MAKING_ERRANDS = threading.Lock()
_UNREAD = 5.0
"""Seconds that an agent which is to end waits for somebody who reads what its workers have printed."""


class OutputPrinter(Protocol):
    """Where workers' output goes. `done` is called with the number of bytes once they are printed; `note` before that, as in Output.

    `origin` names the link and the frame: what has the same was printed before.
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
        """The last bytes of its stderr."""


class Opening(NamedTuple):
    """How a link begins."""

    connect: Callable[[Host], AgentConnection]
    program: AgentProgram
    hello: Callable[[AgentConnection], Mapping[str, Any]]
    """The first frame."""
    relay: Callable[[Callable[[Mapping[str, Any], bytes], None]], "HostRelay"]
    """Makes the end of relayed connections when the first comes; it gets what sends frames to the agent."""
    window: int
    """Bytes of output that may be on their way from this host."""
    spill: int = 0
    """Bytes of output that its agent may keep while the connection is lost."""
    reconnect: float = 0.0
    """Seconds that its agent waits for another connection."""
    number: int = 0
    """Of the connection, counted over the job."""
    call: Sequence[bytes] = ()
    """The program of a job that calls a function, in parts."""
    results: "ResultFiles | None" = None
    """Where that function's results go."""
    seen: "SeenFrames | None" = None
    """Where it is on record which frames need not be sent again; None where nothing outlives this driver."""


class HostLink:
    """The way to one host's agent. `post` takes events, `clock` is the driver's.

    What was made of a frame arrives with its number where that is to be known: settle() is called with it then.

    `rank_of` has the rank of a worker, by slot and start, `born` the round that it was started for; None where
    there was no such worker.
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
        """What its agent was greeted with."""
        self.stdin_taken: Callable[[int, int], None] = lambda _slot, _size: None
        self.pids: dict[tuple[int, int], int] = {}
        """Of the workers that live there, by slot and start."""
        self.last_output: dict[int, float] = {}
        """When a rank has printed last."""
        self._errands: HostErrands | None = None
        self._opening = opening
        self._post = post
        self._printer = printer
        self._rank_of = rank_of
        self._expected = Expected(born, opening.window, opening.spill)
        self._clock = clock
        self._credit = Credit(opening.window, lambda size: self.send({"type": "ack", "bytes": size}))
        self._parting: str | None = None
        self._partings = 0
        self._closed: on.HostClosed | None = None
        """What its agent said last, which is so when it has ended."""
        self._closed_at = 0.0
        self._noise = bytearray()
        self._noise_told = False
        self._has_stopped = False
        """Whether any of its workers was told to end."""
        self._peer_address: str | None = None
        self._relay: HostRelay | None = None
        self._has_ended = False
        """Whether there will be no more frames."""
        self._has_released = False
        """Whether its agent was told to end."""
        self._printed_before: Mapping[Stream, int] = {}
        """The last frames whose output a driver before us has printed."""
        self._settled_before: list[int] = []
        self._is_taken_up = False
        self._seen = opening.seen
        note = (lambda _number: None) if self._seen is None else self._seen.tell
        self._session = HostSession(host, opening.program, self, post, clock, opening.reconnect, note)

    @property
    def is_closed(self) -> bool:
        return self._session.is_closed

    @property
    def is_away(self) -> bool:
        return self._session.is_away

    @property
    def scratch(self) -> str:
        """The job's directory there; empty before the agent's hello."""
        return self._session.scratch or ""

    @property
    def has_parted(self) -> bool:
        """Whether its agent has said its last word, and waits only until all before that is durable."""
        return self._closed is not None

    @property
    def last_acknowledged(self) -> float | None:
        """When the first machine on the way to the agent last acknowledged something; None where it is not known."""
        silence = self._session.silence()
        return None if silence is None else self._clock() - silence

    def open(self) -> None:
        """Begin to connect, in a thread of its own; what comes of it arrives as events."""
        threading.Thread(target=self._run, name=f"host {self.host.name}", daemon=True).start()

    def remember(self, turn: "PastTurn", hello: Mapping[str, Any]) -> None:
        """A turn of the driver before us, of this host: be as its link was. `hello` is what the agent was greeted with."""
        if turn.frame:
            self._settled_before.append(turn.frame)
        if turn.offset is not None:
            self.offset = turn.offset
        self._expected.remember(turn.event)
        match turn.event:
            case on.HostReady(_, facts):
                self.hello = hello
                self._expected.sent(hello)
                self._session.scratch = facts.scratch
                self.last_heard = turn.at
            case on.HostParting(_, problem):
                self._session.is_over = True
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
        """Go on where the driver before us was. `connection` is lost."""
        seen = self._seen.last if self._seen is not None else Seen()
        self._printed_before = {"stdout": seen.stdout, "stderr": seen.stderr}
        self._expected.begin_epoch()
        self.last_heard = self._clock()
        durable = DurableFrames(seen.told, self._settled_before)
        self._session.take_up(epoch, key, self._session.scratch or "", connection, durable)
        self._is_taken_up = True
        self.open()

    @property
    def errands(self) -> "HostErrands":
        """The errands of this host."""
        from hvlaunch.driver.links.errands import HostErrands  # noqa: PLC0415 (few jobs have any)

        with _MAKING_ERRANDS:
            if self._errands is None:
                self._errands = HostErrands(self.host.name, partial(self.send, relayed=True))
                if self._has_ended:
                    self._errands.lose()
            return self._errands

    def send(self, header: Mapping[str, Any], body: bytes = b"", *, relayed: bool = False) -> None:
        """Send a frame, as soon as those before it are through. Never blocks. Relayed frames have a lane of their own."""
        self._has_stopped = self._has_stopped or header["type"] == "stop"
        self._expected.sent(header, body)
        if header["type"] == "bye":
            self._has_released = True
        self._session.send(header, body, relayed=relayed)

    def ping(self, patience: float | None = None) -> None:
        """Let the agent hear from us, and how long to wait for us where a connection is lost, if that has changed."""
        self._session.ping(patience)

    def renew(self) -> None:
        """Nothing was heard for long: connect again, beside the connection that there is."""
        self._session.renew()

    def acknowledge(self, frame: int) -> None:
        """The agent need not keep this frame of the lasting stream any more. For any thread."""
        if frame:
            self._session.durable.add(frame)
            if self._has_released:
                self._session.acknowledge()

    def let_go(self) -> None:
        """Where its agent has waited for long, it need not any more: perhaps nobody reads what its workers have printed."""
        if self.has_parted and self._clock() >= self._closed_at + _UNREAD:
            self._session.send({"type": "leave"})

    def leave(self) -> None:
        """Tell the agent that nobody will come back; close() follows. Never blocks."""
        self._session.leave()

    def close(self) -> None:
        """Give the host up, whatever its threads are doing. May be repeated."""
        self._session.close()

    def _run(self) -> None:
        try:
            ending = self._serve()
        except HostError as error:
            ending = on.HostFailed(self.host.name, error.problem)
        except HvlaunchError as error:
            failed = AgentFailed(error.cause, host=self.host.name, hint=error.hint)
            ending = on.HostFailed(self.host.name, failed.problem)
        except Exception as error:  # noqa: BLE001 (a thread's end must reach the loop, whatever it is)
            cause = f"internal error: {type(error).__name__}: {error}"
            ending = on.HostFailed(self.host.name, HostFault(cause, host=self.host.name).problem)
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
            for header, body in self._session.frames():
                if self._was_printed(header):
                    self.acknowledge(self._session.number)
                    continue
                self._expected.check(header, body)
                self._obey(header, body)
                if self._seen is None:
                    self.acknowledge(self._session.number)
        except Garbled:
            return on.HostGone(self.host.name, host_ends.garbled(self.host.name).problem)
        except BadFrame as error:
            return on.HostGone(self.host.name, host_ends.broken(self.host.name, error).problem)
        return self._ending()

    def _begin(self) -> None:
        """Start the agent. Raises HostError."""
        listen(lambda stage: self._post(on.HostStage(self.host.name, stage)))
        connection = self._opening.connect(self.host)
        self._session.begin(connection)
        self._post(on.HostConnected(self.host.name))
        self._peer_address = connection.remote_address
        self.hello = self._opening.hello(connection)
        self._expected.sent(self.hello)
        if connection.is_launched:
            self._expected.may_end()
        self._session.greet(self.hello)
        for part in self._opening.call:
            self._session.send({"type": "call"}, part)

    def _was_printed(self, header: Mapping[str, Any]) -> bool:
        """Whether it is output that a driver before us has printed, and of which its agent was not told."""
        return header["type"] == "output" and self._session.number <= self._printed_before.get(
            header["stream"], 0
        )

    def heard_agent(self) -> None:
        self.last_heard = self._clock()

    def heard_noise(self, data: bytes) -> None:
        """What others print there: the login shell before the agent, or what its start-up files left running."""
        self._noise = (self._noise + data)[-_NOISE_KEPT:]
        if self.last_heard is not None and not self._noise_told and (line := _first_line(data)):
            self._noise_told = True
            self._post(on.HostNoise(self.host.name, line))

    def _obey(self, header: Mapping[str, Any], body: bytes) -> None:
        name = self.host.name
        match header["type"]:
            case "output":
                self._output(header, body)
            case "relay":
                self._relayed(header, body)
            case "hello":
                self._hello(header)
            case "reached":
                tried = tuple(header["tried"])
                self._tell(on.RendezvousReached(name, header["address"], tried, header["relay_port"]))
            case "probed":
                self._tell(on.HostProbed(name, header["target"], header["address"], header["agent"]))
            case "started":
                self._tell_time(header["at"])
                worker = header["round"], header["slot"], header["pid"], header["start"]
                self.pids[header["slot"], header["start"]] = header["pid"]
                self._tell(on.WorkerStarted(name, *worker))
            case "not_started":
                why = header["code"], header["cause"], header["start"]
                self._tell(on.WorkerNotStarted(name, header["round"], header["slot"], *why))
            case "exited":
                self.pids.pop((header["slot"], header["start"]), None)
                self._tell(self._exited(header, body))
            case "suspended":
                self._tell(on.WorkerSuspended(name, header["round"], header["slot"], header["start"]))
            case "alone":
                where = header["round"], header["slot"], header["library"], header["start"]
                self._tell(on.WorkerAlone(name, *where))
            case "master_port":
                self._tell(on.MasterPort(name, header["port"]))
            case "stdin_taken":
                self.stdin_taken(header["slot"], header["bytes"])
            case "errand":
                self.errands.obey(header, body)
            case "pong":
                self._tell_time(header["at"])
            case "parting" | "fault":
                self._part(header["cause"], _lines(body))
            case "bye":
                self._closed_at = self._clock()
                self._closed = on.HostClosed(name, header["left"], tuple(header["pids"]))
                self._session.acknowledge()

    def _tell(self, event: on.Event) -> None:
        """Of what the frame has said that came last."""
        self._post(event if self._seen is None else Arrival(event, self, self._session.number))

    def _part(self, cause: str, traceback: str) -> None:
        self._session.is_over = True
        self._parting = cause
        self._partings += 1
        if self._partings <= _MOST_PARTINGS:
            error = host_ends.lost(self.host.name, f"its agent ends: {cause}")
            self._tell(on.HostParting(self.host.name, error.problem, traceback))

    def _hello(self, header: Mapping[str, Any]) -> None:
        if header["protocol"] != PROTOCOL:
            raise AgentFailed(
                f"its agent speaks protocol {header['protocol']}, this hvlaunch speaks {PROTOCOL}",
                host=self.host.name,
            )
        if header["master_port"] is None:
            raise NoFreePort(host=self.host.name)
        self._session.scratch = header["scratch"]
        self._tell(on.HostReady(self.host.name, host_facts(header, self._peer_address)))

    def _output(self, header: Mapping[str, Any], body: bytes) -> None:
        slot, start = header["slot"], header["start"]
        rank = self._rank_of(slot, start)
        if rank is None:
            raise BadFrame(f"output of a worker without a rank, in slot {slot}")
        if header["stream"] == "result":
            self._result((self.number, slot, start), rank, body)
            return
        frame = self._session.number
        done = partial(self._printed, header["stream"], frame)
        origin = str(self.number), frame
        if body:
            self.last_output[rank] = self.last_heard or 0.0
            note = None if self._seen is None else partial(self._note, self._seen, header["stream"], frame)
            self._printer.output(rank, header["stream"], body, done, origin, note)
        else:
            self._printer.end_stream(rank, header["stream"], done, origin)

    def _result(self, worker: tuple[int, int, int], rank: int, body: bytes) -> None:
        """A part of what a worker returns; it has ended where that is empty. Raises BadFrame."""
        if self._opening.results is None:
            raise BadFrame("a result, and the job calls no function")
        self._opening.results.take(worker, rank, body)
        if body:
            self._credit.add(len(body))

    def _relayed(self, header: Mapping[str, Any], body: bytes) -> None:
        if self._relay is None:
            self._relay = self._opening.relay(partial(self.send, relayed=True))
        if header["what"] == "open":  # a host that takes no answers asks no more
            self._session.wait_for_relayed(MOST_RELAYED)
        self._relay.obey(header, body)

    @staticmethod
    def _note(seen: SeenFrames, stream: Stream, frame: int, is_printed: bool) -> None:
        """Called by the printer's thread alone."""
        (seen.print if is_printed else seen.take_back)(stream, frame)

    def _printed(self, stream: Stream, frame: int, size: int) -> None:
        """Called by the printer's thread alone."""
        if self._seen is not None:
            self._seen.print(stream, frame)
            self.acknowledge(frame)
        if size:
            self._credit.add(size)

    def _tell_time(self, at: float) -> None:
        """Learn the distance of the host's clock from ours; the quickest frame knows it best."""
        offset = self._clock() - at
        self.offset = offset if self.offset is None else min(self.offset, offset)

    def _exited(self, header: Mapping[str, Any], body: bytes) -> on.WorkerExited:
        self._tell_time(header["at"])
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
        """What the end of a worker looks like, whose last output has come."""
        from hvlaunch.report.consequences import look  # noqa: PLC0415 (hopefully never)

        rank = self._rank_of(slot, start)
        tail = b"" if rank is None else self._printer.tail(rank)
        return look(tail, error_file, is_urgent=not self._has_stopped)

    def _ending(self) -> on.Event:
        """Why there are no more frames."""
        name, session = self.host.name, self._session
        if self._closed is not None:
            return self._closed
        if self._is_taken_up and self._has_released and session.lost is not None:
            return on.HostClosed(name)  # it told a driver that was no more
        status, broken, stderr = session.status, session.broken, session.stderr()
        if self.last_heard is None:
            return on.HostFailed(
                name, host_ends.never_began(name, status, stderr, broken, bytes(self._noise)).problem
            )
        if self._parting is not None:
            cause = f"its agent ended: {self._parting}"
        elif session.lost is not None:
            cause = f"the connection broke ({broken or 'it ended'}), and there is no other: {session.lost}"
        elif broken is not None:
            cause = f"the connection broke: {broken}"
        else:
            cause = (
                plain(stderr.rpartition("\n")[2], host_ends.LONGEST_LINE)
                or f"its agent ended with status {status}"
            )
        return on.HostGone(name, host_ends.lost(name, cause).problem)


def _lines(traceback: bytes) -> str:
    lines = traceback.decode("utf-8", "replace").splitlines()
    return "\n".join(plain(line, host_ends.LONGEST_LINE) for line in lines)


def _first_line(noise: bytes) -> str:
    """Empty where there is only space."""
    lines = noise.decode("utf-8", "replace").strip().splitlines() or [""]
    return plain(lines[0], _NOISE_QUOTED)


def host_facts(hello: Mapping[str, Any], peer_address: str | None) -> HostFacts:
    """Return the facts that the agent's `hello` tells of its host."""
    facts = hello["facts"]
    gpus = facts.get("gpus")
    return HostFacts(
        addresses={name: tuple(listed) for name, listed in facts["addresses"].items()},
        cpus=facts["cpus"],
        gpus=None if gpus is None else len(gpus),
        scratch=hello["scratch"],
        beacon_port=hello["beacon_port"],
        master_port=hello["master_port"],
        peer_address=peer_address,
        python=facts.get("python"),
        cwd_error=hello["cwd_error"],
        trouble=hello["trouble"],
        boot_id=facts.get("boot_id"),
    )
