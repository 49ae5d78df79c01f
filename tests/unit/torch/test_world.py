"""A round's groups and what is done with them, by real ranks: processes of this machine that play two hosts; and how they find rank 0's store."""

import os
import random
import socket
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import Store

import hvlaunch.torch as hvt
from hvlaunch.rendezvous.client import Client
from hvlaunch.torch import current
from hvlaunch.torch.current import World, choose_device, let_go, meet, members, port_range, reserve
from hvlaunch.torch.group_errors import (
    AlreadyInitialized,
    BadPlace,
    NoMasterAddress,
    NotInitialized,
    PlacesClash,
    PortsTaken,
    RanksMissing,
    RankZeroMissing,
    StoreUnreachable,
    TooFewGPUs,
)
from hvlaunch.torch.place import Place
from tests.unit.torch.ranks import in_forks

HOSTS = "aabbb"  # rank by rank
LOCAL_RANKS = [0, 1, 0, 1, 2]


def place(rank=0, size=1, local_rank=0, host="a"):
    return Place(rank=rank, size=size, local_rank=local_rank, host=host, launcher="")


@pytest.fixture
def environment(rendezvous, monkeypatch):
    """environment(rank, round): what hvlaunch tells a worker."""
    url, token = rendezvous
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)

    def enter(rank, number, hosts=HOSTS):
        shared = {"HVLAUNCH_RENDEZVOUS": url, "HVLAUNCH_TOKEN": token, "MASTER_ADDR": "127.0.0.1"}
        own = {
            "HVLAUNCH_ROUND": number,
            "HVLAUNCH_RANK": rank,
            "HVLAUNCH_SIZE": len(hosts),
            "HVLAUNCH_LOCAL_RANK": hosts[:rank].count(hosts[rank]),
            "HVLAUNCH_HOST": hosts[rank],
        }
        for name, value in {**shared, **own}.items():
            monkeypatch.setenv(name, str(value))
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)

    return enter


def places():
    return (
        hvt.rank(),
        hvt.size(),
        hvt.local_rank(),
        hvt.local_size(),
        hvt.cross_rank(),
        hvt.cross_size(),
        dist.get_process_group_ranks(hvt.local_group()),
        dist.get_process_group_ranks(hvt.cross_group()),
    )


def collectives(rank):
    """Everything once; whether it was right is judged by each rank."""
    tensor = torch.tensor([float(rank), 1.0])
    assert hvt.allreduce(tensor).tolist() == [2.0, 1.0]
    assert hvt.allreduce(tensor, op=hvt.Sum).tolist() == [10.0, 5.0]
    assert hvt.allreduce(torch.tensor([rank + 1])).tolist() == [3]
    assert tensor.tolist() == [rank, 1.0]
    assert hvt.broadcast_object({"from": rank}, root_rank=3) == {"from": 3}
    assert hvt.allgather_object(rank) == [0, 1, 2, 3, 4]


def models(rank):
    """Ranks start with other weights and optimizers, and end with those of rank 1."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[0].weight = nn.Parameter(torch.rand(3, 2).t())  # not contiguous
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (rank + 1))
    if rank == 1:
        model(torch.rand(4, 3)).sum().backward()
        optimizer.step()
    hvt.broadcast_parameters(model, root_rank=1)
    hvt.broadcast_optimizer_state(optimizer, root_rank=1)
    optimizer.zero_grad()
    model(torch.ones(4, 3) * torch.arange(4.0)[:, None]).square().sum().backward()
    optimizer.step()
    flat = torch.cat([tensor.flatten().float() for tensor in model.state_dict().values()])
    assert len({tuple(other.tolist()) for other in hvt.allgather_object(flat)}) == 1
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}
    mine = torch.tensor([float(rank)])
    hvt.broadcast_parameters({"a": mine, "none of these": "text"}, root_rank=4)
    assert mine.item() == 4


@pytest.mark.parametrize("launchers", [None, "1"])
def test_torchs_groups_take_the_gpu_of_the_world(monkeypatch, launchers):
    """torch 2.15 takes the GPU of LOCAL_RANK. It is another one in an elastic job's later rounds, and not set by srun."""

    class MadeError(Exception):
        pass

    def make(*_, **__):
        raise MadeError(os.environ["LOCAL_RANK"])

    monkeypatch.setenv("LOCAL_RANK", launchers) if launchers else monkeypatch.delenv(
        "LOCAL_RANK", raising=False
    )
    monkeypatch.setattr("hvlaunch.torch.current.choose_device", lambda *_: torch.device("cuda", 5))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", make)
    with pytest.raises(MadeError, match="5"):
        World.form(place(), lambda *_: dist.HashStore(), backend="nccl")
    assert os.environ.get("LOCAL_RANK") == launchers


def test_two_rounds_in_the_same_processes(environment):
    def work(rank):
        told = []
        hook = sys.excepthook
        for number, hosts in ((41, HOSTS), (42, HOSTS), (43, "aaaaa")):
            environment(rank, number, hosts)
            hvt.init(timeout=60)
            hvt.init()  # a second one does nothing
            told.append(places())
            if number == 41:
                collectives(rank)
                models(rank)
            assert sys.excepthook is not hook
            hvt.shutdown()
            assert not hvt.is_initialized()
            assert not dist.is_initialized()
            assert sys.excepthook is hook  # torch's puts a rank before each line, one more in each group
        hvt.init(timeout=60)  # once more, in the same round
        current.leave()
        return told

    torch.optim.SGD(nn.Linear(1, 1).parameters())  # loads much of torch, once for all the forks
    expected = [
        (0, 5, 0, 2, 0, 2, [0, 1], [0, 2]),
        (1, 5, 1, 2, 0, 2, [0, 1], [1, 3]),
        (2, 5, 0, 3, 1, 2, [2, 3, 4], [0, 2]),
        (3, 5, 1, 3, 1, 2, [2, 3, 4], [1, 3]),
        (4, 5, 2, 3, 0, 1, [2, 3, 4], [4]),
    ]
    on_one_host = [(rank, 5, rank, 5, 0, 1, [0, 1, 2, 3, 4], [rank]) for rank in range(5)]
    assert in_forks(range(5), work) == [
        [*([row] * 2), one] for row, one in zip(expected, on_one_host, strict=True)
    ]


def test_the_next_round_begins_before_the_last_rounds_groups_are_released(monkeypatch):
    """A thread of Gloo may be stuck in them; the end waits for them."""

    class Stuck:
        def __del__(self):
            stands.wait()
            released.set()

    def work(_):
        current._over.append(Stuck())  # type: ignore[arg-type]
        began = time.monotonic()
        world = World.form(place(), lambda *_: dist.HashStore(), backend="gloo")
        took = time.monotonic() - began
        stands.set()
        world.leave()
        return took < 30, released.is_set()

    stands, released = threading.Event(), threading.Event()
    monkeypatch.setattr(current, "_PATIENCE", 60.0)
    assert in_forks([0], work) == [(True, True)]


def test_a_lost_worker_does_not_block_shutdown(environment):
    def work(rank):
        environment(rank, 44, "aab")
        hvt.init(timeout=60)
        if rank == 1:
            current.leave()
            let_go()  # its connections end, as those of a process do that has ended
        else:
            hvt.shutdown()
        return hvt.is_initialized()

    assert in_forks(range(3), work) == [False, False, False]


def test_a_worker_that_is_lost_is_horovods_error_for_the_others(environment):
    def work(rank):
        environment(rank, 46, "ab")
        hvt.init(timeout=60)
        if rank == 1:
            current.leave()
            let_go()
            return
        for ask in (
            lambda: hvt.allreduce(torch.ones(1)),
            lambda: hvt.synchronize(hvt.broadcast_async(torch.ones(1), 1)),
            lambda: hvt.allgather(torch.ones(1)),
            lambda: hvt.alltoall(torch.ones(2)),
            hvt.barrier,
            lambda: hvt.broadcast_object("", 1),
            lambda: hvt.allgather_object(""),
            lambda: hvt.broadcast_parameters({"a": torch.ones(1)}, 1),
        ):
            with pytest.raises(hvt.HorovodInternalError, match="gloo"):
                ask()
        handle = hvt.allreduce_async_(torch.ones(1))
        while not hvt.poll(handle):
            pass
        with pytest.raises(hvt.HorovodInternalError, match="gloo"):
            hvt.synchronize(handle)

    in_forks(range(2), work)


def test_the_timeout_holds_for_all_groups(environment):
    def work(rank):
        environment(rank, 47, "aab")
        hvt.init(timeout=77)
        ends = hvt.add_process_set([0, 2])
        groups = [hvt.global_process_set.group, hvt.local_group(), hvt.cross_group()]
        groups += [ends.group] if ends.included() else []
        cpu = torch.device("cpu")
        return {group._get_backend(cpu).options._timeout for group in groups}

    assert in_forks(range(3), work) == [{timedelta(seconds=77)}] * 3


def all_types():
    for name in sorted({str(each) for each in vars(torch).values() if isinstance(each, torch.dtype)}):
        dtype = getattr(torch, name.removeprefix("torch."))
        try:
            yield name, torch.ones(3).to(dtype), torch.zeros(3).to(dtype)
        except (RuntimeError, NotImplementedError, TypeError):  # a type that has no numbers yet
            continue


def test_parameters_and_states_of_all_types_are_given_to_all(environment):
    def work(rank):
        environment(rank, 48, "aa")
        hvt.init(timeout=60)
        mine = {name: ones if rank == 1 else zeros for name, ones, zeros in all_types()}
        empty = {f"no {name}": values[:0] for name, values in mine.items()}
        single = {f"one {name}": values[0] for name, values in mine.items()}
        hvt.broadcast_parameters(params={**mine, **empty, **single}, root_rank=1)
        weight = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([weight])
        if rank == 1:
            optimizer.state[weight].update({name: ones for name, ones, _ in all_types()})
        hvt.broadcast_optimizer_state(optimizer, root_rank=1)
        wrong = [name for name, ones, _ in all_types() if mine[name].tolist() != ones.tolist()]
        wrong += [
            name
            for name, ones, _ in all_types()
            if optimizer.state[weight][name].float().tolist() != ones.float().tolist()
        ]
        return len(mine), wrong

    results = in_forks(range(2), work)
    assert results[0][0] > 15
    assert [wrong for _, wrong in results] == [[], []]


def test_clashing_ranks_are_named_and_leave_no_group(environment):
    def work(rank):
        environment(rank, 45, "ab")
        os.environ["HVLAUNCH_HOST"] = "the same"
        with pytest.raises(PlacesClash, match="ranks 0 and 1 have the same local rank 0 on the same host"):
            hvt.init(timeout=60)
        return dist.is_initialized(), hvt.is_initialized()

    assert in_forks(range(2), work) == [(False, False)] * 2


def test_one_process_without_a_launcher_is_a_group_of_one(monkeypatch):
    def work(_rank):
        hvt.init()
        told = places(), hvt.allreduce(torch.tensor([2.5])).item(), hvt.device().type
        hvt.shutdown()
        return told

    for name in ("HVLAUNCH_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert in_forks([0], work) == [((0, 1, 0, 1, 0, 1, [0], [0]), 2.5, "cpu")]


@pytest.mark.parametrize(
    "ask",
    [
        hvt.rank,
        hvt.size,
        hvt.local_rank,
        hvt.local_size,
        hvt.cross_rank,
        hvt.cross_size,
        hvt.local_group,
        hvt.cross_group,
        hvt.device,
        lambda: hvt.allreduce(torch.zeros(1)),
        lambda: hvt.broadcast_object(1),
        lambda: hvt.allgather_object(1),
        lambda: hvt.broadcast_parameters(nn.Linear(1, 1)),
        lambda: hvt.broadcast_optimizer_state(torch.optim.SGD(nn.Linear(1, 1).parameters())),
    ],
)
def test_before_init_everything_says_so(ask):
    assert not hvt.is_initialized()
    with pytest.raises(NotInitialized, match=r"try: call hvlaunch\.torch\.init\(\)") as error:
        ask()
    assert isinstance(error.value, RuntimeError)
    assert isinstance(error.value, ValueError)  # what torch raises then


def test_a_group_that_the_script_made_itself_is_not_taken_over():
    def work(_rank):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with pytest.raises(AlreadyInitialized, match="not both"):
            World.form(place(), lambda _place, _timeout: dist.HashStore())
        return dist.is_initialized()

    assert in_forks([0], work) == [True]


@pytest.mark.skipif(
    torch.__version__ < "2.7", reason="this torch waits with Python's lock: docs/reference/torch.md"
)
def test_a_model_that_outlives_its_world_does_not_wait_for_gloo():
    """It would, with Python's lock, while a thread of Gloo's wants that lock to give back a tensor of Python's."""

    def work(rank):
        for _ in range(2):
            world = World.form(place(), lambda *_: dist.HashStore(), backend="gloo")
            model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
            many = torch.ones(1 << 22)
            dist.all_gather([torch.empty_like(many)], many, async_op=True)
            del many
            world.abandon()
            del world, model
        return True

    assert in_forks(range(1), work) == [True]


def test_members_of_uneven_hosts():
    told = [(ord(host), local_rank) for host, local_rank in zip(HOSTS, LOCAL_RANKS, strict=True)]
    assert members(place(3, 5, 1, "b"), told) == ((2, 3, 4), (1, 3))


def test_members_with_ranks_dealt_round_the_hosts():
    told = [(ord(host), local_rank) for host, local_rank in zip("abab", (0, 0, 1, 1), strict=True)]
    assert members(place(2, 4, 1, "a"), told) == ((0, 2), (2, 3))


@pytest.mark.parametrize(
    ("gpus", "local_rank", "backend", "expected"),
    [
        (0, 3, "gloo", "cpu"),
        (4, 3, "nccl", "cuda:3"),
        (1, 3, "nccl", "cuda:0"),  # CUDA_VISIBLE_DEVICES shows it one
        (2, 3, "gloo", "cpu"),
        (2, 1, "gloo", "cuda:1"),
    ],
)
def test_the_device_is_the_local_ranks(monkeypatch, gpus, local_rank, backend, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert choose_device(place(3, 4, local_rank), backend) == torch.device(expected)


def test_a_worker_keeps_its_device_when_its_local_rank_changes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    seats = [Place(rank=0, size=2, local_rank=local, host="a", launcher="", slot=2) for local in (2, 1)]
    assert [choose_device(seat, "nccl") for seat in seats] == [torch.device("cuda", 2)] * 2


def test_visible_gpus_of_a_worker_are_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    # Slots 1 and 3 of a host, with two GPUs for each worker.
    monkeypatch.setenv("HVLAUNCH_OWN_GPUS", "2")
    seats = [Place(rank=0, size=4, local_rank=slot, host="a", launcher="", slot=slot) for slot in (1, 3)]
    assert [choose_device(seat, "nccl") for seat in seats] == [torch.device("cuda", 0)] * 2


def test_nccl_without_a_gpu_for_each_is_an_error_that_counts_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(TooFewGPUs, match="host a: there is no GPU for local rank 2: only 2 are visible"):
        choose_device(place(2, 4, 2), "nccl")


LONG = timedelta(seconds=60)
SHORT = timedelta(seconds=1)


def place_of(rank, size, *, number=0, launcher="hvlaunch", addr="127.0.0.1", port=None):
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
        found = [greet(meet(place_of(rank, 3, number=31), LONG, client), rank, 3)]
        found.append(greet(meet(place_of(rank, 3, number=31), LONG, client), rank, 3))
        found.append(greet(meet(place_of(rank, 3, number=32), LONG, client), rank, 3))
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
            return outcome(lambda: meet(place_of(rank, 6, number=number), limit, Client(*rendezvous)))

        told = in_forks([0, 3], work)
        named = [text for kind, text in told if kind is RanksMissing]
        if named:
            break
    assert named, told  # the other may only have seen rank 0 give up
    assert named[0].startswith(f"4 of 6 workers did not come within {seconds} s: ranks 1-2, 4-5; try: ")


def test_a_rank_0_that_does_not_come_is_named(rendezvous):
    with pytest.raises(RankZeroMissing, match="rank 0 did not open its store within 1 s"):
        meet(place_of(1, 2, number=34), SHORT, Client(*rendezvous))


def test_a_store_behind_a_firewall_is_named_with_its_port(rendezvous):
    client = Client(*rendezvous)
    port = free_port()
    client.put("round.35", "store", f"10.0.0.1:{port}".encode())
    with pytest.raises(StoreUnreachable, match=f"store at 127.0.0.1 port {port}: Connection refused"):
        meet(place_of(1, 2, number=35), LONG, client)


def test_without_a_rendezvous_they_meet_at_the_master_port_as_often_as_they_like():
    port = free_port()

    def work(rank):
        there = place_of(rank, 2, launcher="torchrun", port=port)
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
        meet(place_of(0, 2, launcher=launcher, addr=None, port=port), LONG, None)
    assert error.value.missing == missing
    assert hint in str(error.value)
    assert launcher in str(error.value)


def test_a_taken_master_port_is_an_error_of_rank_0():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StoreUnreachable, match=f"port {port}: rank 0 can't listen on it"):
            meet(place_of(0, 2, launcher="torchrun", port=port), LONG, None)


def test_a_single_worker_meets_at_once():
    store = meet(place_of(0, 1, addr=None), LONG, None)
    store.set("a", "1")
    assert store.get("a") == b"1"


def test_the_store_listens_in_the_range_of_ports_that_workers_may_use(rendezvous, monkeypatch):
    first = free_port()
    monkeypatch.setenv("HVLAUNCH_WORKER_PORTS", f"{first}-{min(first + 20, 65535)}")

    def work(rank):
        return greet(meet(place_of(rank, 2, number=36), LONG, Client(*rendezvous)), rank, 2)

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
