"""How workers find rank 0's store, and what is said when they don't. Each rank is a process of its own."""

import random
import socket
from datetime import timedelta

import pytest
from torch.distributed import Store

from hvlaunch.rendezvous.client import Client
from hvlaunch.torch.current import meet, port_range, reserve
from hvlaunch.torch.group_errors import (
    BadPlace,
    NoMasterAddress,
    PortsTaken,
    RanksMissing,
    RankZeroMissing,
    StoreUnreachable,
)
from hvlaunch.torch.place import Place
from tests.unit.torch.ranks import in_forks

LONG = timedelta(seconds=60)
SHORT = timedelta(seconds=1)


def place(rank, size, *, number=0, launcher="hvlaunch", addr="127.0.0.1", port=None):
    return Place(
        rank=rank,
        size=size,
        local_rank=rank,
        host="a",
        launcher=launcher,
        round=number,
        master_addr=addr,
        master_port=port,
    )


def free_port():
    """Outside the range of outgoing connections, whose remains keep ports from being listened on."""
    first = random.randrange(20000, 32000)
    with reserve(range(first, 32700)) as listener:
        return listener.getsockname()[1]


kept: list[Store] = []


def greet(store, rank, size):
    """Each tells its rank, and reads all others'."""
    kept.append(store)  # rank 0's must outlive the call
    store.set(f"rank {rank}", str(rank))
    return [int(store.get(f"rank {other}")) for other in range(size)]


def outcome(call):
    try:
        call()
    except RuntimeError as error:
        return type(error), str(error)
    return None, ""


def test_rank_0_publishes_under_the_rounds_scope_and_may_be_the_last_to_come(rendezvous):
    def work(rank):
        client = Client(*rendezvous)
        if rank == 0:
            client.wait("test", "others are on their way", 60)
        else:
            client.put("test", "others are on their way", b"")
        found = [greet(meet(place(rank, 3, number=31), LONG, client), rank, 3)]
        found.append(greet(meet(place(rank, 3, number=31), LONG, client), rank, 3))
        found.append(greet(meet(place(rank, 3, number=32), LONG, client), rank, 3))
        return found

    assert in_forks(range(3), work) == [[[0, 1, 2]] * 3] * 3
    client = Client(*rendezvous)
    assert set(client.keys("round.31")) == {"store", "store.1"}
    where = client.get("round.31", "store")
    assert where is not None
    address, _, port = where.decode().rpartition(":")
    assert address == "127.0.0.1"
    assert int(port) > 0


@pytest.mark.timeout(60)
def test_ranks_that_do_not_come_are_named(rendezvous):
    # On a busy machine the two may not meet within 4 s; then they have more time, under another number.
    for seconds in (4, 30):
        limit, number = timedelta(seconds=seconds), 33 + seconds

        def work(rank, limit=limit, number=number):
            return outcome(lambda: meet(place(rank, 6, number=number), limit, Client(*rendezvous)))

        told = in_forks([0, 3], work)
        named = [text for kind, text in told if kind is RanksMissing]
        if named:
            break
    assert named, told  # the other may only have seen rank 0 give up
    assert named[0].startswith(f"4 of 6 workers did not come within {seconds} s: ranks 1-2, 4-5; try: ")


def test_a_rank_0_that_does_not_come_is_named(rendezvous):
    with pytest.raises(RankZeroMissing, match="rank 0 did not open its store within 1 s"):
        meet(place(1, 2, number=34), SHORT, Client(*rendezvous))


def test_a_store_behind_a_firewall_is_named_with_its_port(rendezvous):
    client = Client(*rendezvous)
    port = free_port()
    client.put("round.35", "store", f"10.0.0.1:{port}".encode())
    with pytest.raises(StoreUnreachable, match=f"store at 127.0.0.1 port {port}: Connection refused"):
        meet(place(1, 2, number=35), LONG, client)


def test_without_a_rendezvous_they_meet_at_the_master_port_as_often_as_they_like():
    port = free_port()

    def work(rank):
        there = place(rank, 2, launcher="torchrun", port=port)
        return [greet(meet(there, LONG, None), rank, 2) for _ in range(2)]

    assert in_forks(range(2), work) == [[[0, 1]] * 2] * 2


@pytest.mark.parametrize(
    ("launcher", "port", "missing", "hint"),
    [
        ("Open MPI", None, ("MASTER_ADDR", "MASTER_PORT"), "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500"),
        ("srun", None, ("MASTER_ADDR", "MASTER_PORT"), "scontrol show hostnames"),
        ("torchrun", 29500, ("MASTER_ADDR",), "set MASTER_ADDR to the same in all processes"),
    ],
)
def test_a_missing_address_is_named_with_what_to_do(launcher, port, missing, hint):
    with pytest.raises(NoMasterAddress) as error:
        meet(place(0, 2, launcher=launcher, addr=None, port=port), LONG, None)
    assert error.value.missing == missing
    assert hint in str(error.value)
    assert launcher in str(error.value)


def test_a_taken_master_port_is_an_error_of_rank_0():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StoreUnreachable, match=f"port {port}: rank 0 can't listen on it"):
            meet(place(0, 2, launcher="torchrun", port=port), LONG, None)


def test_a_single_worker_meets_at_once():
    store = meet(place(0, 1, addr=None), LONG, None)
    store.set("a", "1")
    assert store.get("a") == b"1"


def test_the_store_listens_in_the_range_of_ports_that_workers_may_use(rendezvous, monkeypatch):
    first = free_port()
    monkeypatch.setenv("HVLAUNCH_WORKER_PORTS", f"{first}-{min(first + 20, 65535)}")

    def work(rank):
        return greet(meet(place(rank, 2, number=36), LONG, Client(*rendezvous)), rank, 2)

    assert in_forks(range(2), work) == [[0, 1]] * 2
    where = Client(*rendezvous).get("round.36", "store")
    assert where is not None
    port = int(where.rpartition(b":")[2])
    assert first <= port <= first + 20


def test_a_range_whose_ports_are_taken_is_an_error():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortsTaken, match=f"none of the ports {port} to {port}"):
            reserve(range(port, port + 1))


@pytest.mark.parametrize("text", ["http", "5-", "9-5", "0-5", "1-70000", "1-2-3"])
def test_an_invalid_range_of_ports_is_an_error(text):
    with pytest.raises(BadPlace, match="is not a range of ports"):
        port_range({"HVLAUNCH_WORKER_PORTS": text})


def test_without_a_range_every_port_may_be_used():
    assert port_range({}) is None
