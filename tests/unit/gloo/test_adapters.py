"""--nccl auto and --rank-order in the engine and on the way to the workers: variables, order, and what the user has set."""

from typing import Any

import pytest

from hvlaunch.driver.links.errands import ErrandFailed
from hvlaunch.driver.program import Keys
from hvlaunch.driver.program.start_frame import shared_env
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.gloo.survey import Survey
from tests.unit.gloo.elastic_history import elastic
from tests.unit.gloo.history import History, facts, spec, surveyed

SOCKETS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")


def start(job: History, nvlink: dict[str, str] | None = None) -> None:
    """Let the hosts get ready, and reach all addresses of each other."""
    for number, name in enumerate(job.names, 1):
        arrive(job, name, surveyed(number, (nvlink or {}).get(name)))


def arrive(job: History, name: str, its_facts: on.HostFacts) -> None:
    job.play(on.HostConnected(name), on.HostReady(name, its_facts), on.RendezvousReached(name, "10.0.0.100"))
    reach(job)


def reach(job: History) -> None:
    for probe in [action for action in job.actions if isinstance(action, do.Probe)]:
        for address in probe.addresses:
            job.play(on.HostProbed(probe.host, probe.target, address, probe.agent))


def test_without_the_survey_of_a_host_all_is_as_usual() -> None:
    job = History(spec("a:1,b:1", nccl="auto", rank_order="fabric"))
    job.play(on.Began())
    arrive(job, "a", surveyed(1))
    arrive(job, "b", facts(2))
    if not job.of(do.Start):
        job.wait()
    assert [order.network.variables for order in job.of(do.Start)] == [None, None]
    assert not job.of(tell.NetworkChosen)


def test_near_hosts_have_neighbouring_ranks_and_the_first_hosts_are_used() -> None:
    clusters = {"a": "x", "b": "y", "c": "x", "d": "y"}
    job = History(spec("a:2,b:2,c:2,d:2", np=6, rank_order="fabric"))
    job.play(on.Began())
    start(job, clusters)
    assert job.of(tell.RoundStarting)[0].hosts == ("a", "c", "b")


def test_an_elastic_job_keeps_the_order_and_a_new_host_joins_its_group() -> None:
    clusters = {"a": "x", "b": "y", "c": "x", "d": "y"}
    job = elastic("a:1,b:1,c:1", rank_order="fabric", nccl="auto", discovery_script="x")
    job.play(on.HostsDiscovered(spec("a:1,b:1,c:1").hosts))
    start(job, clusters)
    for name in "abc":
        job.ask(name, 0)
    formed = job.of(tell.RoundFormed)[-1]
    assert formed.hosts == ("a", "c", "b")
    assert job.of(do.Assign)[-1].network.variables == dict.fromkeys(SOCKETS, "eth1")
    job.now += 30.0
    for name in "abc":
        job.beat(name, 0, 5)
    # e and d come, and c leaves: the others stay in their order.
    job.play(on.HostsDiscovered(spec("a:1,b:1,e:1,d:1").hosts))
    arrive(job, "e", surveyed(5, "x"))
    arrive(job, "d", surveyed(4, "y"))
    for name in "ed":
        job.ask(name, 0, -1)
    job.now += 10.0
    job.play(on.Tick())
    for name in "abc":
        job.ask(name, 0, 0, 5)
    reach(job)
    assert job.of(tell.RoundFormed)[-1] is not formed
    assert job.of(tell.RoundFormed)[-1].hosts == ("a", "e", "b", "d")


@pytest.mark.parametrize("nccl", ["off", "auto"])
def test_users_interfaces_stay_in_later_rounds(nccl: str) -> None:
    job = elastic("a:1,b:1", nccl=nccl, env={"NCCL_SOCKET_IFNAME": "ib0"})
    start(job)
    for name in "ab":
        job.ask(name, 0)
    variables = job.of(do.Assign)[-1].network.variables
    assert variables is not None
    assert set(variables) == set(SOCKETS) - {"NCCL_SOCKET_IFNAME"}


def test_variables_of_the_choice_replace_the_usual_ones_and_the_users_come_last() -> None:
    network = do.HostNetwork(
        "10.0.0.1", 1, "eth0", None, variables={"NCCL_IB_HCA": "mlx5_0:1", "GLOO_SOCKET_IFNAME": "eth1"}
    )
    env = shared_env(network, {"NCCL_IB_HCA": "mlx5_7"}, Keys.new().certificate)
    assert (env["NCCL_IB_HCA"], env["GLOO_SOCKET_IFNAME"]) == ("mlx5_7", "eth1")
    assert "TP_SOCKET_IFNAME" not in env


class Silent:
    """A link to a host whose errands fail."""

    host = spec("a").hosts[0]
    errands: Any = None

    def __init__(self) -> None:
        self.errands = self

    def start(self, name: str, *_: object) -> None:
        raise ErrandFailed(name, "start", "no process can be started", host="a")


def test_a_host_that_can_not_be_surveyed_gets_workers_as_usual() -> None:
    its_facts = facts(1)
    answers: list[on.HostFacts] = []
    link: Any = Silent()
    Survey(spec("a", nccl="auto")).look(link, its_facts, answers.append)
    assert answers == [its_facts]
