"""hvlaunch's rendezvous handler with a real server and real TCPStores, several nodes in one process; and its settings."""

import contextlib
import json
import socket
from contextlib import closing
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils.store import barrier

from hvlaunch.rendezvous.serving.certificate import Certificate
from hvlaunch.torch.torchrun import RoundOver, RoundStore, TorchrunSettings
from hvlaunch.torch.torchrun.state import JobState, NodePlace, encode
from tests.testhosts.places import wait_until
from tests.unit.torch.torchrun_nodes import PATIENCE, TOKEN, Nodes, serve


class ShutDown:
    def __init__(self, handler) -> None:
        self.close = handler.shutdown


def called_back(*handlers) -> None:
    wait_until(
        lambda: all(handler.num_nodes_waiting() for handler in handlers),
        "each handler is called back",
        PATIENCE,
    )


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
    wait_until(lambda: any(future.done() for future in futures), "a handler has its place", PATIENCE)
    first = 0 if futures[0].done() else 1
    worker, spare = handlers[first], futures[1 - first]
    wait_until(lambda: len(worker._keeper.state.nodes) == 2, "both nodes are known", PATIENCE)
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
    wait_until(two.is_closed, "the rendezvous is closed", PATIENCE)
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
        wait_until(lambda: server.stats().keys == 0, "no key is left", PATIENCE)


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
        wait_until(lambda: any(future.done() for future in futures), "a handler has its place", PATIENCE)
        (spare,) = [future for future in futures if not future.done()]
        wait_until(
            lambda: all(len(getattr(node._keeper.state, "nodes", ())) == 2 for node in nodes._made),
            "both nodes are known",
            PATIENCE,
        )
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


WITH_TOKEN = {"HVLAUNCH_TOKEN": "secret"}
CERTIFICATE = Certificate()
PIN = "sha256:" + "0" * 64


def parameters(endpoint="10.0.0.1:4000", *, local_addr="here", cert=PIN, **conf) -> RendezvousParameters:
    if cert is not None:
        conf["cert"] = cert
    return RendezvousParameters("hvlaunch", endpoint, "job", 2, 3, local_addr, timeout=900, **conf)


def test_the_defaults():
    found = TorchrunSettings.of(parameters(), WITH_TOKEN)
    assert (found.url, found.token, found.run_id) == ("https://10.0.0.1:4000", "secret", "job")
    assert (found.limits.min_nodes, found.limits.max_nodes) == (2, 3)
    assert (found.limits.join, found.limits.last_call) == (600.0, 30.0)
    assert (found.interval, found.lease, found.address) == (1.0, 6.0, "here")


def test_settings_of_rdzv_conf():
    conf = {
        "join_timeout": "5",
        "last_call_timeout": "0",
        "keep_alive_interval": "0.5",
        "keep_alive_max_attempt": "4",
    }
    found = TorchrunSettings.of(parameters(read_timeout="7", **conf), WITH_TOKEN)
    assert (found.limits.join, found.limits.last_call) == (5.0, 0.0)
    assert (found.interval, found.lease, found.read_timeout) == (0.5, 2.0, 7.0)


def test_settings_of_torchs_backends_are_ignored():
    conf = {"is_host": "1", "store_type": "tcp", "close_timeout": "30", "heartbeat_timeout": "5"}
    assert TorchrunSettings.of(parameters(**conf), WITH_TOKEN).lease == 6.0


def test_the_token_of_the_file_comes_before_the_environments(tmp_path):
    for name in ("conf", "env"):
        (tmp_path / name).write_text(f"{name}-token-of-the-job\n")
        (tmp_path / name).chmod(0o600)
    environ = {**WITH_TOKEN, "HVLAUNCH_TOKEN_FILE": str(tmp_path / "env")}
    assert (
        TorchrunSettings.of(parameters(token_file=str(tmp_path / "conf")), environ).token
        == "conf-token-of-the-job"
    )
    assert TorchrunSettings.of(parameters(), environ).token == "env-token-of-the-job"
    assert TorchrunSettings.of(parameters(), WITH_TOKEN).token == "secret"


def test_no_text_of_the_settings_has_the_token():
    assert "secret" not in repr(TorchrunSettings.of(parameters(), WITH_TOKEN))


@pytest.mark.parametrize(
    ("endpoint", "conf", "environ", "told"),
    [
        ("", {}, WITH_TOKEN, "--rdzv-endpoint='' is not HOST:PORT"),
        (":80", {}, WITH_TOKEN, "--rdzv-endpoint=':80' is not HOST:PORT"),
        ("host:0", {}, WITH_TOKEN, "is not HOST:PORT"),
        ("host:99999", {}, WITH_TOKEN, "is not HOST:PORT"),
        ("user@host:80", {}, WITH_TOKEN, "is not HOST:PORT"),
        ("https://host:80", {}, WITH_TOKEN, "is not HOST:PORT"),
        ("host:80", {"join_timeout": "soon"}, WITH_TOKEN, "join_timeout=soon is not a number of seconds"),
        ("host:80", {"join_timeout": "-1"}, WITH_TOKEN, "join_timeout=-1 is not a number of seconds"),
        (
            "host:80",
            {"keep_alive_max_attempt": "0"},
            WITH_TOKEN,
            "keep_alive_max_attempt=0 is not a whole number",
        ),
        (
            "host:80",
            {"tokenfile": "x"},
            WITH_TOKEN,
            "has tokenfile, but this backend knows only cert, join_timeout,",
        ),
        ("host:80", {"token_file": "/nowhere"}, WITH_TOKEN, "token file /nowhere: No such file"),
        ("host:80", {}, {}, "the rendezvous needs the job's token; set --rdzv-conf token_file=FILE"),
        (
            "host:80",
            {},
            {"HVLAUNCH_TOKEN": "two words"},
            "HVLAUNCH_TOKEN must be one word of printable ASCII",
        ),
    ],
)
def test_a_mistake_is_told_with_the_settings_name(endpoint, conf, environ, told):
    with pytest.raises(ValueError) as caught:
        TorchrunSettings.of(parameters(endpoint, **conf), environ)
    assert told in str(caught.value)
    assert "two words" not in str(caught.value)


def test_the_nodes_address_is_the_one_on_the_way_to_the_rendezvous():
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(("192.0.2.1", 1))
        except OSError:
            pytest.skip("this machine has no route")
        own = probe.getsockname()[0]
    assert TorchrunSettings.of(parameters("192.0.2.1:1", local_addr=None), WITH_TOKEN).address == own


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "no-such-host.invalid:1"])
def test_the_fallback_address_is_the_nodes_name(endpoint):
    assert TorchrunSettings.of(parameters(endpoint, local_addr=None), WITH_TOKEN).address == socket.getfqdn()


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [("[::1]:80", "https://[::1]:80"), ("host", "https://host:29400"), (" host:1 ", "https://host:1")],
)
def test_the_endpoint_is_a_host_and_a_port(endpoint, url):
    assert TorchrunSettings.of(parameters(endpoint), WITH_TOKEN).url == url


def test_a_token_that_others_may_read_is_not_taken(tmp_path):
    (tmp_path / "token").write_text("conf-token-of-the-job\n")
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(ValueError, match="every user of this machine can read"):
        TorchrunSettings.of(parameters(token_file=str(tmp_path / "token")), {})


def test_a_rendezvous_on_another_machine_needs_a_certificate():
    with pytest.raises(ValueError, match="set --rdzv-conf cert=FILE or HVLAUNCH_RENDEZVOUS_CERT"):
        TorchrunSettings.of(parameters(cert=None), WITH_TOKEN)
    with pytest.raises(ValueError, match="certificate /nowhere: No such file"):
        TorchrunSettings.of(parameters(cert="/nowhere"), WITH_TOKEN)
    found = TorchrunSettings.of(parameters(cert=None), {**WITH_TOKEN, "HVLAUNCH_RENDEZVOUS_CERT": PIN})
    assert (found.url, found.certificate) == ("https://10.0.0.1:4000", PIN)
    assert TorchrunSettings.of(parameters("localhost:1", cert=None), WITH_TOKEN).url == "http://localhost:1"


def test_the_certificate_beside_the_token_file_is_taken(tmp_path):
    token = tmp_path / "token"
    token.write_text("a-token-of-the-user")
    token.chmod(0o600)
    (tmp_path / "token.crt").write_bytes(CERTIFICATE.pem)
    found = TorchrunSettings.of(parameters(cert=None, token_file=str(token)), {})
    assert (found.url, found.certificate) == ("https://10.0.0.1:4000", CERTIFICATE.fingerprint)
