"""How many strangers there may be, and which of them goes where one is too many."""

from hvlaunch.rendezvous.serving.traffic import UnauthenticatedClients, UnauthenticatedLimits

LIMITS = UnauthenticatedLimits(all=4, from_one_address=2, from_known_address=3, known_addresses=2)


def enter(strangers, *connections):
    """Each is named by its address and a number; who had to go for it."""
    return [strangers.enter(connection, connection.rpartition("/")[0]) for connection in connections]


def test_the_oldest_of_the_address_goes():
    strangers: UnauthenticatedClients[str] = UnauthenticatedClients(LIMITS)
    assert enter(strangers, "a/1", "a/2", "b/1", "a/3", "a/4") == [None, None, None, "a/1", "a/2"]
    assert len(strangers) == 3


def test_the_oldest_of_unknown_addresses_goes():
    strangers: UnauthenticatedClients[str] = UnauthenticatedClients(LIMITS)
    strangers.know(["k"])
    assert enter(strangers, "k/1", "a/1", "b/1", "c/1", "d/1", "e/1", "k/2") == [None] * 5 + ["a/1", None]
    assert enter(strangers, "k/3", "k/4") == [None, "k/1"]
    assert [name for name in ("k/2", "k/3", "k/4") if name in strangers] == ["k/2", "k/3", "k/4"]


def test_unknown_clients_never_take_places_of_known_addresses():
    strangers: UnauthenticatedClients[str] = UnauthenticatedClients(LIMITS)
    strangers.know(["k"])
    enter(strangers, "k/1")
    gone = enter(strangers, *(f"{number}/1" for number in range(1000)))
    assert "k/1" not in gone
    assert len(strangers) == 1 + LIMITS.all


def test_a_network_of_ipv6_counts_as_one_address_and_a_relay_as_its_host():
    strangers: UnauthenticatedClients[str] = UnauthenticatedClients(LIMITS)
    assert enter(strangers, "fd00::1/1", "fd00::2/1", "fd00::3/1", "fd00:0:0:1::1/1") == [
        None,
        None,
        "fd00::1/1",
        None,
    ]
    assert enter(UnauthenticatedClients(LIMITS), "relay:fd00::1/1", "relay:fd00::2/1", "relay:b/1") == [
        None,
        None,
        None,
    ]
    strangers.know(["fd00::4"])
    assert enter(strangers, "fd00::4/1", "fd00::4/2", "fd00::5/1") == [None, None, "fd00::2/1"]


def test_an_address_that_becomes_known_frees_its_places():
    strangers: UnauthenticatedClients[str] = UnauthenticatedClients(LIMITS)
    enter(strangers, "a/1", "a/2", "b/1")
    strangers.know(["a"])
    assert enter(strangers, "a/3", "a/4") == [None, "a/1"]
    for name in ("a/2", "a/3", "a/4", "a/4", "b/1", "never/1"):
        strangers.leave(name)
    assert (len(strangers), strangers._at, strangers._unknown) == (0, {}, {})


def test_a_closed_connection_is_not_dropped_again():
    strangers: UnauthenticatedClients[str] = UnauthenticatedClients(LIMITS)
    enter(strangers, "a/1", "a/2")
    strangers.leave("a/1")
    assert enter(strangers, "a/3", "a/4") == [None, "a/2"]


def test_unknown_addresses_are_dropped_first():
    strangers: UnauthenticatedClients[str] = UnauthenticatedClients(LIMITS)
    assert strangers.oldest() is None
    strangers.know(["k", "l", "one too many"])
    enter(strangers, "k/1", "a/1", "one too many/1")
    assert strangers.oldest() == "a/1"
    for name in ("a/1", "one too many/1"):
        strangers.leave(name)
    assert strangers.oldest() == "k/1"


def test_a_returning_unknown_address_waits_for_its_turn():
    now = [0.0]
    strangers: UnauthenticatedClients[str] = UnauthenticatedClients(LIMITS, lambda: now[0])
    strangers.know(["k"])
    enter(strangers, "a/1", "k/1", "k/2", "k/3")
    assert strangers.is_welcome("a")
    now[0] = 0.5
    enter(strangers, "a/2")
    assert [strangers.is_welcome(address) for address in ("a", "b", "k")] == [False, True, True]
    now[0] = 1.0
    assert strangers.is_welcome("a")
    assert enter(strangers, "a/3") == ["a/1"]
    assert not strangers.is_welcome("a")
