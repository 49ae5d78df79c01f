"""Frames to and from the agents of one host's ranks."""

import json

from hvlaunch.agent.frames import FRAME_COST
from hvlaunch.mpi.joined_agents import JoinedAgents

HELLO: dict[str, object] = {
    "type": "hello",
    "facts": {},
    "cwd_error": None,
    "trouble": None,
    "beacon_port": 1,
}


def to_agents(joined, header, body=b""):
    return list(joined.to_agents(header, body))


def to_driver(joined, slot, header, body=b""):
    return list(joined.to_driver(slot, header, body))


def test_the_leader_alone_looks_for_the_rendezvous():
    sent = to_agents(JoinedAgents(3), {"type": "hello", "cwd": "/", "rendezvous": {"candidates": []}})
    assert [slot for slot, _ in sent] == [0, 1, 2]
    assert [header["rendezvous"] for _, (header, _) in sent] == [{"candidates": []}, None, None]


def test_one_hello_of_all_when_the_last_has_said_it():
    joined = JoinedAgents(3)
    assert to_driver(joined, 2, {**HELLO, "cwd_error": "No such file", "beacon_port": 3}) == []
    assert to_driver(joined, 0, HELLO) == []
    assert to_driver(joined, 1, {**HELLO, "trouble": "no ctypes"}) == [
        ({**HELLO, "cwd_error": "No such file", "trouble": "no ctypes"}, b"")
    ]


def test_each_agent_starts_its_own_worker():
    plan = {
        "argv": ["train"],
        "defaults": {},
        "env": {"A": "b"},
        "workers": [{"slot": 0, "x": 1}, {"slot": 1}],
    }
    sent = to_agents(JoinedAgents(2), {"type": "start", "round": 0}, json.dumps(plan).encode())
    assert [(slot, header) for slot, (header, _) in sent] == [
        (0, {"type": "start", "round": 0}),
        (1, {"type": "start", "round": 0}),
    ]
    assert [json.loads(body) for _, (_, body) in sent] == [
        {**plan, "workers": [one]} for one in plan["workers"]
    ]


def test_orders_go_to_those_whom_they_concern():
    joined = JoinedAgents(3)

    def slots(header):
        return [slot for slot, _ in to_agents(joined, header)]

    assert slots({"type": "ping"}) == slots({"type": "bye"}) == [0, 1, 2]
    assert slots({"type": "stop", "slots": None, "steps": []}) == [0, 1, 2]
    assert slots({"type": "signal", "slots": [1], "signal": 10}) == [1]
    assert slots({"type": "stdin", "slot": 2}) == [2]
    assert slots({"type": "probe", "target": "b"}) == slots({"type": "relay", "id": 1, "what": "end"}) == [0]


def test_credit_goes_to_those_whose_output_was_printed_first():
    joined = JoinedAgents(2)
    for slot, size in ((0, 10), (1, 4), (0, 3)):
        frame = {"type": "output", "slot": slot, "stream": "stdout"}
        assert to_driver(joined, slot, frame, b"x" * size) == [(frame, b"x" * size)]
    to_driver(
        joined, 1, {"type": "output", "slot": 1, "stream": "stdout"}
    )  # the end of a stream takes no credit

    def credit(size):
        return [
            (slot, header["bytes"]) for slot, (header, _) in to_agents(joined, {"type": "ack", "bytes": size})
        ]

    assert credit(8 + FRAME_COST) == [(0, 8 + FRAME_COST)]
    assert credit(6 + FRAME_COST) == [(0, 2), (1, 4 + FRAME_COST)]
    assert credit(2 + FRAME_COST) == [(0, 2 + FRAME_COST)]
    assert credit(1) == [(0, 1)]
    assert credit(5) == []  # more than there was


def test_one_goodbye_of_all_with_what_they_could_not_kill():
    joined = JoinedAgents(2)
    assert to_driver(joined, 1, {"type": "bye", "left": 2}) == []
    assert (joined.has_ended(0), joined.has_ended(1)) == (False, True)
    assert to_driver(joined, 0, {"type": "bye", "left": 1}) == [({"type": "bye", "left": 3}, b"")]


def test_an_agent_that_its_launcher_ends_is_no_host_that_is_lost():
    joined = JoinedAgents(1)
    for cause in ("got SIGTERM", "its guardian was killed"):
        assert to_driver(joined, 0, {"type": "parting", "cause": cause}) == []
    assert not joined.is_ended
    end = {"type": "exited", "slot": 0, "code": 3, "signal": None}
    assert to_driver(joined, 0, end) == [(end, b"")]
    assert to_driver(joined, 0, {**end, "code": None, "signal": 9}) == []
    assert joined.is_ended
    early = JoinedAgents(1)
    to_driver(early, 0, {"type": "parting", "cause": "got SIGTERM"})
    to_driver(early, 0, {"type": "bye", "left": 0})
    assert early.is_ended
    fault = {"type": "parting", "cause": "heard nothing from the driver for 30 seconds"}
    assert to_driver(joined, 0, fault) == [(fault, b"")]
