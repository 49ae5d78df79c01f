"""Messages of workers at a real rendezvous become events, and actions become messages."""

from queue import SimpleQueue

import pytest

from hvlaunch.driver.turn import Arrival
from hvlaunch.driver.worker_messages import WorkerMessages
from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine.actions import HostNetwork
from hvlaunch.hosts.placement import Launch, place
from hvlaunch.rendezvous import Client
from hvlaunch.rendezvous.messages import (
    ASKS,
    BEATS,
    PLACES,
    ROUNDS,
    Ask,
    Beat,
    Grant,
    Notice,
    decode,
    encode,
)
from hvlaunch.rendezvous.serving import RendezvousServer

LONG = 60.0
WORKERS = [("fe80::1", 3, 2), ("a", 0, 0)]


GOOD = encode(Beat(1))
HUGE = b'{"commit": 1%s, "round": 0}' % (b"0" * 40)
LONG_TEXT = encode(Ask(0, 0, "x" * (1 << 16)))


class Rig:
    def __init__(self, server: RendezvousServer) -> None:
        self.events: SimpleQueue[Arrival] = SimpleQueue()
        self.worker_messages = WorkerMessages(server, self.events.put, lambda *worker: worker in WORKERS)
        self.worker_messages.open()
        self.worker = Client(f"http://127.0.0.1:{server.port}", "t0ken")

    def event(self) -> on.Event:
        return self.events.get(timeout=LONG).event


@pytest.fixture
def rig():
    with RendezvousServer("t0ken", host="127.0.0.1") as server:
        one = Rig(server)
        with one.worker:
            yield one


def test_asks_and_beats_are_events(rig):
    rig.worker.put(ASKS, "fe80::1/3/2", encode(Ask(0, -1, "why")))
    assert rig.event() == on.WorkerAsked("fe80::1", 3, 2, 0, -1, "why")
    rig.worker.put(BEATS, "a/0/0", encode(Beat(4)))
    assert rig.event() == on.WorkerBeat("a", 0, 0, 4)
    rig.worker.put(BEATS, "a/0/0", encode(Beat(5, last=True)))
    assert rig.event() == on.WorkerBeat("a", 0, 0, 5, is_last=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("a/0/0", b"{"),
        ("a/0/0", b"[1]"),
        ("a/0", b"{}"),
        ("a/x/0", b"{}"),
        ("b/0/0", GOOD),
        ("a/00/0", GOOD),
        ("a/0/0", HUGE),
        ("a/0/0", LONG_TEXT),
    ],
)
def test_malformed_message_is_no_event(rig, key, value):
    for scope in (ASKS, BEATS):
        rig.worker.put(scope, key, value)
        rig.worker.delete(scope, key)
    rig.worker.put(BEATS, "a/0/0", encode(Beat(1)))
    assert rig.event() == on.WorkerBeat("a", 0, 0, 1)


def test_places_and_ends_of_rounds_are_messages(rig):
    network = HostNetwork(master_addr="10.0.0.1", master_port=0, interface="eth0", rendezvous=None)
    third = place([("a", 2), ("b", 1)])[2]
    rig.worker_messages.carry_out(do.Assign(7, Launch(0, 4, third), network, 0))
    grant = decode(Grant, rig.worker.wait(PLACES, "b/0/4", LONG))
    assert grant == Grant(7, 2, 3, 0, 1, 1, 2, "10.0.0.1", "eth0")
    chosen = network._replace(variables={"GLOO_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "=mlx5_1:1"})
    rig.worker_messages.carry_out(do.Assign(7, Launch(1, 0, third), chosen, 0))
    grant = decode(Grant, rig.worker.wait(PLACES, "b/1/0", LONG))
    assert grant.variables == "GLOO_SOCKET_IFNAME=eth0 NCCL_IB_HCA==mlx5_1:1"
    rig.worker_messages.carry_out(do.Leave("a", 1, 0, why.SlotGone("a")))
    assert (
        decode(Grant, rig.worker.wait(PLACES, "a/1/0", LONG)).leave
        == "host a has left the pool, or has fewer slots"
    )
    rig.worker_messages.carry_out(do.Change(7, why.MoreWorkers(1)))
    assert decode(Notice, rig.worker.wait(ROUNDS, "7", LONG)) == Notice("changing", "1 more worker")
    rig.worker_messages.carry_out(do.Break(7, why.NoCommit(30.0)))
    assert decode(Notice, rig.worker.wait(ROUNDS, "7", LONG)).state == "broken"
