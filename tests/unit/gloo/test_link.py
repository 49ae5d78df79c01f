"""A link: from the bytes of a host to events and output."""

from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from hvlaunch.agent.wire.frames import FRAME_COST, START, encode
from hvlaunch.driver.links.agent_channel import CommandConnection
from hvlaunch.driver.program import AgentProgram
from hvlaunch.engine import events as on
from hvlaunch.job import Host
from hvlaunch.ssh import stage
from tests.unit.gloo.fakes import FACTS, FakeConnection
from tests.unit.gloo.link_rig import BUNDLE, Rig


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


def test_the_program_is_packed_during_the_login(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: SimpleQueue[bool] = SimpleQueue()
    monkeypatch.setattr(AgentProgram, "packed", lambda _self, *, is_near: packed.put(is_near))
    connection = FakeConnection()

    def connect(_host: Host) -> CommandConnection:
        stage("connect")
        assert packed.empty()
        stage("log in")
        assert packed.get(timeout=60)
        stage("log in")
        return CommandConnection(connection)

    rig = Rig(connect)
    assert [rig.event() for _ in range(4)] == [
        *(on.HostStage("a", name) for name in ("connect", "log in", "log in")),
        on.HostConnected("a"),
    ]
    rig.link.close()
    # Once for all hosts.
    assert packed.empty()


def test_neighbors_are_other_open_hosts_after_their_hello(rig: Rig) -> None:
    """A host that was silent for longer may be lost: it comes last."""
    others: list[Any] = [
        SimpleNamespace(last_heard=heard, is_closed=closed)
        for heard, closed in ((7.0, False), (9.0, False), (9.5, True), (None, False))
    ]
    rig.link._opening = rig.link._opening._replace(links=lambda: [rig.link, *others])
    rig.link.last_heard = 8.0
    assert list(rig.link.neighbors()) == [others[1], others[0]]


def test_facts() -> None:
    rig = Rig(gpus=True)
    assert rig.event() == on.HostConnected("a")
    assert rig.link.last_heard is None
    rig.channel.greet(facts=FACTS | {"addresses": {"e": ("10.0.0.1",)}, "gpus": 2})
    event = rig.event()
    assert (event.facts.gpus, event.facts.cpus, event.facts.peer_address) == (2, 4, "10.0.0.1")
    assert rig.link.last_heard == 50.0
    rig.link.close()


def test_noise_before_the_agent_is_skipped(rig: Rig) -> None:
    rig.event()
    rig.channel.say(b"Welcome to a!\n" * 1000, START[:3], b"no, not yet\n")
    rig.channel.frame({"type": "reached", "address": "10.0.0.9", "tried": [], "relay_port": None})
    assert rig.event() == on.RendezvousReached("a", "10.0.0.9", ())


def test_noise_after_the_agents_start_is_posted_once_and_is_no_sign_of_life(rig: Rig) -> None:
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


def test_relay_ends_with_its_host(rig: Rig) -> None:
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


def test_output_of_an_unknown_worker_breaks_the_connection(rig: Rig) -> None:
    rig.ready()
    rig.channel.frame({"type": "output", "round": 0, "slot": 5, "start": 0, "stream": "stdout"}, b"x")
    event = rig.event()
    assert isinstance(event, on.HostGone)
    assert "a frame of type output of a worker that was never started, in slot 5" in event.problem.cause
    assert not rig.sink.got


def test_time_of_an_exit_is_in_the_drivers_clock(rig: Rig) -> None:
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


@pytest.mark.parametrize(
    "header",
    [
        {"type": "challenge", "nonce": "n"},
        {"type": "resumed", "have": [0, 0], "proof": "p"},
        {"type": "refused", "cause": "c"},
        {"type": "have", "frames": [99, 0]},
    ],
)
def test_frames_about_sessions_come_only_in_a_handshake(rig: Rig, header: dict[str, Any]) -> None:
    rig.ready()
    rig.channel.frame(header)
    event = rig.event()
    assert isinstance(event, on.HostGone)
    assert "it sent data that no hvlaunch agent sends" in event.problem.cause


def test_result_without_a_called_function_breaks_the_connection(rig: Rig) -> None:
    rig.ready()
    rig.ranks[0, 1] = 0
    rig.start(0, 1)
    rig.channel.frame({"type": "output", "round": 0, "slot": 0, "start": 1, "stream": "result"}, b"x")
    event = rig.event()
    assert isinstance(event, on.HostGone)
    assert "a result, and the job calls no function" in event.problem.cause
