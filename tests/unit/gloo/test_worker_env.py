"""The variables of workers, row by row, and their precedence."""

import json

import pytest

from hvlaunch.driver.program import Keys
from hvlaunch.driver.program.start_frame import default_env, identity_env, shared_env, start_frame
from hvlaunch.engine import actions as do
from hvlaunch.engine.actions import HostAddress, HostNetwork
from hvlaunch.hosts.placement import Launch, place
from hvlaunch.job import ElasticOptions, JobSpec
from tests.unit.gloo.history import facts, spec

NETWORK = HostNetwork(
    master_addr="10.0.0.1",
    master_port=29999,
    interface="eth0",
    rendezvous=("10.0.0.9", 4711),
    address="10.0.0.2",
    hosts=(HostAddress("a", "10.0.0.1", 2), HostAddress("b", "10.0.0.2", 1), HostAddress("c", "fd00::3", 2)),
)
KEYS = Keys.new()
CERTIFICATE = KEYS.certificate


def identity(rank: int) -> dict[str, str]:
    placement = place([("a", 2), ("b", 1), ("c", 2)])[rank]
    return identity_env(
        placement, worker="c/1/0", job_id="j0b", round_number=0, token="t0k", scratch="/tmp/s"
    )


def test_identity_of_a_worker() -> None:
    assert identity(4) == {
        "HVLAUNCH_JOB_ID": "j0b",
        "HVLAUNCH_ROUND": "0",
        "HVLAUNCH_HOST": "c",
        "HVLAUNCH_RANK": "4",
        "HVLAUNCH_SIZE": "5",
        "HVLAUNCH_LOCAL_RANK": "1",
        "HVLAUNCH_LOCAL_SIZE": "2",
        "HVLAUNCH_CROSS_RANK": "1",
        "HVLAUNCH_CROSS_SIZE": "2",
        "HVLAUNCH_TOKEN": "t0k",
        "HVLAUNCH_SCRATCH": "/tmp/s",
        "HVLAUNCH_WORKER": "c/1/0",
        "RANK": "4",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "NODE_RANK": "2",
        "ROLE_RANK": "4",
        "ROLE_WORLD_SIZE": "5",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "j0b",
        "TORCHELASTIC_ERROR_FILE": "/tmp/s/1.0.error.json",
        "HOROVOD_HOSTNAME": "c",
        "HOROVOD_RANK": "4",
        "HOROVOD_SIZE": "5",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "2",
    }


def test_common_variables_of_a_hosts_workers() -> None:
    assert shared_env(NETWORK, {"MINE": "x"}, CERTIFICATE, lease=30.0) == {
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29999",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
        "HOROVOD_GLOO_IFACE": "eth0",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.9",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
        "HVLAUNCH_RENDEZVOUS": "https://10.0.0.9:4711",
        "HVLAUNCH_RENDEZVOUS_CERT": CERTIFICATE.fingerprint,
        "HVLAUNCH_LEASE": "30",
        "HVLAUNCH_ADDRESS": "10.0.0.2",
        "HVLAUNCH_HOSTS": "a=10.0.0.1:2,b=10.0.0.2:1,c=[fd00::3]:2",
        "MINE": "x",
    }


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_users_network_variables_take_precedence(name: str) -> None:
    assert shared_env(NETWORK, {name: "mine"}, CERTIFICATE)[name] == "mine"


def test_ipv6_is_bracketed_in_the_url_alone() -> None:
    network = HostNetwork(master_addr="fd00::1", master_port=1, interface=None, rendezvous=("fd00::9", 4711))
    env = shared_env(network, {}, CERTIFICATE)
    assert env["HVLAUNCH_RENDEZVOUS"] == "https://[fd00::9]:4711"
    assert env["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "fd00::9"
    assert "GLOO_SOCKET_IFNAME" not in env


def test_range_of_ports_is_a_variable() -> None:
    assert shared_env(NETWORK, {}, CERTIFICATE, (29500, 29599))["HVLAUNCH_WORKER_PORTS"] == "29500-29599"
    assert "HVLAUNCH_WORKER_PORTS" not in shared_env(NETWORK, {}, CERTIFICATE)


def test_loopback_needs_no_certificate() -> None:
    network = HostNetwork(master_addr="a", master_port=1, interface=None, rendezvous=("127.0.0.1", 4711))
    env = shared_env(network, {}, CERTIFICATE)
    assert env["HVLAUNCH_RENDEZVOUS"] == "http://127.0.0.1:4711"
    assert "HVLAUNCH_RENDEZVOUS_CERT" not in env
    env = shared_env(network, {}, CERTIFICATE, is_sealed=True)
    assert env["HVLAUNCH_RENDEZVOUS"] == "https://127.0.0.1:4711"
    assert env["HVLAUNCH_RENDEZVOUS_CERT"] == CERTIFICATE.fingerprint


def test_no_rendezvous_no_url() -> None:
    network = HostNetwork(master_addr="10.0.0.1", master_port=1, interface=None, rendezvous=None)
    assert not [name for name in shared_env(network, {}, CERTIFICATE) if "RENDEZVOUS" in name]


def test_too_many_hosts_for_a_variable_are_left_out() -> None:
    hosts = tuple(HostAddress(f"node{n:05}", "10.0.0.1", 8) for n in range(10_000))
    env = shared_env(NETWORK._replace(hosts=hosts), {}, CERTIFICATE)
    assert env["HVLAUNCH_ADDRESS"] == "10.0.0.2"
    assert "HVLAUNCH_HOSTS" not in env
    env = shared_env(NETWORK._replace(hosts=hosts[:5000]), {}, CERTIFICATE)
    assert env["HVLAUNCH_HOSTS"].startswith("node00000=10.0.0.1:8,node00001=10.0.0.1:8,")


@pytest.mark.parametrize(("cpus", "local_size", "threads"), [(8, 2, "4"), (2, 8, "1"), (7, 2, "3")])
def test_threads(cpus: int, local_size: int, threads: str) -> None:
    assert default_env(cpus, local_size) == {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}


def test_frame_has_common_variables_once() -> None:
    job = spec("a:2", env={"BIG": "x" * 1000})
    start = do.Start(
        "a", 0, tuple(Launch(at.local_rank, 0, at) for at in place([("a", 2)])), NETWORK, facts(1)
    )
    header, body = start_frame(start, job, job_id="j0b", keys=KEYS)
    assert header == {"type": "start", "round": 0}
    assert body.count(b"x" * 1000) == 1
    plan = json.loads(body)
    assert plan["argv"] == ["train"]
    assert [worker["slot"] for worker in plan["workers"]] == [0, 1]
    assert [worker["env"]["RANK"] for worker in plan["workers"]] == ["0", "1"]


def test_only_chosen_gpus_are_visible() -> None:
    job = spec("a:2", env={"CUDA_VISIBLE_DEVICES": "all that the user has here"}, visible_gpus={"a": (1, 3)})
    for host, seen in (("a", "1,3"), ("b", "all that the user has here")):
        launches = tuple(Launch(at.local_rank, 0, at) for at in place([(host, 2)]))
        _, body = start_frame(do.Start(host, 0, launches, NETWORK, facts(1)), job, job_id="j", keys=KEYS)
        assert json.loads(body)["env"]["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(
    ("job", "scheme"),
    [
        (spec("localhost:1,a:1"), "https"),
        (spec("localhost:1"), "http"),
        (spec("localhost:1", detach="always"), "https"),
    ],
)
def test_token_is_sent_by_tls_if_the_driver_may_be_replaced(job: JobSpec, scheme: str) -> None:
    """Between two drivers another user could listen at the port."""
    network = NETWORK._replace(rendezvous=("127.0.0.1", 4711))
    own = facts(1)._replace(peer_address=None)
    start = do.Start(
        "localhost", 0, tuple(Launch(0, 0, at) for at in place([("localhost", 1)])), network, own
    )
    _, body = start_frame(start, job, job_id="j", keys=KEYS)
    assert json.loads(body)["env"]["HVLAUNCH_RENDEZVOUS"] == f"{scheme}://127.0.0.1:4711"


@pytest.mark.parametrize(
    ("policy", "expected"), [("0", [True, False]), ("all", [True, True]), ("none", [False, False])]
)
def test_ranks_that_read_stdin(policy: str, expected: list[bool]) -> None:
    start = do.Start(
        "a", 0, tuple(Launch(at.local_rank, 0, at) for at in place([("a", 2)])), NETWORK, facts(1)
    )
    _, body = start_frame(start, spec("a:2", stdin=policy), job_id="j", keys=KEYS)
    assert [worker["stdin"] for worker in json.loads(body)["workers"]] == expected


def bound(job: JobSpec, *slots: int) -> dict[str, object]:
    """The body of a `start` for workers of host a in these slots."""
    hosts = [("a", len(slots) if job.elastic is None else 4)]
    places = place(hosts)
    launches = tuple(Launch(slot, 0, places[index]) for index, slot in enumerate(slots))
    _, body = start_frame(do.Start("a", 0, launches, NETWORK, facts(1)), job, job_id="j", keys=KEYS)
    return json.loads(body)  # type: ignore[no-any-return]


def test_only_a_bound_job_has_an_order_to_bind() -> None:
    assert "bind" not in bound(spec("a:2"), 0, 1)
    body = bound(spec("a:2", bind="core"), 0, 1)
    assert body["bind"] == {"mode": "core", "gpus_per_worker": None, "slots": 2}


def test_elastic_workers_share_a_host_with_all_its_slots() -> None:
    job = spec("a:8", bind="numa", elastic=ElasticOptions(min_np=1))
    assert bound(job, 2)["bind"] == {"mode": "numa", "gpus_per_worker": None, "slots": 8}
    # A discovered host's slots are not known here: as many as there are now.
    job = spec("b:8", bind="numa", elastic=ElasticOptions(min_np=1))
    assert bound(job, 5)["bind"] == {"mode": "numa", "gpus_per_worker": None, "slots": 6}


def test_a_worker_with_gpus_of_its_own_counts_them_from_0() -> None:
    body = bound(spec("a:2", gpus_per_worker=2), 0, 1)
    envs = [worker["env"] for worker in body["workers"]]  # type: ignore[attr-defined]
    assert [(env["LOCAL_RANK"], env["HVLAUNCH_LOCAL_RANK"]) for env in envs] == [("0", "0"), ("0", "1")]
    assert {env["HVLAUNCH_OWN_GPUS"] for env in envs} == {"2"}


def test_paths_of_an_environment_and_of_modules() -> None:
    """The environment is first on PATH; the copy is first on PYTHONPATH, and the modules are last."""
    about = facts(1)._replace(environment="/env", sources=("/tree/src", "/tree"), library="/x.zip")
    start = do.Start("a", 0, tuple(Launch(0, 0, at) for at in place([("a", 1)])), NETWORK, about)
    _, body = start_frame(start, spec("a:1", env={"VIRTUAL_ENV": "here"}), job_id="j", keys=KEYS)
    plan = json.loads(body)
    assert (plan["first"], plan["last"]) == (
        {"PATH": "/env/bin", "PYTHONPATH": "/tree/src:/tree"},
        {"PYTHONPATH": "/x.zip"},
    )
    assert plan["env"]["VIRTUAL_ENV"] == plan["env"]["UV_PROJECT_ENVIRONMENT"] == "/env"
    _, body = start_frame(start._replace(facts=facts(1)), spec("a:1"), job_id="j", keys=KEYS)
    assert json.loads(body).keys().isdisjoint(("first", "last"))
