"""Processes that fork faster than one kills, that can't be killed, or that a user kills by name: what is left, and what is told."""

import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.unit.agent.harness import AgentProcess, Hunt, has_ended, python, until

Launch = Callable[..., AgentProcess]

CGROUPS = Path("/sys/fs/cgroup")
LIMIT = 150
SOMEBODY = "54321"
BOMB = """if True:
    import os, sys, time
    last = time.monotonic() + 120
    os.write(1, b'going')
    while os.path.exists(sys.argv[1]) and time.monotonic() < last:
        try:
            if os.fork() == 0:
                os.setsid()
        except OSError:
            pass
"""
"""Forks without end, each in a session of its own, as long as a file is there."""


class Group:
    """A cgroup of version 1 or 2, for processes that are started by `shell`."""

    def __init__(self, controller: str) -> None:
        root = CGROUPS / controller
        self.path = (root if root.is_dir() else CGROUPS) / f"hvlaunch-test-{os.getpid()}"
        self.shell = ["/bin/sh", "-c", f'echo $$ >{self.path}/cgroup.procs && exec /bin/sh -c "$0"']
        try:
            self.path.mkdir()
        except OSError as error:
            pytest.skip(f"no cgroup can be made here: {error}")

    def set(self, name: str, value: object) -> None:
        if not (self.path / name).exists():
            pytest.skip(f"this machine's cgroups have no {name}")
        (self.path / name).write_text(str(value))

    def pids(self) -> list[int]:
        """Those that live; who has ended may not be reaped yet, where nobody is its parent but a machine's init."""
        found = []
        for pid in map(int, (self.path / "cgroup.procs").read_text().split()):
            with suppress(OSError):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                found += [pid] if state not in "ZX" else []
        return found

    def close(self) -> None:
        until(lambda: not self.pids(), "the group's processes end")
        until(self._remove, "the group can be removed")

    def _remove(self) -> bool:
        with suppress(OSError):
            self.path.rmdir()
        return not self.path.exists()


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Group]:
    """No more than LIMIT processes; those of a BOMB that is given `fuse` end with the test."""
    (tmp_path / "fuse").touch()
    group = Group("pids")
    try:
        group.set("pids.max", LIMIT)
        yield group
    finally:
        (tmp_path / "fuse").unlink()
        group.close()


@pytest.fixture
def freezer(hunt: Hunt) -> Iterator[Group]:
    group = Group("freezer")
    try:
        group.set("freezer.state", "THAWED")  # version 2 lets what is frozen be killed
        yield group
    finally:
        with suppress(OSError):
            (group.path / "freezer.state").write_text("THAWED")
        hunt.end()
        group.close()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("ending", ["bye", "agent", "guardian"])
def test_after_a_fork_bomb_under_a_limit_of_processes(
    launch: Launch, limited: Group, tmp_path: Path, ending: str
) -> None:
    """Not even the agent could start a process any more."""
    agent = launch(shell=limited.shell)
    agent.hello()
    guardian, process = agent.guardian, agent.agent
    agent.start(python(BOMB, str(tmp_path / "fuse")), own={"HVLAUNCH_SIZE": "2"})
    agent.read_output(5)
    until(lambda: len(limited.pids()) == LIMIT, "the bomb has reached its limit")
    if ending == "bye":
        assert agent.bye() == ({"type": "bye", "left": 0}, 0)
    elif ending == "agent":
        process.kill()
        assert agent.status() == 128 + signal.SIGKILL
        assert agent.stderr() == "hvlaunch agent: killed by SIGKILL\n"
    else:
        guardian.kill()
        agent.expect("bye", left=0)
        until(lambda: has_ended(process), "the agent's end")
    assert limited.pids() == []


def test_a_frozen_worker_is_told_of(launch: Launch, freezer: Group, hunt: Hunt) -> None:
    agent = launch(lease=3.0)
    agent.hello()
    agent.start(["/bin/sh", "-c", "setsid sleep $0 & sleep $0", hunt.mark])
    hunt.wait_for("sh", "sleep", "sleep", meanwhile=agent.settle)
    found = hunt.pids()
    for pid in found:
        freezer.set("cgroup.procs", pid)
    freezer.set("freezer.state", "FROZEN")
    agent.send("bye")
    assert sorted(agent.expect("remaining")[0]["pids"]) == sorted(found)
    assert agent.expect("bye")[0]["left"] == 3
    assert agent.status() == 1
    assert "can't be killed" in agent.stderr()
    assert sorted(hunt.pids()) == sorted(found)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, and setpriv")
def test_another_users_process_is_told_of(launch: Launch, hunt: Hunt) -> None:
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
        assert agent.expect("remaining")[0]["pids"] == hunt.pids()
        assert agent.expect("bye")[0]["left"] == 1
        assert agent.status() == 1


@pytest.mark.parametrize("name", ["python", "hvlaunch"])
def test_who_kills_by_name_does_not_meet_guardian_and_agent(launch: Launch, hunt: Hunt, name: str) -> None:
    """As `pkill -9 python` does: it looks for a part of what the kernel calls them."""
    agent = launch()
    agent.hello()
    agent.start(["/bin/sh", "-c", "setsid sleep $0 & sleep $0", hunt.mark])
    hunt.wait_for("sh", "sleep", "sleep")
    names = [process.name() for process in (agent.guardian, agent.agent)]
    assert names == ["hvl-guardian", "hvl-agent"]
    assert not any(name in each for each in names)
    assert agent.bye() == ({"type": "bye", "left": 0}, 0)
    assert hunt.pids() == []
