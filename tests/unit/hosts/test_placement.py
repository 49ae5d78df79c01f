"""Ranks: Horovod's tables, and what holds for every placement."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvlaunch.errors import BadUsage, NotEnoughSlots
from hvlaunch.hosts.placement import Placement, needed, place, slots_of
from hvlaunch.job import Host

Row = tuple[str, int, int, int, int, int, int]


def row(placement: Placement) -> Row:
    """In the order that Horovod's tables have."""
    p = placement
    return (p.host, p.rank, p.local_rank, p.cross_rank, p.size, p.local_size, p.cross_size)


@pytest.mark.parametrize(
    ("slots", "np", "rows"),
    [
        ([("a", 1)], None, [("a", 0, 0, 0, 1, 1, 1)]),
        (
            [("a", 1), ("b", 2)],
            3,
            [("a", 0, 0, 0, 3, 1, 2), ("b", 1, 0, 1, 3, 2, 2), ("b", 2, 1, 0, 3, 2, 1)],
        ),
        (
            [("a", 2), ("b", 1), ("c", 3)],
            5,
            [
                ("a", 0, 0, 0, 5, 2, 3),
                ("a", 1, 1, 0, 5, 2, 2),
                ("b", 2, 0, 1, 5, 1, 3),
                ("c", 3, 0, 2, 5, 2, 3),
                ("c", 4, 1, 1, 5, 2, 2),
            ],
        ),
        ([("localhost", 4)], 2, [("localhost", 0, 0, 0, 2, 2, 1), ("localhost", 1, 1, 0, 2, 2, 1)]),
        ([("b", 1), ("a", 1)], None, [("b", 0, 0, 0, 2, 1, 2), ("a", 1, 0, 1, 2, 1, 2)]),
        ([("a", 2), ("b", 2)], 2, [("a", 0, 0, 0, 2, 2, 1), ("a", 1, 1, 0, 2, 2, 1)]),
    ],
)
def test_tables(slots: list[tuple[str, int]], np: int | None, rows: list[Row]) -> None:
    assert [row(placement) for placement in place(slots, np)] == rows


def test_groups_are_the_hosts_in_use() -> None:
    places = place([("a", 2), ("b", 1), ("c", 3), ("d", 9)], 5)
    assert [(p.group_rank, p.group_size) for p in places] == [(0, 3), (0, 3), (1, 3), (2, 3), (2, 3)]


def test_more_workers_than_slots() -> None:
    with pytest.raises(
        NotEnoughSlots, match="5 workers were asked for, but the hosts have only 3 slots"
    ) as caught:
        place([("a", 1), ("b", 2)], 5)
    assert (caught.value.needed, caught.value.available, caught.value.exit_code) == (5, 3, 2)


@pytest.mark.parametrize("np", [0, -1])
def test_no_workers(np: int) -> None:
    with pytest.raises(BadUsage, match=f"-np {np}: must be at least 1"):
        place([("a", 1)], np)
    with pytest.raises(BadUsage, match=f"-np {np}: must be at least 1"):
        needed([Host("a")], np)


SLOTS = st.lists(st.integers(1, 9), min_size=1, max_size=8).map(
    lambda counts: [(f"h{index}", count) for index, count in enumerate(counts)]
)


@given(SLOTS, st.data())
def test_invariants_of_a_placement(slots: list[tuple[str, int]], data: st.DataObject) -> None:
    total = sum(count for _, count in slots)
    np = data.draw(st.none() | st.integers(1, total))
    size = np or total
    places = place(slots, np)
    assert [p.rank for p in places] == list(range(size))
    assert {p.size for p in places} == {size}

    per_host = Counter(p.host for p in places)
    assert all(per_host[host] <= count for host, count in slots)
    assert all(p.local_size == per_host[p.host] and 0 <= p.local_rank < p.local_size for p in places)
    assert len({(p.host, p.local_rank) for p in places}) == size
    assert sum({p.host: p.local_size for p in places}.values()) == size

    order = {host: index for index, (host, _) in enumerate(slots)}
    assert [order[p.host] for p in places] == sorted(order[p.host] for p in places)
    assert list(per_host.values())[:-1] == [count for _, count in slots][: len(per_host) - 1], (
        "filled in order"
    )

    for local_rank in {p.local_rank for p in places}:
        across = [p for p in places if p.local_rank == local_rank]
        assert [p.cross_rank for p in across] == list(range(len(across)))
        assert {p.cross_size for p in across} == {len(across)}
    assert [p.group_rank for p in places if p.local_rank == 0] == list(range(len(per_host)))
    assert {p.group_size for p in places} == {len(per_host)}


@given(SLOTS, st.integers(1, 50))
def test_one_worker_too_many_is_an_error_at_any_size(slots: list[tuple[str, int]], more: int) -> None:
    total = sum(count for _, count in slots)
    with pytest.raises(NotEnoughSlots) as caught:
        place(slots, total + more)
    assert (caught.value.needed, caught.value.available) == (total + more, total)


@pytest.mark.parametrize(
    ("slots", "slots_per_host", "gpus", "count"),
    [(3, 2, 8, 3), (None, 2, 8, 2), (None, None, 8, 8), (None, None, 0, 1)],
)
def test_where_slots_come_from(slots: int | None, slots_per_host: int | None, gpus: int, count: int) -> None:
    assert slots_of(Host("a", slots), slots_per_host, gpus) == count


@pytest.mark.parametrize(
    ("slots", "np", "slots_per_host", "count"),
    [
        ([4, 4, 4], None, None, 3),
        ([4, 4, 4], 1, None, 1),
        ([4, 4, 4], 4, None, 1),
        ([4, 4, 4], 5, None, 2),
        ([4, 4, 4], 12, None, 3),
        ([None, None, None], 2, None, 2),
        ([None, None, None], 9, None, 3),
        ([None, None, None], 9, 8, 2),
        ([None, 4, None], 3, None, 2),
        ([4, None], 40, None, 2),
    ],
)
def test_needed_hosts(
    slots: list[int | None], np: int | None, slots_per_host: int | None, count: int
) -> None:
    hosts = [Host(f"h{index}", number) for index, number in enumerate(slots)]
    assert needed(hosts, np, slots_per_host) == hosts[:count]


@pytest.mark.parametrize(("slots", "slots_per_host"), [((4, 3), None), ((4, None), 3)])
def test_slots_that_are_known_to_be_too_few(
    slots: tuple[int, int | None], slots_per_host: int | None
) -> None:
    with pytest.raises(NotEnoughSlots) as caught:
        needed([Host("a", slots[0]), Host("b", slots[1])], 8, slots_per_host)
    assert (caught.value.needed, caught.value.available) == (8, 7)


@given(SLOTS, st.data())
def test_each_needed_host_gets_a_worker(slots: list[tuple[str, int]], data: st.DataObject) -> None:
    np = data.draw(st.integers(1, sum(count for _, count in slots)))
    hosts = needed([Host(*pair) for pair in slots], np)
    assert [host.name for host in hosts] == list(dict.fromkeys(p.host for p in place(slots, np)))


def test_workers_by_turns():
    found = place([("a", 3), ("b", 1), ("c", 2)], 5, "node")
    assert [(at.rank, at.host, at.local_rank) for at in found] == [
        (0, "a", 0),
        (1, "b", 0),
        (2, "c", 0),
        (3, "a", 1),
        (4, "c", 1),
    ]
    assert [(at.local_size, at.cross_rank, at.cross_size, at.group_rank) for at in found] == [
        (2, 0, 3, 0),
        (1, 1, 3, 1),
        (2, 2, 3, 2),
        (2, 0, 2, 0),
        (2, 1, 2, 2),
    ]


def test_by_turns_only_the_first_hosts_are_needed():
    hosts = [Host(name, slots=2) for name in "abcd"]
    assert needed(hosts, 3, map_by="node") == hosts[:3]
    assert needed(hosts, 8, map_by="node") == hosts
    assert needed(hosts, 3) == hosts[:2]
    with pytest.raises(NotEnoughSlots):
        needed(hosts, 9, map_by="node")
