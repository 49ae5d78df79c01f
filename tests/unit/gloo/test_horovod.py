from hvlaunch.driver.worker_messages import addresses, scopes
from hvlaunch.engine.actions import HostNetwork, Start
from hvlaunch.hosts.placement import Launch, place
from tests.unit.gloo.history import facts

NETWORK = HostNetwork(master_addr="10.0.0.1", master_port=1, interface=None, rendezvous=None)


def test_the_scopes_are_those_of_horovods_placement() -> None:
    """The example of Horovod 0.28: a:2,b:1,c:3, five workers."""
    assert scopes(place([("a", 2), ("b", 1), ("c", 3)], 5)) == {
        "global": 5,
        "local_a": 2,
        "local_b": 1,
        "local_c": 2,
        "cross_0": 3,
        "cross_1": 2,
    }


def test_connections_come_from_the_hosts_addresses_or_their_relay() -> None:
    told = facts(1, addresses={"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.1", "fd00::1"]})
    start = Start(
        "a", 0, (Launch(0, 0, place([("a", 1)], 1)[0]),), NETWORK, told._replace(peer_address="192.0.2.7")
    )
    assert addresses([start]) == {"10.0.0.1", "fd00::1", "192.0.2.7", "relay:a"}
    unknown = start._replace(facts=told._replace(peer_address=""))
    assert addresses([unknown]) == {"10.0.0.1", "fd00::1", "relay:a"}


def test_workers_on_the_drivers_machine_connect_from_its_loopback() -> None:
    told = facts(1, addresses={"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.1"]}, peer_address=None)
    start = Start("localhost", 0, (Launch(0, 0, place([("localhost", 1)], 1)[0]),), NETWORK, told)
    assert addresses([start]) == {"127.0.0.1", "::1", "10.0.0.1", "relay:localhost"}
