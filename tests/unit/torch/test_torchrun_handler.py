"""hvlaunch's rendezvous handler with a real server and real TCPStores, several nodes in one process."""

import contextlib
import json
import time
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils.store import barrier

from hvlaunch.torch.torchrun import RoundOver, RoundStore
from hvlaunch.torch.torchrun.barrier import NodePlace
from hvlaunch.torch.torchrun.state import JobState, encode
from tests.unit.torch.torchrun_nodes import PATIENCE, TOKEN, Nodes, serve


class ShutDown:
    def __init__(self, handler) -> None:
        self.close = handler.shutdown


def until(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def called_back(*handlers) -> None:
    until(lambda: all(handler.num_nodes_waiting() for handler in handlers))


def test_the_nodes_of_a_round_agree_on_ranks_and_store(nodes):
    handlers = [nodes.make(f"127.0.0.{number}", 3, 3) for number in (10, 9, 1)]
    found = nodes.round(*handlers)
    assert [(info.rank, info.world_size) for info in found] == [(2, 3), (1, 3), (0, 3)]
    where = {(one.master_addr, one.master_port) for one in (info.bootstrap_store_info for info in found)}
    ((address, port),) = where
    assert address == "127.0.0.1"
    TCPStore(address, port, is_master=False, timeout=timedelta(seconds=PATIENCE)).set("key", "value")
    assert all(handler.num_nodes_waiting() == 0 for handler in handlers)
    assert all(handler.use_agent_store for handler in handlers)


def test_a_handler_that_is_closed_before_any_round_says_so(nodes):
    handler = nodes.make()
    assert not handler.is_closed()
    handler.set_closed()
    assert handler.is_closed()
    with pytest.raises(RendezvousClosedError, match="was closed before it began"):
        handler.next_rendezvous()


def test_the_agents_store_does_what_torchrun_asks_of_it(nodes):
    one, two = (info.store for info in nodes.round(nodes.make(), nodes.make("127.0.0.2")))
    one.set("text", "a")
    one.set("bytes", b"\x00b")
    assert two.get("text") == b"a"
    two.multi_set(["c", "d"], ["1", b"2"])
    assert one.multi_get(["bytes", "c", "d"]) == [b"\x00b", b"1", b"2"]
    assert (one.add("n", 2), two.add("n", 3)) == (2, 5)
    assert one.check(["c", "d"])
    assert not one.check(["c", "absent"])
    one.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(DistStoreError):
        one.get("absent")
    with pytest.raises(DistStoreError):
        two.wait(["c", "absent"], timedelta(seconds=0.05))
    waiting = nodes._threads.submit(barrier, one, 2, "end", PATIENCE)
    barrier(two, 2, "end", PATIENCE)
    waiting.result(PATIENCE)


def test_a_node_that_comes_back_brings_all_back(nodes):
    one, two = nodes.make(), nodes.make("127.0.0.2")
    nodes.round(one, two)
    restarting = nodes.begin(two)
    called_back(one)
    assert nodes.begin(one).result(PATIENCE).rank == 0
    assert restarting.result(PATIENCE).rank == 1


def test_a_new_node_is_let_in_and_ranks_stay_as_they_were(nodes):
    old = nodes.make("127.0.0.9", last_call=0.0)
    assert nodes.round(old)[0].world_size == 1
    new = nodes.make("127.0.0.1")
    coming = nodes.begin(new)
    called_back(old)
    assert nodes.begin(old).result(PATIENCE).rank == 0
    assert coming.result(PATIENCE).rank == 1


def test_a_lost_node_of_rank_0_is_missed_and_the_other_goes_on(nodes, client):
    ghost = "127.0.0.1/1/ghost"
    client.put("torchrun.job", "state", encode(JobState(epoch="e", waiting=(ghost,))))
    survivor = nodes.make("127.0.0.2")
    (info,) = nodes.round(survivor)  # it was placed beside the ghost, which opened no store
    assert (info.rank, info.world_size, info.bootstrap_store_info.master_addr) == (0, 1, "127.0.0.2")
    assert survivor.num_nodes_waiting() == 0


def test_a_node_lost_while_it_trains_calls_the_others_back(nodes, client):
    survivor = nodes.make(last_call=0.0)
    nodes.round(survivor)
    keeper = survivor._keeper
    ghost = "127.0.0.9/1/ghost"
    placed = (*keeper.state.placed, ghost)
    client.put(
        "torchrun.job",
        "state",
        encode(JobState(epoch=keeper.state.epoch, round=0, placed=placed, active=placed)),
    )
    called_back(survivor)
    assert keeper.state.placed == placed
    assert ghost not in keeper.state.nodes
    assert nodes.round(survivor)[0].world_size == 1


def test_a_node_taken_for_lost_comes_back(nodes, client):
    node = nodes.make(last_call=0.0)
    nodes.round(node)
    state = node._keeper.state
    client.put(
        "torchrun.job",
        "state",
        encode(JobState(epoch=state.epoch, round=0, placed=state.placed, waiting=("x",))),
    )
    called_back(node)
    assert nodes.round(node)[0].rank == 0


@pytest.fixture
def worker_and_spare(nodes):
    """A node in a round that has room for one, and the future of another that waits."""
    handlers = nodes.make(most=1), nodes.make("127.0.0.2", most=1)
    futures = [nodes.begin(handler) for handler in handlers]
    until(lambda: any(future.done() for future in futures))
    first = 0 if futures[0].done() else 1
    worker, spare = handlers[first], futures[1 - first]
    until(lambda: len(worker._keeper.state.nodes) == 2)
    assert worker.num_nodes_waiting() == 0
    return worker, spare


def test_a_spare_ends_with_0_when_the_job_is_done(worker_and_spare):
    worker, spare = worker_and_spare
    worker.shutdown()
    with pytest.raises(SystemExit) as ended:
        spare.result(PATIENCE)
    assert ended.value.code == 0


def test_a_spare_of_a_failed_job_is_told_so(worker_and_spare):
    worker, spare = worker_and_spare
    with pytest.raises(RuntimeError), contextlib.closing(ShutDown(worker)):
        raise RuntimeError("a worker failed for the last time")
    with pytest.raises(RendezvousClosedError, match="failed for good"):
        spare.result(PATIENCE)


def test_a_failed_job_ends_for_all(nodes):
    failing, other = nodes.make(), nodes.make("127.0.0.2")
    nodes.round(failing, other)
    with (
        pytest.raises(RuntimeError),
        contextlib.closing(ShutDown(failing)),
    ):  # as torchrun's `finally` does it
        raise RuntimeError("a worker failed for the last time")
    called_back(other)
    with pytest.raises(RendezvousClosedError, match=r"failed for good on 127\.0\.0\.1/"):
        other.next_rendezvous()
    assert other.is_closed()


def test_a_finished_job_calls_no_node_back(nodes):
    one, two = nodes.make(), nodes.make("127.0.0.2")
    stores = [info.store for info in nodes.round(one, two)]
    assert one.shutdown()
    until(two.is_closed)
    assert two.num_nodes_waiting() == 0
    stores[1].set("still", "works")
    assert stores[1].get("still") == b"works"


def test_a_node_that_failed_after_the_job_was_done_is_told_so(nodes):
    one, two = nodes.make(), nodes.make("127.0.0.2")
    nodes.round(one, two)
    one.shutdown()
    with pytest.raises(RendezvousClosedError, match="its workers are done"):
        two.next_rendezvous()


def test_a_node_that_a_signal_ends_is_missed_at_once_and_ends_nothing(nodes):
    one, two = nodes.make(lease=1000.0), nodes.make("127.0.0.2", lease=1000.0)
    nodes.round(one, two)
    one._leave_quietly()
    called_back(two)
    assert nodes.round(two)[0].world_size == 1


def test_nothing_is_left_on_the_server_and_the_run_id_is_free_again(nodes, server):
    for _ in range(2):
        pair = [nodes.make(), nodes.make("127.0.0.2")]
        nodes.round(*pair)
        for node in pair:
            assert node.shutdown()
        until(lambda: server.stats().keys == 0)


def test_jobs_with_other_run_ids_do_not_meet(nodes):
    found = nodes.round(nodes.make(run_id="a/b", most=1), nodes.make(run_id="a", most=1))
    assert [info.world_size for info in found] == [1, 1]


def test_too_few_nodes_in_time(nodes):
    with pytest.raises(RendezvousTimeoutError, match=r"it needs 2 nodes, and only these came: 127\.0\.0\.1$"):
        nodes.make(least=2, join=0.2).next_rendezvous()


def test_a_wrong_token_is_told_without_telling_any(nodes):
    with pytest.raises(RendezvousConnectionError) as caught:
        nodes.make(token="wrong-token").next_rendezvous()
    assert "127.0.0.1" in str(caught.value)
    assert "wrong-token" not in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_a_rendezvous_that_is_not_there(nodes):
    with pytest.raises(RendezvousConnectionError):
        nodes.make(url="http://127.0.0.1:1", read_timeout=0.1).next_rendezvous()


def test_training_goes_on_without_the_rendezvous_and_all_meet_again_when_it_is_back():
    with serve() as server:
        port = server.port
        nodes = Nodes(port)
        one, two = nodes.make(), nodes.make("127.0.0.2")
        nodes.round(one, two)
    assert one.num_nodes_waiting() == two.num_nodes_waiting() == 0
    with serve(port):
        called_back(one, two)
        assert {info.world_size for info in nodes.round(one, two)} == {2}
        nodes.close()


def test_a_spare_does_not_wait_for_a_rendezvous_that_is_lost():
    with serve() as server:
        nodes = Nodes(server.port)
        futures = [nodes.begin(nodes.make(f"127.0.0.{n}", most=1, read_timeout=0.3)) for n in (1, 2)]
        until(lambda: any(future.done() for future in futures))
        (spare,) = [future for future in futures if not future.done()]
        until(lambda: all(len(getattr(node._keeper.state, "nodes", ())) == 2 for node in nodes._made))
    with pytest.raises(RendezvousConnectionError, match=r"could not be reached for 0\.3 s"):
        spare.result(PATIENCE)
    nodes.close()


class TestRoundOver:
    """Agents that are in the middle of an operation when a node is lost."""

    @pytest.fixture
    def store(self, client):
        self.over = False
        return RoundStore(client, "scope", NodePlace("e", 0, 1, 3), lambda: self.over)

    def test_a_wait_ends(self, store):
        self.over = True
        with pytest.raises(RoundOver):
            store.wait(["never"])
        with pytest.raises(RoundOver):
            store.get("never")
        with pytest.raises(RoundOver):
            store.multi_get(["never"])

    def test_the_exchange_of_ranks_ends_with_an_answer(self, store, client):
        self.over = True
        store.set("torchelastic/role_info/1", "mine")
        client.put("scope", "torchelastic/role_info/2", b"theirs")
        keys = [f"torchelastic/role_info/{rank}" for rank in range(3)]
        assert store.multi_get(keys) == [b"mine", b"mine", b"theirs"]
        assert json.loads(store.get("torchelastic/assigned_ranks/1")) == [1, 3, 1, 3]

    def test_available_keys_are_returned_although_the_round_is_over(self, store):
        self.over = True
        store.set("there", "x")
        assert store.get("there") == b"x"
