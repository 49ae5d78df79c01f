"""Leases: silence is counted on the watcher's clock, and only while it looks."""

from hvlaunch.torch.torchrun.keeper import Leases, watched
from hvlaunch.torch.torchrun.state import JobState


def test_a_node_silent_for_a_lease_is_lost():
    leases = Leases(lease=3.0, interval=1.0)
    assert leases.update({"a": b"0", "b": b"0"}, 10.0) == []
    assert leases.update({"a": b"1", "b": b"0"}, 11.0) == []
    assert leases.update({"a": b"2", "b": b"0"}, 12.0) == []
    assert leases.update({"a": b"3", "b": b"0"}, 13.0) == ["b"]
    assert leases.alive == {"a"}


def test_a_node_without_any_sign_is_lost():
    leases = Leases(lease=2.0, interval=1.0)
    assert leases.update({"a": None}, 0.0) == []
    assert leases.update({"a": None}, 1.0) == []
    assert leases.update({"a": None}, 2.0) == ["a"]


def test_an_unreachable_rendezvous_loses_no_node():
    leases = Leases(lease=6.0, interval=1.0)
    leases.update({"a": b"0"}, 0.0)
    assert leases.update({"a": b"0"}, 1000.0) == []
    assert leases.update({"a": b"1"}, 1001.0) == []


def test_a_new_nodes_silence_counts_from_its_arrival():
    leases = Leases(lease=2.0, interval=1.0)
    leases.update({"a": b"0"}, 0.0)
    assert leases.update({"a": b"1", "b": b"0"}, 1.0) == []
    assert leases.update({"a": b"2", "b": b"0"}, 2.0) == []
    assert leases.update({"a": b"3", "b": b"0"}, 3.0) == ["b"]


def test_everyone_is_looked_at_by_somebody_even_when_the_first_few_die_at_once():
    nodes = tuple(f"n{number}" for number in range(10))
    state = JobState(epoch="e", placed=nodes[:6], active=nodes[:6], waiting=nodes[6:])
    for deaths in ({0, 1, 2}, {0}, {4, 9}, set(range(9))):
        lost = deaths
        while lost:
            dead = {nodes[number] for number in lost}
            seen = {other for node in nodes if node not in dead for other in watched(state, node)}
            found = dead & seen
            assert found
            nodes_left = tuple(node for node in state.nodes if node not in found)
            state = JobState(epoch="e", placed=state.placed, active=(), waiting=nodes_left)
            lost = {number for number in lost if nodes[number] not in found}
        state = JobState(epoch="e", placed=nodes[:6], active=nodes[:6], waiting=nodes[6:])


def test_watching_effort_is_linear_in_the_nodes():
    nodes = tuple(map(str, range(1000)))
    state = JobState(epoch="e", placed=nodes, active=nodes)
    assert sum(len(watched(state, node)) for node in nodes) < 7 * len(nodes)
