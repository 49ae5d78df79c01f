"""A job of processes that can't be killed ends all the same; who is left is told with all pids."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from tests.cgroups import Group
from tests.cluster.jobs import Job
from tests.cluster.testhosts import Host, TestHosts, wait_until

CLOSING = 60.0
"""Seconds: what the driver waits for at the end (25), and a busy machine."""
OPTIONS = ("--grace", 1)
FAMILY = "setsid sleep 3600 & echo ready; wait"


@pytest.fixture
def freezer() -> Iterator[Group]:
    """A cgroup that workers enter; at the end nothing is in it any more."""
    group = Group("freezer")
    try:
        group.set("freezer.state", "THAWED")  # version 2 lets what is frozen be killed
        yield group
    finally:
        with suppress(OSError):
            (group.path / "freezer.state").write_text("THAWED")
        group.close()


def entering(group: Group, *command: str) -> list[str]:
    """The command, run in the group."""
    return ["sh", "-c", f'echo 0 >{group.path}/cgroup.procs && exec "$@"', "sh", *command]


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


def test_frozen_workers(cluster: TestHosts, freezer: Group) -> None:
    job = Job(cluster, ["-H", "a:2,b:1", *OPTIONS, *entering(freezer, "sh", "-c", FAMILY)]).saw("ready", 3)
    family(cluster["a"], 2)
    family(cluster["b"], 1)
    freezer.freeze([])
    assert job.interrupt().code(CLOSING) == 130
    told(job, cluster["a"], 2)
    told(job, cluster["b"], 1)


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
