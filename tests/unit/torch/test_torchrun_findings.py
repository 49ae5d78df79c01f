"""Faults of torchrun's own backends, each shown with them and with ours.

If torch's half of a test fails, torch has fixed the fault, and docs/reference/torchrun.md must be corrected.
"""

import threading
from datetime import timedelta
from inspect import signature

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hvlaunch.rendezvous.client import Client
from hvlaunch.torch.torchrun.state import JobState, decode, encode, ended, left
from tests.testhosts.places import wait_until
from tests.unit.torch.torchrun_nodes import PATIENCE, TOKEN, Nodes, serve


@pytest.fixture
def torchs():
    """Makes torch's handlers of one job, over a c10d store or one in this process."""
    if "keep_alive_interval" not in signature(DynamicRendezvousHandler.from_backend).parameters:
        pytest.skip("this torch does not let its handler's patience be shortened")
    made, shared = [], HashStore()

    def make(address="127.0.0.1", least=1, most=2, store=None) -> DynamicRendezvousHandler:
        store = store or shared
        handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
            "job",
            store,
            C10dRendezvousBackend(store, "job"),
            least,
            most,
            address,
            # A node that waits asks once a second, and has to come before this ends.
            RendezvousTimeout(last_call=timedelta(seconds=4)),
            keep_alive_interval=1,
        )
        made.append(handler)
        return handler

    yield make
    for handler in made:
        handler._stop_heartbeats()


def store_of(info) -> TCPStore:
    where = info.bootstrap_store_info
    return TCPStore(where.master_addr, where.master_port, is_master=False, wait_for_workers=False)


class TestStoreOfEachRound:
    """Finding 1: workers started again read addresses of workers that are gone."""

    def rounds(self, handler):
        store_of(handler.next_rendezvous()).set("0//cpu//0/0", "an address of the first round")
        return store_of(handler.next_rendezvous()).check(["0//cpu//0/0"])

    def test_torchs(self, torchs):
        assert self.rounds(torchs(most=1))

    def test_ours(self, nodes):
        assert not self.rounds(nodes.make(most=1))


class TestOneMasterAddress:
    """Finding 2: nodes of one round are sent to different stores."""

    def addresses(self, nodes, old, new):
        nodes.round(old)
        coming = nodes.begin(new)
        wait_until(old.num_nodes_waiting, "a node waits", PATIENCE)
        found = nodes.begin(old).result(PATIENCE), coming.result(PATIENCE)
        assert {info.world_size for info in found} == {2}
        return {info.bootstrap_store_info.master_addr for info in found}

    def test_torchs(self, nodes, torchs):
        assert self.addresses(nodes, torchs("127.0.0.2"), torchs("127.0.0.1")) == {"127.0.0.1", "127.0.0.2"}

    def test_ours(self, nodes):
        assert self.addresses(nodes, nodes.make("127.0.0.2", last_call=0.0), nodes.make("127.0.0.1")) == {
            "127.0.0.2"
        }


class TestLostNode:
    """Finding 3: nobody is told of a lost node, and the next round waits for who may yet come."""

    def test_torchs(self, nodes, torchs):
        survivor, lost = torchs(), torchs("127.0.0.2")
        nodes.round(survivor, lost)
        lost._stop_heartbeats()

        def waiting() -> bool:
            assert survivor.num_nodes_waiting() == 0
            return len(survivor._state_holder.state.participants) == 1

        wait_until(waiting, "the lost node is out of the round", PATIENCE)
        assert survivor.num_nodes_waiting() == 0

    def test_ours(self, nodes):
        survivor, lost = nodes.make(), nodes.make("127.0.0.2")
        nodes.round(survivor, lost)
        lost._keeper._stopped.set()
        wait_until(survivor.num_nodes_waiting, "a node waits", PATIENCE)
        assert survivor.next_rendezvous().world_size == 1


class TestLostStore:
    """Finding 4: with the agent that has the store, all others end."""

    def test_torchs(self, torchs):
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
        node = torchs(most=1, store=client)
        node.next_rendezvous()
        node._stop_heartbeats()
        del server
        with pytest.raises(RendezvousConnectionError):
            wait_until(node.num_nodes_waiting, "a node waits", PATIENCE)

    def test_ours(self):
        with serve() as server:
            nodes = Nodes(server.port)
            node = nodes.make(most=1)
            node.next_rendezvous()
        assert node.num_nodes_waiting() == 0
        nodes.close()


class _Graceful(DynamicRendezvousHandler):
    """A spare of torch's, when its job is done."""

    def __init__(self) -> None:
        pass

    def get_backend(self) -> str:
        return "graceful"

    def get_run_id(self) -> str:
        return "job"

    def next_rendezvous(self):
        raise RendezvousGracefulExitError("the job is done")

    def shutdown(self) -> bool:
        return True


class TestSpare:
    """Finding 5: a node that was not needed ends with an error."""

    def launch(self, backend: str, endpoint: str = "", **conf: str) -> None:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=1,
            run_id="job",
            rdzv_backend=backend,
            rdzv_endpoint=endpoint,
            rdzv_configs=conf,
        )
        elastic_launch(config, "true")()

    def test_torchs(self):
        rendezvous_handler_registry.register("graceful", _graceful)
        with pytest.raises(AttributeError, match="is_failed"):
            self.launch("graceful")

    def test_ours(self, server, tmp_path):
        (tmp_path / "token").write_text(TOKEN)
        (tmp_path / "token").chmod(0o600)
        busy = "127.0.0.1/1/busy"
        state = JobState(epoch="e", round=0, placed=(busy,), active=(busy,))
        endpoint = f"127.0.0.1:{server.port}"
        with Client(f"http://{endpoint}", TOKEN) as client:
            client.put("torchrun.job", "state", encode(state))

            def now() -> JobState:
                value = client.get("torchrun.job", "state")
                assert value is not None
                return decode(value)

            def finish() -> None:
                wait_until(lambda: now().waiting, "a node waits", PATIENCE)
                client.put("torchrun.job", "state", encode(left(ended(now(), "done", busy), [busy])))

            finisher = threading.Thread(target=finish)
            finisher.start()
            with pytest.raises(SystemExit) as end:
                self.launch("hvlaunch", endpoint, token_file=str(tmp_path / "token"))
            finisher.join()
        assert end.value.code == 0
        wait_until(lambda: server.stats().keys == 0, "no key is left", PATIENCE)


class TestOneWorkersCrash:
    """Finding 7: with the static backend only the node restarts whose worker crashed."""

    def test_torchs(self):
        parameters = RendezvousParameters("static", "127.0.0.1:29500", "job", 2, 2, rank=1)
        assert get_rendezvous_handler(parameters).num_nodes_waiting() == 0  # whatever happens

    def test_ours(self, nodes):
        crashed, other = nodes.make(), nodes.make("127.0.0.2")
        nodes.round(crashed, other)
        again = nodes.begin(crashed)
        wait_until(other.num_nodes_waiting, "a node waits", PATIENCE)
        assert {nodes.begin(other).result(PATIENCE).rank, again.result(PATIENCE).rank} == {0, 1}


def _graceful(_parameters) -> _Graceful:
    return _Graceful()
