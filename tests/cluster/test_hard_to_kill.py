"""A job of processes that can't be killed ends all the same; who is left is told with all pids."""

import shutil
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.cgroups import BOMB, LIMIT, Group
from tests.cluster.jobs import Job, agents, guardians
from tests.testhosts.hosts import Host, TestHosts, wait_until

CLOSING = 60.0
"""Seconds: what the driver waits for at the end (25), and a busy machine."""
OPTIONS = ("--grace", 1)
FAMILY = "setsid sleep 3600 & echo ready; wait"


@pytest.fixture
def freezer() -> Iterator[Group]:
    """A cgroup that workers enter; at the end nothing is in it any more."""
    with Group("freezer") as group:
        group.set("freezer.state", "THAWED")  # version 2 lets what is frozen be killed
        yield group


@pytest.fixture
def limited() -> Iterator[Group]:
    """No more than LIMIT processes."""
    with Group("pids") as group:
        group.set("pids.max", LIMIT)
        yield group


def entering(group: Group, *command: str, who: str = "0") -> list[str]:
    """The command, run in the group, which all of `who` enter (pids, as sh has them)."""
    enter = f'for pid in {who}; do echo $pid >{group.path}/cgroup.procs || exit; done; exec "$@"'
    return ["sh", "-c", enter, "sh", *command]


def family(host: Host, workers: int) -> None:
    """All that so many workers of this kind start is there."""
    wait_until(
        lambda: (
            sorted(process.comm for process in host.user_processes() if not process.comm.startswith("hvl-"))
            == ["sh"] * workers + ["sleep"] * workers
        ),
        f"the workers of {host.name} and what they have detached",
    )


def told(job: Job, host: Host, workers: int) -> None:
    """Its driver has told what is left on the host, which is all that so many workers started."""
    family(host, workers)
    left = host.user_processes()
    line = next(
        line
        for line in job.stderr.splitlines()
        if f"{host.name}: {len(left)} processes of the job can't be killed" in line
    )
    assert {int(pid) for pid in line.rpartition(":")[2].split(",")} == {process.pid for process in left}


@pytest.mark.long  # as below
def test_frozen_workers(cluster: TestHosts, freezer: Group) -> None:
    job = Job(cluster, ["-H", "a:2,b:1", *OPTIONS, *entering(freezer, "sh", "-c", FAMILY)]).saw("ready", 3)
    family(cluster["a"], 2)
    family(cluster["b"], 1)
    freezer.freeze([])
    assert job.interrupt().code(CLOSING) == 130
    told(job, cluster["a"], 2)
    told(job, cluster["b"], 1)


@pytest.mark.long  # the agent's own test of it is in tests/unit/agent
def test_workers_that_another_user_owns(new_hosts: Callable[..., TestHosts]) -> None:
    """As with sudo: all their ids are root's."""
    hosts = new_hosts(["a"], users=["bob"])
    sudo, plain = "/run/sudo", shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if plain is None:
        pytest.skip("no Python that other users can run")
    hosts["a"].run(["cp", str(shutil.which("setpriv")), sudo], check=True)
    hosts["a"].run(["chmod", "4755", sudo], check=True)
    command = [sudo, "--reuid", "0", "--clear-groups", "sh", "-c", FAMILY]
    job = Job(hosts, ["-H", "bob@a:2", *OPTIONS, "--remote-python", plain, *command]).saw("ready", 2)
    family(hosts["a"], 2)
    assert job.interrupt().code(CLOSING) == 130
    told(job, hosts["a"], 2)


@pytest.mark.parametrize("pause", ["0.02", pytest.param("0", marks=pytest.mark.long)])
@pytest.mark.parametrize("ending", ["interrupt", "agent", "guardian", "driver"])
def test_a_fork_bomb_under_a_limit_of_processes(
    cluster: TestHosts, limited: Group, ending: str, pause: str
) -> None:
    """Which its agents have too: they could not start a process any more. Nothing is left when the driver has ended."""
    agent_and_guardian = "$PPID $(cut -d' ' -f4 /proc/$PPID/stat)"
    bomb = entering(limited, sys.executable, "-I", "-S", "-c", BOMB, pause, who=f"{agent_and_guardian} 0")
    job = Job(cluster, ["-H", "a:1,b:1", *OPTIONS, *bomb]).saw("refused")
    if ending == "interrupt":
        assert job.interrupt().code(CLOSING) == 130
    elif ending == "driver":
        job.send(signal.SIGKILL)
        wait_until(lambda: not limited.pids(), "the agents, which miss their driver, have ended")
    else:
        (victim,) = {"agent": agents, "guardian": guardians}[ending](cluster["a"].user_processes())
        cluster["a"].run(["kill", "-KILL", str(victim.pid)])
        assert job.code(CLOSING) == 69
    assert limited.pids() == []
