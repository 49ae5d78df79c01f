"""A link: from the bytes of a host to events and output, and why it ended."""

import signal
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from hvlaunch.agent.frames import FRAME_COST, encode
from hvlaunch.agent.pieces import START
from hvlaunch.errors import ConnectFailed
from hvlaunch.gloo.driver.agent_channel import CommandConnection
from hvlaunch.gloo.driver.agent_program import AgentProgram
from hvlaunch.gloo.driver.arrival import Arrival
from hvlaunch.gloo.driver.bundle import NO_PYTHON
from hvlaunch.gloo.driver.expected import Expected
from hvlaunch.gloo.driver.host_link import HostLink, Opening
from hvlaunch.gloo.driver.relay import HostRelay
from hvlaunch.gloo.driver.seen import SeenFrames
from hvlaunch.gloo.engine import events as on
from hvlaunch.job import Host
from tests.unit.agent.harness import until
from tests.unit.gloo.fakes import FACTS, FakeConnection

BUNDLE = b"BUNDLE"
WINDOW = 3000


class Sink:
    def __init__(self) -> None:
        self.got: list[tuple[int, str, bytes]] = []
        self.dones: list[Callable[[int], None]] = []

    def output(
        self,
        rank: int,
        stream: str,
        data: bytes,
        done: Callable[[int], None],
        origin: tuple[str, int],
        note: Callable[[bool], None] | None,
    ) -> None:
        self.got.append((rank, stream, data))
        self.dones.append(done)

    def tail(self, rank: int) -> bytes:
        return b"".join(data for of, stream, data in self.got if (of, stream) == (rank, "stderr"))

    def end(self, rank: int, stream: str, done: Any, origin: tuple[str, int]) -> None:
        self.got.append((rank, stream, b"END"))


class Program(AgentProgram):
    def command(self, host: Host, *, is_here: bool, is_near: bool) -> tuple[str, bytes]:
        return "start the agent", BUNDLE


class FakeRelay(HostRelay):
    """Sends back what it gets."""

    def __init__(self, rig: "Rig", send: Callable[[Any, bytes], None]) -> None:
        self._send = send
        self.closed = threading.Event()
        rig.relays.append(self)

    def obey(self, header: Any, body: bytes) -> None:
        self._send(header, body)

    def close(self) -> None:
        self.closed.set()


class Rig:
    """A link to a host that the test plays."""

    def __init__(self, connect: Callable[[Host], Any] | None = None, **hello: Any) -> None:
        self.events: SimpleQueue[Any] = SimpleQueue()
        self.sink = Sink()
        self.connection = FakeConnection()
        self.channel = self.connection.channel
        self.now = 50.0
        self.relays: list[FakeRelay] = []
        where = {"candidates": [["10.0.0.9", 1]], "key": "k", "relay": "auto"}
        self.hello: dict[str, Any] = {
            "type": "hello",
            "gpus": False,
            "ports": None,
            "elastic": None,
            "session": None,
        }
        self.hello |= {"rendezvous": where, **hello}
        opening = Opening(
            connect=connect or (lambda _host: CommandConnection(self.connection)),
            program=Program({}, None),
            hello=lambda connection: self.hello | {"cwd": connection.local_address},
            relay=lambda send: FakeRelay(self, send),
            window=WINDOW,
            seen=SeenFrames(memoryview(bytearray(32)).cast("Q")),
        )
        self.ranks: dict[tuple[int, int], int] = {}
        """By slot and start."""

        def rank_of(slot: int, start: int) -> int | None:
            return self.ranks.get((slot, start))

        def born(slot: int, start: int) -> int | None:
            return 0 if (slot, start) in self.ranks else None

        self.link = HostLink(Host("a"), opening, self.events.put, self.sink, rank_of, born, lambda: self.now)
        self.link.open()

    def event(self) -> Any:
        """The next, which is on record."""
        event = self.events.get(timeout=60)
        if isinstance(event, Arrival):
            self.link.settle(event.frame)
            return event.event
        return event

    def ready(self) -> "Rig":
        assert self.event() == on.HostConnected("a")
        self.channel.greet()
        assert isinstance(self.event(), on.HostReady)
        return self

    def start(self, slot: int, start: int) -> None:
        """The agent has started a worker."""
        about = {"round": 0, "slot": slot, "start": start}
        self.channel.frame({"type": "started", "pid": 3, "at": 0.0, **about})
        assert self.event() == on.WorkerStarted("a", 0, slot, 3, start)

    def settle(self) -> None:
        """What the agent has said so far was heard."""
        self.channel.frame({"type": "reached", "address": "10.0.0.9", "tried": [], "relay_port": None})
        assert isinstance(self.event(), on.RendezvousReached)

    def sent(self, count: int) -> list[Any]:
        """The first `count` frames from the driver, but for the modules behind its hello."""
        channel = self.channel

        def sent() -> list[Any]:
            return [header for header, _ in channel.frames(len(BUNDLE)) if header["type"] != "modules"]

        with channel.changed:
            assert channel.changed.wait_for(lambda: len(sent()) >= count, timeout=60)
        return sent()[:count]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.link.close()


def test_bundle_and_hello_go_first(rig: Rig) -> None:
    rig.link.send({"type": "ping"})
    assert rig.sent(2) == [rig.hello | {"cwd": "10.0.0.100"}, {"type": "ping"}]
    assert rig.channel.written.startswith(BUNDLE)
    assert rig.connection.command == "start the agent"


def test_facts() -> None:
    rig = Rig(gpus=True)
    assert rig.event() == on.HostConnected("a")
    assert rig.link.last_heard is None
    rig.channel.greet(
        facts=FACTS | {"addresses": {"e": ("10.0.0.1",)}, "gpus": [["0", "H100", "1"], ["1", "H100", "1"]]}
    )
    event = rig.event()
    assert (event.facts.gpus, event.facts.cpus, event.facts.peer_address) == (2, 4, "10.0.0.1")
    assert rig.link.last_heard == 50.0
    rig.link.close()


def test_noise_before_the_agent_is_skipped_and_not_told(rig: Rig) -> None:
    rig.event()
    rig.channel.say(b"Welcome to a!\n" * 1000, START[:3], b"no, not yet\n")
    rig.channel.frame({"type": "reached", "address": "10.0.0.9", "tried": [], "relay_port": None})
    assert rig.event() == on.RendezvousReached("a", "10.0.0.9", ())


def test_noise_behind_the_agents_start_is_told_once_and_no_sign_of_life(rig: Rig) -> None:
    rig.ready()
    heard, rig.now = rig.link.last_heard, 60.0
    rig.channel.say(b"\n", b"\x1c", b"backup: 1 of 5\n", b"backup: 2 of 5\n")
    assert rig.event() == on.HostNoise("a", "backup: 1 of 5")
    assert rig.link.last_heard == heard
    rig.channel.frame({"type": "reached", "address": None, "tried": [], "relay_port": None})
    assert rig.event() == on.RendezvousReached("a", None, ())
    assert rig.link.last_heard == 60.0


def test_noise_within_a_piece_ends_the_host_with_an_error_of_its_own(rig: Rig) -> None:
    rig.ready()
    piece = b"".join(rig.channel.writer.cut(encode({"type": "pong", "at": 1.0})))
    rig.channel.say(piece[:20] + b"backup: 1 of 5\n" + piece[20:])
    event = rig.event()
    assert isinstance(event, on.HostGone)
    assert event.problem.kind == "ChannelGarbled"
    assert str(event.problem).startswith(
        "host a: lost: another program on it wrote into the middle of its agent's messages"
    )


def test_relayed_frames_have_an_end_of_their_own_which_goes_with_the_host(rig: Rig) -> None:
    rig.ready()
    assert not rig.relays
    where = {"address": "127.0.0.1", "tried": ["10.0.0.9"], "relay_port": 5}
    rig.channel.frame({"type": "reached", **where})
    assert rig.event() == on.RendezvousReached("a", "127.0.0.1", ("10.0.0.9",), 5)
    for what in ("open", "end"):
        rig.channel.frame({"type": "relay", "id": 1, "what": what})
    assert rig.sent(3)[1:] == [{"type": "relay", "id": 1, "what": what} for what in ("open", "end")]
    rig.channel.end()
    rig.event()
    (relay,) = rig.relays
    assert relay.closed.wait(60)


def test_output_goes_to_the_rank_of_its_slot_and_is_acknowledged_in_portions(rig: Rig) -> None:
    rig.ready()
    rig.ranks.update({(0, 0): 6, (1, 1): 5, (1, 2): 7})
    rig.start(1, 2)
    rig.channel.frame({"type": "output", "round": 0, "slot": 1, "start": 2, "stream": "stderr"}, b"x" * 200)
    rig.channel.frame({"type": "output", "round": 0, "slot": 1, "start": 2, "stream": "stderr"})
    rig.settle()
    assert rig.sink.got == [(7, "stderr", b"x" * 200), (7, "stderr", b"END")]
    (done,) = rig.sink.dones
    done(200)
    done(100)
    have, ack = rig.sent(3)[1:]
    assert have["type"] == "have"
    assert ack == {"type": "ack", "bytes": 300 + 2 * FRAME_COST}


def test_output_of_a_worker_that_never_was_breaks_the_connection(rig: Rig) -> None:
    rig.ready()
    rig.channel.frame({"type": "output", "round": 0, "slot": 5, "start": 0, "stream": "stdout"}, b"x")
    event = rig.event()
    assert isinstance(event, on.HostGone)
    assert "a frame of type output of a worker that was never started, in slot 5" in event.problem.cause
    assert not rig.sink.got


def test_the_time_of_an_end_is_told_by_our_clock(rig: Rig) -> None:
    rig.ready()
    rig.ranks[0, 1] = 0
    rig.start(0, 1)
    rig.channel.frame({"type": "pong", "at": 1000.0})
    end = {
        "type": "exited",
        "round": 0,
        "slot": 0,
        "start": 1,
        "code": 3,
        "signal": None,
        "max_rss": 5,
        "oom_killed": False,
        "port_taken_by": None,
    }
    rig.channel.frame(end | {"at": 999.5}, b'{"message": "x"}')
    event = rig.event()
    assert event.at == 49.5
    assert (event.code, event.error_file, event.max_rss) == (3, '{"message": "x"}', 5)


def test_a_clean_end(rig: Rig) -> None:
    rig.ready()
    rig.link.send({"type": "bye"})
    rig.channel.frame({"type": "bye", "left": 0, "pids": []})
    rig.channel.end()
    assert rig.event() == on.HostClosed("a", 0)


def test_an_agent_is_told_that_all_is_durable_before_it_is_told_to_end(rig: Rig) -> None:
    rig.ready()
    rig.settle()
    rig.link.send({"type": "bye"})
    assert rig.sent(3)[1:] == [{"type": "have", "frames": [2, 0]}, {"type": "bye"}]


def parted(rig: Rig) -> None:
    """Its agent has said bye, and nobody has read yet what a worker has printed."""
    rig.ready()
    rig.ranks[0, 1] = 0
    rig.start(0, 1)
    rig.channel.frame({"type": "output", "stream": "stdout", "round": 0, "slot": 0, "start": 1}, b"line")
    rig.settle()
    rig.link.send({"type": "bye"})
    rig.channel.frame({"type": "bye", "left": 0, "pids": []})
    until(lambda: rig.link.has_parted, "its bye")


def test_an_agent_that_has_said_bye_is_told_at_once_that_all_before_is_durable(rig: Rig) -> None:
    parted(rig)
    rig.sink.dones[0](4)
    assert rig.sent(3)[1:] == [{"type": "bye"}, {"type": "have", "frames": [4, 0]}]


def test_an_agent_does_not_wait_for_ever_for_somebody_who_reads(rig: Rig) -> None:
    parted(rig)
    rig.now += 4.0
    rig.link.let_go()
    rig.link.ping()
    rig.now += 1.0
    rig.link.let_go()
    assert rig.sent(5)[1:] == [
        {"type": "bye"},
        {"type": "have", "frames": [2, 0]},
        {"type": "ping"},
        {"type": "leave"},
    ]


def test_an_end_with_processes_that_cannot_be_killed(rig: Rig) -> None:
    rig.ready()
    rig.link.send({"type": "bye"})
    rig.channel.frame({"type": "bye", "left": 2, "pids": [7, 8]})
    rig.channel.end()
    assert rig.event() == on.HostClosed("a", 2, (7, 8))
    assert rig.link.has_parted


def test_an_agent_that_takes_its_leave_unasked_is_lost(rig: Rig) -> None:
    """Else its workers would count as ended, and a job whose workers have all ended has ended well."""
    rig.ready()
    rig.channel.frame({"type": "bye", "left": 0, "pids": []})
    event = rig.event()
    assert isinstance(event, on.HostGone)
    assert "bye that was not asked for" in str(event.problem)


def test_no_way_to_the_host() -> None:
    def refuse(_host: Host) -> Any:
        raise ConnectFailed("connection refused", host="a")

    event = Rig(refuse).event()
    assert isinstance(event, on.HostFailed)
    assert event.problem.kind == "ConnectFailed"


def test_a_fault_of_ours_is_an_event_too() -> None:
    def fail(_host: Host) -> Any:
        raise RuntimeError("oops")

    event = Rig(fail).event()
    assert isinstance(event, on.HostFailed)
    assert "internal error: RuntimeError: oops" in str(event.problem)


def test_no_python(rig: Rig) -> None:
    rig.event()
    rig.channel.end(127, f"{NO_PYTHON} /opt/py/bin/python, python3\n".encode())
    event = rig.event()
    assert event.problem.kind == "NoPython"
    assert "tried /opt/py/bin/python, python3" in str(event.problem)


def test_no_python_and_nothing_behind_it(rig: Rig) -> None:
    rig.event()
    rig.channel.end(127, NO_PYTHON.encode())
    assert rig.event().problem.kind == "NoPython"


def test_an_agent_whose_program_did_not_arrive_in_time(rig: Rig) -> None:
    rig.event()
    rig.channel.end(128 + signal.SIGALRM)
    assert "did not arrive within the lease; try: a longer --lease" in str(rig.event().problem)


def test_an_agent_that_does_not_start_is_quoted(rig: Rig) -> None:
    rig.event()
    rig.channel.say(b"This account is currently not available.\n")
    rig.channel.end(1)
    event = rig.event()
    assert isinstance(event, on.HostFailed)
    assert event.problem.kind == "AgentFailed"
    assert "status 1" in str(event.problem)
    assert "This account is currently not available." in str(event.problem)


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("hvlaunch agent: no place for temporary files (/tmp: no space left on device)", "try: df /tmp"),
        ("/bin/sh: 1: Cannot fork", "try: ulimit -a"),
        ("bash: fork: retry: Resource temporarily unavailable", "try: ulimit -a"),
        ("This account is currently not available.", "try: ssh a python3 --version"),
    ],
)
def test_an_agent_that_does_not_start_has_the_hint_of_its_cause(rig: Rig, said: str, hint: str) -> None:
    rig.event()
    rig.channel.end(1, f"{said}\n".encode())
    event = rig.event()
    assert event.problem.kind == "AgentFailed"
    assert hint in str(event.problem)


def test_a_killed_agent_is_named(rig: Rig) -> None:
    rig.ready()
    rig.channel.end(137, b"hvlaunch agent: killed by SIGKILL\n")
    event = rig.event()
    assert isinstance(event, on.HostGone)
    assert event.problem.kind == "HostLost"
    assert "hvlaunch agent: killed by SIGKILL" in str(event.problem)


def test_a_host_without_free_ports_is_named() -> None:
    rig = Rig(ports=[1, 2])
    rig.event()
    rig.channel.greet(master_port=None, beacon_port=None)
    event = rig.event()
    assert isinstance(event, on.HostFailed)
    assert event.problem.kind == "NoFreePort"
    assert str(event.problem).endswith(
        "fewer than two ports of --worker-port-range are free; try: a wider --worker-port-range"
    )


def test_an_agent_that_parts_says_why(rig: Rig) -> None:
    rig.ready()
    rig.channel.frame({"type": "parting", "cause": "its guardian was killed"})
    rig.channel.end(1)
    parting, gone = rig.event(), rig.event()
    assert isinstance(parting, on.HostParting)
    assert isinstance(gone, on.HostGone)
    assert "its guardian was killed" in str(parting.problem)
    assert "its guardian was killed" in str(gone.problem)


def test_an_agents_own_error_is_one_line_and_its_traceback_apart(rig: Rig) -> None:
    rig.ready()
    rig.channel.frame(
        {"type": "fault", "cause": "RuntimeError: can't start new thread"}, b"Traceback\n  here\n"
    )
    rig.channel.end(1)
    parting, gone = rig.event(), rig.event()
    assert isinstance(parting, on.HostParting)
    assert isinstance(gone, on.HostGone)
    assert parting.traceback == "Traceback\n  here"
    for error in (parting.problem, gone.problem):
        assert "RuntimeError: can't start new thread; try: ulimit -a" in str(error)
        assert "\n" not in str(error)


def test_an_agent_that_parts_in_an_orderly_way_closes(rig: Rig) -> None:
    rig.ready()
    rig.channel.frame({"type": "parting", "cause": "got SIGTERM"})
    rig.channel.frame({"type": "bye", "left": 0, "pids": []})
    rig.channel.end(0)
    event = rig.event()
    assert isinstance(event, on.HostParting)
    assert "got SIGTERM" in str(event.problem)
    assert rig.event() == on.HostClosed("a", 0)


def test_a_broken_connection(rig: Rig) -> None:
    rig.ready()
    rig.channel.break_off(OSError("Connection reset by peer"))
    event = rig.event()
    assert isinstance(event, on.HostGone)
    assert "Connection reset by peer" in str(event.problem)


def test_garbage_in_the_channel(rig: Rig) -> None:
    rig.ready()
    rig.channel.say(*rig.channel.writer.cut(b"\xff" * 100))
    event = rig.event()
    assert isinstance(event, on.HostGone)
    assert "a frame of" in str(event.problem)


def test_another_protocol(rig: Rig) -> None:
    rig.event()
    rig.channel.greet(protocol=99)
    event = rig.event()
    assert "speaks protocol 99" in str(event.problem)


def test_close_unblocks_everything(rig: Rig) -> None:
    rig.ready()
    rig.link.close()
    assert isinstance(rig.event(), on.HostGone)


@pytest.mark.parametrize(
    "header",
    [
        {"type": "challenge", "nonce": "n"},
        {"type": "resumed", "have": [0, 0], "proof": "p"},
        {"type": "refused", "cause": "c"},
        {"type": "have", "frames": [99, 0]},
    ],
)
def test_what_is_about_a_session_comes_where_it_was_asked_for_alone(rig: Rig, header: dict[str, Any]) -> None:
    rig.ready()
    rig.channel.frame(header)
    event = rig.event()
    assert isinstance(event, on.HostGone)
    assert "it sent what no agent of hvlaunch's sends" in event.problem.cause


def test_an_agent_that_a_launcher_started_may_end_unasked():
    expected = Expected(lambda _slot, _start: None, window=1)
    expected.may_end()
    expected.check({"type": "bye", "left": 0, "pids": []}, b"")


def test_a_result_where_no_function_was_called_breaks_the_connection(rig: Rig) -> None:
    rig.ready()
    rig.ranks[0, 1] = 0
    rig.start(0, 1)
    rig.channel.frame({"type": "output", "round": 0, "slot": 0, "start": 1, "stream": "result"}, b"x")
    event = rig.event()
    assert isinstance(event, on.HostGone)
    assert "a result, and the job calls no function" in event.problem.cause
