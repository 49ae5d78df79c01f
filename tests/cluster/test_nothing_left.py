"""However a job ends, nothing of it is left on any host, and another job there goes on."""

import os
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.jobs import PROGRAMS, Job, agent_of, agents, guardians, pids, without_progress
from tests.testhosts.hosts import Process, TestHosts, wait_until

LEASE = 5  # for those that wait for its end; the others have the usual one, which a busy machine keeps
GRACE = 1
LIMIT = 60.0  # seconds for what should take a lease and a grace, on a machine that is busy


class Scene:
    """Hosts on which a job of somebody else runs all the time."""

    def __init__(self, hosts: TestHosts) -> None:
        self.hosts = hosts
        fixed = ["-H", "a:1,b:1,c:1,d:1", "--lease", 60, "--hang-timeout", 0]
        self.other = Job(hosts, [*fixed, "sh", "-c", "echo other; exec sleep 3600"])
        self.other.saw("other", 4)
        self.before = pids(hosts)

    def start(self, *arguments: object, options: tuple[object, ...] = ()) -> Job:
        """A job of 2 workers on each of 4 hosts that detach processes in every way there is."""
        fixed = ["-H", "a:2,b:2,c:2,d:2", "--grace", GRACE, *options]
        return Job(self.hosts, [*fixed, sys.executable, PROGRAMS / "detach.py", *arguments])

    def of_the_job(self, host: str) -> list[Process]:
        known = self.before[host]
        there = [one for one in self.hosts[host].user_processes() if one.pid not in known]
        # The other job's observers begin at any time, with the name of the process that forks them, then with Python's.
        return [one for one in there if not (one.ppid in known and is_errand(one))]

    def kill(self, host: str, choose: Callable[[list[Process]], list[Process]]) -> None:
        """SIGKILL those that are chosen of the job's processes on the host."""

        def only() -> Process | None:
            # An errand's process has the name of the process that forks it until it has its own.
            chosen = choose(self.of_the_job(host))
            return chosen[0] if len(chosen) == 1 else None

        chosen = wait_until(only, f"host {host} has one such process")
        self.hosts[host].run(["kill", "-9", str(chosen.pid)], check=True)

    def is_clean(self, timeout: float = 0.0) -> None:
        """Exactly the other job's processes are there, at once or within `timeout` seconds."""

        def left() -> dict[str, list[Process]]:
            return {host.name: found for host in self.hosts if (found := self.of_the_job(host.name))}

        if timeout:
            wait_until(lambda: not left(), f"nothing is left ({left()})", timeout)
        assert not left()
        gone = [name for name, now in pids(self.hosts).items() if self.before[name] - now]
        assert not gone, f"the other job lost processes on {gone}"
        assert self.other.process.poll() is None, self.other.stderr


def is_errand(process: Process) -> bool:
    return process.comm.startswith("hvl-") or process.argv[1:5] == ("-I", "-S", "-X", "utf8")


@pytest.fixture
def scene(cluster: TestHosts) -> Iterator[Scene]:
    scene = Scene(cluster)
    yield scene
    assert scene.other.send(signal.SIGTERM).code() == 128 + signal.SIGTERM


def worker_of(rank: int) -> Callable[[list[Process]], list[Process]]:
    def choose(processes: list[Process]) -> list[Process]:
        found = [one for one in processes if str(PROGRAMS / "detach.py") in one.argv]
        return sorted(found, key=lambda one: one.pid)[rank : rank + 1]

    return choose


def test_success(scene: Scene) -> None:
    job = scene.start("--exit", "all=0")
    assert job.code() == 0
    scene.is_clean()
    assert len(without_progress(job.stderr)) == 2, job.stderr  # where it began, and that it ended well


@pytest.mark.parametrize("ignore", [(), ("--ignore-term",)], ids=["", "ignoring SIGTERM"])
def test_one_worker_fails(scene: Scene, ignore: tuple[str, ...]) -> None:
    job = scene.start("--exit", "3=7", *ignore)
    assert job.code() == 7
    scene.is_clean()
    assert "rank 3 of 8 on host b failed first" in job.stderr


def test_a_worker_is_killed(scene: Scene) -> None:
    job = scene.start().saw("ready", 8)
    scene.kill("c", worker_of(0))
    assert job.code() == 137
    scene.is_clean()
    assert "SIGKILL" in job.stderr


@pytest.mark.parametrize("ignore", [(), ("--ignore-term",)], ids=["", "ignoring SIGTERM"])
def test_an_agent_is_killed(scene: Scene, ignore: tuple[str, ...]) -> None:
    job = scene.start(*ignore).saw("ready", 8)
    scene.kill("b", agents)
    assert job.code() == 69
    scene.is_clean()
    assert "host b" in job.stderr
    assert "killed by SIGKILL" in job.stderr


@pytest.mark.parametrize("ignore", [(), ("--ignore-term",)], ids=["", "ignoring SIGTERM"])
def test_a_guardian_is_killed(scene: Scene, ignore: tuple[str, ...]) -> None:
    job = scene.start(*ignore).saw("ready", 8)
    scene.kill("b", guardians)
    assert job.code() == 69
    scene.is_clean(timeout=LIMIT)
    assert "host b" in job.stderr
    assert "guardian was killed" in job.stderr


@pytest.mark.parametrize("ignore", [(), ("--ignore-term",)], ids=["", "ignoring SIGTERM"])
def test_the_driver_is_killed(scene: Scene, ignore: tuple[str, ...]) -> None:
    job = scene.start(*ignore).saw("ready", 8)
    assert job.send(signal.SIGKILL).code() == -signal.SIGKILL
    scene.is_clean(timeout=LIMIT)


@pytest.mark.parametrize("ignore", [(), ("--ignore-term",)], ids=["", "ignoring SIGTERM"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_driver_is_told_to_end(scene: Scene, number: int, ignore: tuple[str, ...]) -> None:
    job = scene.start(*ignore).saw("ready", 8).send(number)
    assert job.code() == 128 + number
    scene.is_clean()
    assert f"interrupted by {signal.Signals(number).name}" in job.stderr


def test_ctrl_c_twice(scene: Scene) -> None:
    job = scene.start("--ignore-term", options=("--grace", 600)).saw("ready", 8)
    job.interrupt().saw("a second one kills them at once")
    assert job.interrupt().code() == 130
    scene.is_clean()


def test_ctrl_c_while_connecting(scene: Scene) -> None:
    scene.hosts["d"].cut()
    job = scene.start(options=("--verbose",))
    wait_until(lambda: agents(scene.of_the_job("a")), "the agent of host a is there")
    assert job.interrupt().code() == 130
    scene.is_clean(timeout=LIMIT)
    scene.hosts["d"].heal()


def test_a_link_is_cut(scene: Scene) -> None:
    job = scene.start(options=("--lease", LEASE)).saw("ready", 8)
    scene.hosts["b"].cut()
    assert job.code() == 69
    wait_until(lambda: not scene.of_the_job("b"), "nothing is left on b, which nobody reaches", LIMIT)
    assert "host b" in job.stderr
    assert f"silent for {LEASE} s" in job.stderr
    scene.hosts["b"].heal()
    scene.is_clean()


def test_the_drivers_own_link_is_cut(scene: Scene) -> None:
    job = scene.start(options=("--lease", LEASE)).saw("ready", 8)
    scene.hosts.driver.cut()
    assert job.code() == 69
    assert f"lost: silent for {LEASE} s (--lease)" in job.stderr
    names = scene.hosts.names
    wait_until(
        lambda: not any(map(scene.of_the_job, names)), "nothing is left on hosts that nobody reaches", LIMIT
    )
    scene.hosts.driver.heal()
    scene.is_clean()


def test_a_host_is_powered_off(cluster: TestHosts) -> None:
    arguments = ["-H", "a:2,b:2", "--lease", LEASE, "--grace", GRACE, sys.executable, PROGRAMS / "detach.py"]
    job = Job(cluster, arguments).saw("ready", 4)
    cluster["b"].kill()
    assert job.code() == 69
    assert cluster["a"].user_processes() == []
    assert "host b" in job.stderr


def test_an_agent_is_stopped_and_the_driver_killed(cluster: TestHosts) -> None:
    """Not even the agent can do anything; the guardian sees the channel close."""
    arguments = ["-H", "a:2", "--lease", LEASE, "--grace", GRACE, sys.executable, PROGRAMS / "detach.py"]
    job = Job(cluster, arguments).saw("ready", 2)
    agent = agent_of(cluster["a"])
    cluster["a"].run(["kill", "-STOP", str(agent.pid)], check=True)
    job.send(signal.SIGKILL).code()
    wait_until(lambda: cluster["a"].user_processes() == [], "nothing is left", LIMIT)


def test_a_stopped_driver_is_given_up_and_cleaned_up_after(cluster: TestHosts) -> None:
    arguments = ["-H", "a:2", "--lease", LEASE, "--grace", GRACE, sys.executable, PROGRAMS / "detach.py"]
    job = Job(cluster, arguments).saw("ready", 2).send(signal.SIGSTOP)
    wait_until(lambda: cluster["a"].user_processes() == [], "the lease ran out", LIMIT)
    assert job.send(signal.SIGCONT).code() == 69
    assert "received nothing from the driver" in job.stderr


def test_scratch_directories_are_gone(cluster: TestHosts) -> None:
    leave = "import os; open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('x')"
    ls = ["sh", "-c", "ls -d /tmp/hvlaunch-* 2>/dev/null"]

    def directories() -> set[tuple[str, str]]:
        return {(name, path) for name in "ab" for path in cluster[name].run(ls).stdout.split()}

    before = directories()  # where a guardian and its agent are killed at once nobody removes theirs
    assert Job(cluster, ["-H", "a:2,b:2", sys.executable, "-c", leave]).code() == 0
    wait_until(lambda: directories() <= before, "nothing of the job is in /tmp")


def test_local_workers_leave_nothing_either(cluster: TestHosts) -> None:
    mark = f"mark-{os.getpid()}"
    job = Job(cluster, ["-np", 2, "--grace", GRACE, sys.executable, PROGRAMS / "detach.py", mark]).saw(
        "ready", 2
    )
    assert job.interrupt().code() == 130
    assert not [
        one
        for one in cluster.driver.processes()
        if mark in one.argv or "time.sleep(3600)" in " ".join(one.argv)
    ]
