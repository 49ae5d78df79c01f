"""Who kills by a program's name on a host, as people do, leaves nothing of the job there."""

import shutil
import sys

import pytest

from tests.cluster.jobs import Job, agents, guardians
from tests.testhosts.hosts import TestHosts, wait_until

KILLERS = [["killall", "-9", "python3"], ["pkill", "-9", "python"], ["pkill", "-9", "hvlaunch"]]


@pytest.mark.parametrize("command", KILLERS, ids=" ".join)
def test_nothing_is_left(cluster: TestHosts, command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here")
    family = "import subprocess, sys; subprocess.run(['sh', '-c', 'setsid sleep 3600 & echo ready; wait'])"
    cluster["a"].run(["ln", "-sf", sys.executable, "/tmp/python3"], check=True)
    job = Job(
        cluster, ["-H", "a:2", "--grace", 1, "--remote-python", "/tmp/python3", "/tmp/python3", "-c", family]
    ).saw("ready", 2)
    cluster["a"].run(command)
    if command[-1] == "hvlaunch":
        assert (
            len(agents(cluster["a"].user_processes())) == len(guardians(cluster["a"].user_processes())) == 1
        )
        assert job.interrupt().code() == 130
    else:
        assert job.code() == 137
        assert "on host a failed first" in job.stderr
    wait_until(lambda: cluster["a"].user_processes() == [], "nothing is left")
