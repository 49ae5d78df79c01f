"""A program in place of ssh: the MPI operator's kubexec.sh, with a kubectl that runs things here."""

import os
import re
import subprocess
import sys

import pytest

from hvlaunch.errors import ConnectFailed, HostError
from hvlaunch.job import Host
from hvlaunch.ssh import agent_words, connect_by_agent

KUBEXEC = """\
#!/bin/sh
set -x
POD_NAME=$1
shift
{folder}/kubectl exec ${{POD_NAME}} -- /bin/sh -c "$*"
"""
KUBECTL = """\
#!/bin/sh
# exec [-i] POD -- COMMAND...
shift
if [ "$1" = -i ]; then shift 3; exec "$@"; fi
shift 2
exec "$@" </dev/null
"""


@pytest.fixture
def kubexec(tmp_path):
    (tmp_path / "kubectl").write_text(KUBECTL)
    script = tmp_path / "kubexec.sh"
    script.write_text(KUBEXEC.format(folder=tmp_path))
    for one in (tmp_path / "kubectl", script):
        one.chmod(0o755)
    return script


def test_stdin_and_stdout_pass_through_the_agent(kubexec):
    connection = connect_by_agent(str(kubexec), Host("pod-0"))
    assert (connection.local_address, connection.remote_address) == ("", "")
    channel = connection.run("exec /bin/sh -c 'head -c 6; exit 3'")
    channel.write(b"a line")
    answer = b""
    while data := channel.read():
        answer += data
    assert answer == b"a line"
    assert channel.exit_status(30) == 3
    connection.close()


@pytest.mark.parametrize(
    "text", ['exec ssh "$@"\n', "kubectl exec -i $1\n", "kubectl --context x exec --stdin $1\n"]
)
def test_a_program_that_passes_stdin_on_is_run_as_it_is(tmp_path, text):
    script = tmp_path / "agent.sh"
    script.write_text(f"#!/bin/sh\n{text}")
    script.chmod(0o755)
    assert agent_words(f"{script} -q", "a") == [str(script), "-q"]


def test_a_program_that_is_not_there(tmp_path):
    with pytest.raises(
        ConnectFailed,
        match=r"host a: .*/none, which the scheduler names to be used instead of ssh, was not found",
    ):
        agent_words(f"{tmp_path}/none", "a")


def test_a_program_that_can_not_be_started(tmp_path):
    script = tmp_path / "agent"
    script.write_text("#!/none\n")
    script.chmod(0o755)
    with pytest.raises(HostError, match=r"host a: .*/agent can't be started: no such file or directory"):
        connect_by_agent(str(script), Host("a")).run("true")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers run on Linux")
def test_a_job_of_the_mpi_operators(kubexec, tmp_path):
    (tmp_path / "hostfile").write_text("pod-0 slots=2\npod-1 slots=1\n")
    env = {
        **os.environ,
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "OMPI_MCA_orte_default_hostfile": str(tmp_path / "hostfile"),
        "OMPI_MCA_plm_rsh_agent": str(kubexec),
    }
    line = [
        sys.executable,
        "-m",
        "hvlaunch",
        "--network-interfaces",
        "lo",
        "sh",
        "-c",
        "echo $RANK of $WORLD_SIZE on $HVLAUNCH_HOST",
    ]
    job = subprocess.run(line, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert job.returncode == 0, job.stderr
    assert "hvlaunch: hosts of the MPI operator's job: pod-[0-1]" in job.stderr
    assert sorted(re.findall(r"\[\d\]<stdout>: (.*)", job.stdout)) == [
        "0 of 3 on pod-0",
        "1 of 3 on pod-0",
        "2 of 3 on pod-1",
    ]
