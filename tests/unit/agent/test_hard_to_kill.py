"""Processes that fork faster than one kills, that can't be killed, or that a user kills by name: what is left, and what is told."""

import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.cgroups import BOMB, LIMIT, Group
from tests.testhosts.places import wait_until
from tests.unit.agent.harness import AgentProcess, Hunt, has_ended, python

Launch = Callable[..., AgentProcess]

SOMEBODY = "54321"


@pytest.fixture
def limited() -> Iterator[Group]:
    """No more than LIMIT processes."""
    with Group("pids") as group:
        group.set("pids.max", LIMIT)
        yield group


@pytest.fixture
def freezer(hunt: Hunt) -> Iterator[Group]:
    with Group("freezer") as group:
        group.set("freezer.state", "THAWED")  # version 2 lets what is frozen be killed
        yield group
    hunt.end()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ending", ["bye", "agent", "guardian"])
def test_after_a_fork_bomb_under_a_limit_of_processes(launch: Launch, limited: Group, ending: str) -> None:
    """Not even the agent could start a process any more."""
    agent = launch(shell=limited.shell)
    agent.hello()
    guardian, process = agent.guardian, agent.agent
    agent.start(python(BOMB, "0.02"), own={"HVLAUNCH_SIZE": "2"})
    agent.read_output(len("refused"))
    if ending == "bye":
        assert agent.bye() == ({"type": "bye", "left": 0, "pids": []}, 0)
    elif ending == "agent":
        process.kill()
        assert agent.status() == 128 + signal.SIGKILL
        assert agent.stderr() == "hvlaunch agent: killed by SIGKILL\n"
    else:
        guardian.kill()
        agent.expect("bye", left=0)
        wait_until(lambda: has_ended(process), "the agent's end")
    assert limited.pids() == []


def test_agent_that_loses_its_guardian_while_killing_leaves_no_files(
    launch: Launch, freezer: Group, hunt: Hunt, tmp_path: Path
) -> None:
    agent = launch(lease=9.0, env={**os.environ, "TMPDIR": str(tmp_path)})
    agent.hello()
    guardian, process = agent.guardian, agent.agent
    agent.start(["/bin/sh", "-c", "setsid sleep $0 & sleep $0", hunt.mark])
    hunt.wait_for("sh", "sleep", "sleep", meanwhile=agent.settle)
    freezer.freeze(hunt.pids())
    agent.send("bye")
    wait_until(
        lambda: all(map(has_been_killed, hunt.pids())), "SIGKILL, by the one that ends all descendants"
    )
    guardian.kill()
    assert agent.expect("bye")[0]["left"] == 3
    wait_until(lambda: has_ended(process), "the agent's end")
    assert list(tmp_path.iterdir()) == []


def has_been_killed(pid: int) -> bool:
    """Though it is frozen."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["ShdPnd"], 16) & 1 << signal.SIGKILL - 1)


def test_frozen_worker_is_reported(launch: Launch, freezer: Group, hunt: Hunt) -> None:
    agent = launch(lease=3.0)
    agent.hello()
    agent.start(["/bin/sh", "-c", "setsid sleep $0 & sleep $0", hunt.mark])
    hunt.wait_for("sh", "sleep", "sleep", meanwhile=agent.settle)
    found = hunt.pids()
    freezer.freeze(found)
    agent.send("bye")
    bye, _ = agent.expect("bye", left=3)
    assert sorted(bye["pids"]) == sorted(found)
    assert agent.status() == 1
    assert "can't be killed" in agent.stderr()
    assert sorted(hunt.pids()) == sorted(found)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, and setpriv")
def test_process_of_another_user_is_reported(launch: Launch, hunt: Hunt) -> None:
    """As with sudo: all ids of the process are root's, so its parent's user can't kill it."""
    become = ["setpriv", "--reuid", SOMEBODY, "--regid", SOMEBODY, "--clear-groups"]
    plain = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if plain is None or subprocess.run([*become, "/bin/sh", "-c", f"[ -x {plain} ]"], check=False).returncode:
        pytest.skip("no Python that other users can run")
    with TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        sudo = Path(shutil.copy(str(shutil.which("setpriv")), folder))
        sudo.chmod(0o755 | stat.S_ISUID)
        agent = launch(shell=[*become, "/bin/sh", "-c"], candidates=[plain], lease=3.0)
        agent.hello()
        agent.start([str(sudo), "--reuid", "0", "--clear-groups", "sleep", hunt.mark])
        hunt.wait_for("sleep")
        agent.send("bye")
        assert agent.expect("bye", left=1)[0]["pids"] == hunt.pids()
        assert agent.status() == 1


@pytest.mark.parametrize("name", ["python", "hvlaunch"])
def test_kill_by_name_misses_guardian_and_agent(launch: Launch, hunt: Hunt, name: str) -> None:
    """As `pkill -9 python` does: it looks for a part of what the kernel calls them."""
    agent = launch()
    agent.hello()
    agent.start(["/bin/sh", "-c", "setsid sleep $0 & sleep $0", hunt.mark])
    hunt.wait_for("sh", "sleep", "sleep")
    names = [process.name() for process in (agent.guardian, agent.agent)]
    assert names == ["hvl-guardian", "hvl-agent"]
    assert not any(name in each for each in names)
    assert agent.bye() == ({"type": "bye", "left": 0, "pids": []}, 0)
    assert hunt.pids() == []
