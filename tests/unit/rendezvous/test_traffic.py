"""How many connections there may be."""

import resource
import subprocess
import sys

from hvlaunch.rendezvous.serving.traffic import Traffic, TrafficLimits, room_for


class Connection:
    def __init__(self, peer):
        self.peer = peer
        self.is_aborted = False

    def abort(self):
        self.is_aborted = True


def enter(traffic, *connections):
    """Whether each was let in; they show the token at once."""
    entered = []
    for connection in connections:
        entered.append(traffic.enter(connection))
        if entered[-1]:
            traffic.trust(connection)
    return entered


def test_a_refused_connection_takes_no_place():
    traffic: Traffic[Connection] = Traffic(
        TrafficLimits(connections=3, from_one_address=2), lambda count: True
    )
    first, second, third = (Connection("a") for _ in range(3))
    assert enter(traffic, first, second, third) == [True, True, False]
    others = [Connection(peer) for peer in "bc"]
    assert enter(traffic, *others) == [True, False]
    assert (len(traffic.open), traffic.turned_away) == (5, 2)
    traffic.leave(third)
    assert not traffic.enter(third)
    for one in (third, first):
        traffic.leave(one)
    assert traffic.enter(first)
    for one in list(traffic.open):
        traffic.leave(one)
    assert not traffic._by_peer
    assert not traffic._parting
    assert len(traffic.unauthenticated) == 0


def test_an_unauthenticated_client_is_dropped_for_another():
    traffic: Traffic[Connection] = Traffic(TrafficLimits(connections=2), lambda count: True)
    stranger, friend, later = Connection("a"), Connection("b"), Connection("c")
    assert traffic.enter(stranger)
    assert enter(traffic, friend, later) == [True, True]
    assert [one.is_aborted for one in (stranger, friend, later)] == [True, False, False]
    assert traffic.open == {friend, later}
    traffic.leave(stranger)  # as its transport says later
    assert not traffic.enter(Connection("d"))
    assert traffic._by_peer == {"b": 1, "c": 1}


def test_the_machine_may_have_no_room():
    traffic: Traffic[Connection] = Traffic(room_for=lambda count: count <= 1)
    assert enter(traffic, Connection("a"), Connection("a")) == [True, False]
    assert traffic.may_part_slowly


def test_the_limit_of_descriptors_is_raised_when_it_is_needed():
    code = """
import resource
from hvlaunch.rendezvous.serving.traffic import room_for
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 700))
for count in (44, 45, 300, 444, 445):
    print(room_for(count), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert told.splitlines() == [
        "True 300 700", "True 600 700", "True 600 700", "True 700 700", "False 700 700",
    ]  # fmt: skip
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert room_for(1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
