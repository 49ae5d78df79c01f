"""How many connections there may be, and how many without the token; which of them goes if there is one too many."""

import resource
import subprocess
import sys

from hvlaunch.rendezvous.serving.traffic import (
    Traffic,
    TrafficLimits,
    UnauthenticatedClients,
    UnauthenticatedLimits,
    room_for,
)


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


LIMITS = UnauthenticatedLimits(all=4, from_one_address=2, from_known_address=3, known_addresses=2)


def let_in(strangers, *connections):
    """Each is named by its address and a number; who had to go for it."""
    return [strangers.enter(connection, connection.rpartition("/")[0]) for connection in connections]


def test_the_oldest_of_the_address_goes():
    strangers: UnauthenticatedClients[str] = UnauthenticatedClients(LIMITS)
    assert let_in(strangers, "a/1", "a/2", "b/1", "a/3", "a/4") == [None, None, None, "a/1", "a/2"]
    assert len(strangers) == 3


def test_the_oldest_of_unknown_addresses_goes():
    strangers: UnauthenticatedClients[str] = UnauthenticatedClients(LIMITS)
    strangers.know(["k"])
    assert let_in(strangers, "k/1", "a/1", "b/1", "c/1", "d/1", "e/1", "k/2") == [None] * 5 + ["a/1", None]
    assert let_in(strangers, "k/3", "k/4") == [None, "k/1"]
    assert [name for name in ("k/2", "k/3", "k/4") if name in strangers] == ["k/2", "k/3", "k/4"]


def test_unknown_clients_never_take_places_of_known_addresses():
    strangers: UnauthenticatedClients[str] = UnauthenticatedClients(LIMITS)
    strangers.know(["k"])
    let_in(strangers, "k/1")
    gone = let_in(strangers, *(f"{number}/1" for number in range(1000)))
    assert "k/1" not in gone
    assert len(strangers) == 1 + LIMITS.all


def test_a_network_of_ipv6_counts_as_one_address_and_a_relay_as_its_host():
    strangers: UnauthenticatedClients[str] = UnauthenticatedClients(LIMITS)
    assert let_in(strangers, "fd00::1/1", "fd00::2/1", "fd00::3/1", "fd00:0:0:1::1/1") == [
        None,
        None,
        "fd00::1/1",
        None,
    ]
    assert let_in(UnauthenticatedClients(LIMITS), "relay:fd00::1/1", "relay:fd00::2/1", "relay:b/1") == [
        None,
        None,
        None,
    ]
    strangers.know(["fd00::4"])
    assert let_in(strangers, "fd00::4/1", "fd00::4/2", "fd00::5/1") == [None, None, "fd00::2/1"]


def test_an_address_that_becomes_known_frees_its_places():
    strangers: UnauthenticatedClients[str] = UnauthenticatedClients(LIMITS)
    let_in(strangers, "a/1", "a/2", "b/1")
    strangers.know(["a"])
    assert let_in(strangers, "a/3", "a/4") == [None, "a/1"]
    for name in ("a/2", "a/3", "a/4", "a/4", "b/1", "never/1"):
        strangers.leave(name)
    assert (len(strangers), strangers._at, strangers._unknown) == (0, {}, {})


def test_a_closed_connection_is_not_dropped_again():
    strangers: UnauthenticatedClients[str] = UnauthenticatedClients(LIMITS)
    let_in(strangers, "a/1", "a/2")
    strangers.leave("a/1")
    assert let_in(strangers, "a/3", "a/4") == [None, "a/2"]


def test_unknown_addresses_are_dropped_first():
    strangers: UnauthenticatedClients[str] = UnauthenticatedClients(LIMITS)
    assert strangers.oldest() is None
    strangers.know(["k", "l", "one too many"])
    let_in(strangers, "k/1", "a/1", "one too many/1")
    assert strangers.oldest() == "a/1"
    for name in ("a/1", "one too many/1"):
        strangers.leave(name)
    assert strangers.oldest() == "k/1"


def test_a_returning_unknown_address_waits_for_its_turn():
    now = [0.0]
    strangers: UnauthenticatedClients[str] = UnauthenticatedClients(LIMITS, lambda: now[0])
    strangers.know(["k"])
    let_in(strangers, "a/1", "k/1", "k/2", "k/3")
    assert strangers.is_welcome("a")
    now[0] = 0.5
    let_in(strangers, "a/2")
    assert [strangers.is_welcome(address) for address in ("a", "b", "k")] == [False, True, True]
    now[0] = 1.0
    assert strangers.is_welcome("a")
    assert let_in(strangers, "a/3") == ["a/1"]
    assert not strangers.is_welcome("a")
