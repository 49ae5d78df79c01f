"""What a hostile host may send: each breach ends that host, by name and in one line, and changes nothing else."""

from collections.abc import Iterator
from typing import Any

import pytest

from hvlaunch.agent.wire.frames import FRAME_COST, LAST_OUTPUT, OUTPUT_CHUNK, RELAY_WINDOW
from hvlaunch.engine import events as on
from tests.unit.gloo.fakes import FACTS, HELLO
from tests.unit.gloo.link_rig import WINDOW, Rig

ABOUT = {"round": 0, "slot": 0, "start": 0}
LAST = 3 * (LAST_OUTPUT + 2 * OUTPUT_CHUNK)
"""What the pipes of one worker may bring at its end."""
OUTPUT = {"type": "output", **ABOUT, "stream": "stdout"}
EXITED = {
    "type": "exited",
    **ABOUT,
    "code": 1,
    "signal": None,
    "max_rss": 1,
    "at": 1.0,
    "oom_killed": False,
    "port_taken_by": None,
}
REACHED: dict[str, Any] = {"type": "reached", "address": "10.0.0.9", "tried": [], "relay_port": None}
MANY = {f"eth{number}": ["10.0.0.1"] * 10 for number in range(20_000)}


@pytest.fixture
def rig() -> Iterator[Rig]:
    """The host is ready, and has one worker."""
    rig = Rig().ready()
    rig.ranks[0, 0] = 0
    rig.start(0, 0)
    yield rig
    rig.link.close()


def lost(rig: Rig) -> str:
    """Why the host is lost, which is the next thing that the engine hears."""
    event = rig.event()
    assert isinstance(event, on.HostGone), event
    assert (event.host, event.problem.host, event.problem.kind) == ("a", "a", "ProtocolBroken")
    text = str(event.problem)
    assert text.isprintable()
    return text


BREACHES: list[tuple[str, dict[str, Any], bytes]] = [
    ("a file elsewhere", OUTPUT | {"stream": "../../.bashrc"}, b"x"),
    ("a stream that is no text", OUTPUT | {"stream": ["stdout"]}, b"x"),
    ("a slot that never was", OUTPUT | {"slot": 7}, b"x"),
    ("a slot below all", OUTPUT | {"slot": -1}, b"x"),
    ("a slot that is no number", OUTPUT | {"slot": "0"}, b"x"),
    ("a slot that is true", OUTPUT | {"slot": False}, b"x"),
    ("another round", OUTPUT | {"round": 3}, b"x"),
    ("another start", OUTPUT | {"start": 1}, b"x"),
    ("a chunk that is too long", OUTPUT, b"x" * (OUTPUT_CHUNK + 1)),
    ("a field too many", OUTPUT | {"more": 1}, b"x"),
    ("exit code 256, which would be 0", EXITED | {"code": 256}, b""),
    ("exit code -1", EXITED | {"code": -1}, b""),
    ("a code that is true", EXITED | {"code": True}, b""),
    ("no code and no signal", EXITED | {"code": None}, b""),
    ("a code and a signal", EXITED | {"signal": 9}, b""),
    ("signal 0", EXITED | {"code": None, "signal": 0}, b""),
    ("a signal that is none", EXITED | {"code": None, "signal": 999}, b""),
    ("a time that is not finite", EXITED | {"at": 10**400}, b""),
    ("a time before all", EXITED | {"at": -1.0}, b""),
    ("no time", EXITED | {"at": None}, b""),
    ("a memory of text", EXITED | {"max_rss": "1"}, b""),
    ("an end of nobody", EXITED | {"slot": 1}, b""),
    ("a second start", {"type": "started", **ABOUT, "pid": 3, "at": 1.0}, b""),
    ("no start behind one", {"type": "not_started", **ABOUT, "code": 127, "cause": "x"}, b""),
    ("a code of no start", {"type": "not_started", **ABOUT, "code": 0, "cause": "x"}, b""),
    ("a forged line", {"type": "parting", "cause": "x\nhvlaunch: all is well"}, b""),
    ("a terminal's control", {"type": "parting", "cause": "\x1b]0;x\x07"}, b""),
    ("a cause of a mebibyte", {"type": "parting", "cause": "x" * 900_000}, b""),
    ("a cause that is no text", {"type": "fault", "cause": 5}, b""),
    ("no cause", {"type": "parting"}, b""),
    ("a second hello", HELLO, b""),
    ("an unknown type", {"type": "\x1bx"}, b""),
    ("a driver's frame", {"type": "start", "round": 0}, b"{}"),
    ("an address that nobody told it", REACHED | {"address": "6.6.6.6"}, b""),
    ("addresses that nobody tried", REACHED | {"tried": ["6.6.6.6"]}, b""),
    ("a relay elsewhere", REACHED | {"address": "6.6.6.6", "relay_port": 1}, b""),
    ("a probe that nobody asked for", {"type": "probed", "target": "b", "agent": 0, "address": None}, b""),
    ("a suspension in a static job", {"type": "suspended", **ABOUT}, b""),
    ("a port before any worker was started", {"type": "master_port", "port": 5}, b""),
    ("a port that is none", {"type": "master_port", "port": 65536}, b""),
    ("ports for places in a command without any", {"type": "master_port", "port": 5, "more": [6]}, b""),
    ("stdin that nobody sent", {"type": "stdin_taken", "slot": 0, "bytes": 1}, b""),
    ("stdin given back", {"type": "stdin_taken", "slot": 0, "bytes": -5}, b""),
    ("a relayed connection without a relay", {"type": "relay", "what": "open", "id": 1}, b""),
    ("something unheard of about a connection", {"type": "relay", "what": "reboot", "id": 1}, b""),
    ("a stream of an errand that was never started", {"type": "errand", "what": "data", "id": 1}, b"x"),
    ("a result of an errand that was never started", {"type": "errand", "what": "done", "id": 1}, b"{}"),
    (
        "an errand that failed for an unknown reason",
        {"type": "errand", "what": "failed", "id": 1, "reason": "cats", "cause": "x"},
        b"",
    ),
    ("a clock that is none", {"type": "pong", "at": "now"}, b""),
    ("less than nothing left", {"type": "bye", "left": -1}, b""),
    ("a body where none belongs", {"type": "pong", "at": 1.0}, b"x"),
]


@pytest.mark.parametrize(
    ("header", "body"), [case[1:] for case in BREACHES], ids=[case[0] for case in BREACHES]
)
def test_a_breach_ends_only_its_host(rig: Rig, header: dict[str, Any], body: bytes) -> None:
    rig.channel.frame(header, body)
    assert "host a: lost: it sent data that no hvlaunch agent sends: " in lost(rig)
    assert not rig.sink.got
    assert rig.events.empty()


@pytest.mark.parametrize(
    "changes",
    [
        {"facts": FACTS | {"addresses": MANY}},
        {"facts": FACTS | {"addresses": {"e": ["not an address"]}}},
        {"facts": FACTS | {"addresses": {"e\n": ["10.0.0.1"]}}},
        {"facts": FACTS | {"addresses": ["10.0.0.1"]}},
        {"facts": FACTS | {"gpus": 100_000}},
        {"facts": FACTS | {"gpus": 2}},
        {"facts": FACTS | {"cpus": 0}},
        {"facts": FACTS | {"cpus": 1 << 40}},
        {"facts": FACTS | {"python": "3.11\n"}},
        {"facts": None},
        {"scratch": "/tmp/\x1b"},
        {"beacon_port": 0},
        {"master_port": None},
        {"more_ports": [20002]},
        {"more_ports": [0]},
        {"cwd_error": ["no"]},
        {"trouble": "x\ny"},
        {"protocol": "3"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_impossible_facts_end_the_host(changes: dict[str, Any]) -> None:
    rig = Rig()
    assert isinstance(rig.event(), on.HostConnected)
    rig.channel.greet(**changes)
    assert "host a: lost: it sent data that no hvlaunch agent sends: " in lost(rig)
    rig.link.close()


def test_output_beyond_its_credit_ends_the_host(rig: Rig) -> None:
    for _ in range(2 + (WINDOW + LAST) // OUTPUT_CHUNK):
        rig.channel.frame(OUTPUT, b"x" * OUTPUT_CHUNK)
    assert "output beyond its credit" in lost(rig)


def test_small_frames_take_credit_as_well(rig: Rig) -> None:
    """Each byte alone is kept in a frame of its own, until it is printed."""
    for _ in range(2 + (WINDOW + LAST + OUTPUT_CHUNK) // FRAME_COST):
        rig.channel.frame(OUTPUT, b"x")
    assert "output beyond its credit" in lost(rig)
    assert len(rig.sink.got) < (WINDOW + LAST + OUTPUT_CHUNK) // FRAME_COST


def test_output_behind_the_end_of_its_stream_ends_the_host(rig: Rig) -> None:
    rig.channel.frame(OUTPUT)
    rig.channel.frame(OUTPUT, b"x")
    assert "output of slot 0 after its end" in lost(rig)


def test_a_frame_behind_the_last_ends_the_host(rig: Rig) -> None:
    rig.link.send({"type": "bye"})
    rig.channel.frame({"type": "bye", "left": 0, "pids": []})
    rig.channel.frame({"type": "pong", "at": 1.0})  # it waits until all is durable
    rig.channel.frame({"type": "master_port", "port": 4711})
    assert "a frame of type master_port after bye" in lost(rig)


def test_a_last_frame_that_was_not_asked_for_ends_the_host(rig: Rig) -> None:
    rig.channel.frame({"type": "bye", "left": 0, "pids": []})
    assert "a frame of type bye that was not asked for" in lost(rig)


@pytest.mark.parametrize(
    ("frames", "cause"),
    [
        ([("data", b"x" * (RELAY_WINDOW // 16))] * 17, "beyond its window"),
        ([("credit", b"")], "credit for more than was relayed"),
        ([("end", b""), ("data", b"x")], "beyond its window"),
    ],
)
def test_forbidden_relay_frames_end_the_host(rig: Rig, frames: list[tuple[str, bytes]], cause: str) -> None:
    rig.channel.frame({"type": "reached", "address": "127.0.0.1", "tried": [], "relay_port": 5})
    assert isinstance(rig.event(), on.RendezvousReached)
    rig.channel.frame({"type": "relay", "id": 1, "what": "open"})
    for what, body in frames:
        more = {"bytes": 1} if what == "credit" else {}
        rig.channel.frame({"type": "relay", "id": 1, "what": what, **more}, body)
    assert cause in lost(rig)


@pytest.mark.parametrize("numbers", [range(1, 1026), [2], [1, 1]])
def test_connections_too_many_end_the_host(rig: Rig, numbers: list[int]) -> None:
    rig.channel.frame({"type": "reached", "address": "127.0.0.1", "tried": [], "relay_port": 5})
    assert isinstance(rig.event(), on.RendezvousReached)
    for number in numbers:
        rig.channel.frame({"type": "relay", "id": number, "what": "open"})
    assert "one relayed connection too many" in lost(rig)
