"""--rank-order: near hosts get neighbouring ranks, on networks that are made up, with the times that agents would measure."""

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest

from hvlaunch.engine.fabric import Fabric, Port, near_first

NEAR, FAR = 60e-6, 150e-6


def two_leaves(seed: int, size: int) -> tuple[list[str], Mapping[str, int], dict[str, Fabric]]:
    """Return hosts in any order, the leaf of each, and their fabrics: each host has measured those before it, with noise."""
    dice = random.Random(seed)
    hosts = [f"h{number}" for number in range(size)]
    leaf = {host: 0 if number < size // 2 + dice.randint(-1, 1) else 1 for number, host in enumerate(hosts)}
    dice.shuffle(hosts)
    surveyed = dice.sample(hosts, size)
    times = {
        host: {
            other: (NEAR if leaf[host] == leaf[other] else FAR) * dice.uniform(1.0, 1.25)
            for other in surveyed[:number]
        }
        for number, host in enumerate(surveyed)
    }
    return hosts, leaf, {host: Fabric(times=times[host]) for host in hosts}


def ring_time(order: Sequence[str], leaf: Mapping[str, int]) -> float:
    """Return the time of a step in a ring: leaves share a link that is four times slower for each pair that crosses it."""
    neighbours = list(zip(order, [*order[1:], order[0]], strict=True))
    crossing = sum(leaf[a] != leaf[b] for a, b in neighbours)
    # Half of the crossing pairs send in each direction; a link within a leaf takes 1.
    return max(1.0, 4.0 * crossing / 2) + sum(NEAR if leaf[a] == leaf[b] else FAR for a, b in neighbours)


@pytest.mark.parametrize("seed", range(20))
def test_a_ring_is_as_fast_as_in_the_best_order(seed: int) -> None:
    hosts, leaf, fabrics = two_leaves(seed, 8)
    order = near_first(hosts, fabrics)
    assert sorted(order) == sorted(hosts)
    first, *others = hosts
    assert order[0] == first
    best = min(ring_time([first, *others], leaf) for others in itertools.permutations(others))
    assert ring_time(order, leaf) <= 1.05 * best


@pytest.mark.parametrize("seed", range(20))
def test_hosts_that_stay_keep_their_neighbours(seed: int) -> None:
    """A host leaves, and another comes: the others stay in their order, and the new one joins its leaf."""
    hosts, leaf, fabrics = two_leaves(seed, 16)
    *members, newcomer = near_first(hosts, fabrics)
    gone = random.Random(seed).choice(members[1:])
    stay = [host for host in members if host != gone]
    before = near_first(stay, fabrics)
    assert before == stay
    after = near_first([*stay, newcomer], fabrics)
    assert [host for host in after if host != newcomer] == stay
    crossings = sum(leaf[a] != leaf[b] for a, b in itertools.pairwise([*after, after[0]]))
    assert crossings <= 2


def test_times_without_clear_groups_change_nothing() -> None:
    dice = random.Random(1)
    hosts = [f"h{number}" for number in range(12)]
    fabrics = {
        host: Fabric(times={other: NEAR * dice.uniform(1.0, 1.4) for other in hosts[:number]})
        for number, host in enumerate(hosts)
    }
    assert near_first(hosts, fabrics) == hosts


def test_three_levels_and_an_unmeasured_host() -> None:
    """Racks within rooms: rooms come together first, and racks within them."""
    place = {"a": (0, 0), "b": (1, 0), "c": (0, 1), "d": (1, 0), "e": (0, 0), "f": (0, 1), "g": (1, 1)}

    def seconds(host: str, other: str) -> float:
        if place[host] == place[other]:
            return 50e-6
        return 200e-6 if place[host][0] == place[other][0] else 2e-3

    hosts = [*place, "unmeasured"]
    fabrics = {
        host: Fabric(times={other: seconds(host, other) for other in list(place)[:number]})
        for number, host in enumerate(place)
    }
    assert near_first(hosts, fabrics) == ["a", "e", "c", "f", "b", "d", "g", "unmeasured"]


def port(subnet: str) -> Port:
    return Port(
        "mlx5_0",
        1,
        "CA",
        is_active=True,
        is_open=True,
        link="InfiniBand",
        rate=200.0,
        subnet=subnet,
        pci="",
        gids=(),
    )


def test_subnets_then_nvlink_clusters() -> None:
    fabrics = {
        "a": Fabric(ports=(port("1"),), nvlink="x/1"),
        "b": Fabric(ports=(port("2"),), nvlink="z/1"),
        "c": Fabric(ports=(port("1"),), nvlink="y/1"),
        "d": Fabric(ports=(port("1"),), nvlink="x/1"),
        "e": Fabric(),
        "f": Fabric(ports=(port("2"),), nvlink="z/1"),
    }
    assert near_first(list("abcdef"), fabrics) == ["a", "d", "c", "b", "f", "e"]
    # Hosts without data are a group.
    assert near_first(list("gabcdefh"), fabrics) == ["g", "e", "h", "a", "d", "c", "b", "f"]


def test_many_hosts_take_no_time() -> None:
    hosts = [f"h{number}" for number in range(128)]
    fabrics = {
        host: Fabric(
            times={
                other: NEAR if (number - index) % 2 == 0 else FAR
                for index, other in enumerate(hosts[:number])
            }
        )
        for number, host in enumerate(hosts)
    }
    assert near_first(hosts, fabrics) == [*hosts[::2], *hosts[1::2]]
