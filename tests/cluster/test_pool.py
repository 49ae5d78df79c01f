"""A warm pool on real hosts: jobs are as ever, whatever ends, and nothing is left."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.jobs import HVLAUNCH, Job, agent_of
from tests.cluster.test_sessions import LINES, kill_sshd
from tests.cluster.test_successor import Succession, is_whole
from tests.testhosts.hosts import Host, Process, TestHosts, wait_until

LIMIT = 90.0


class Pool:
    """Hosts a, b and c, with a pool of them for this user."""

    def __init__(self, hosts: TestHosts, state: Path) -> None:
        self.hosts = hosts
        self.env = {**hosts.driver.env, "XDG_STATE_HOME": str(state)}

    def do(self, *words: str, code: int = 0) -> str:
        """`hvlaunch pool WORDS`: what it prints."""
        process = self.hosts.driver.popen(
            [*HVLAUNCH, "pool", *words],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said, _ = process.communicate(timeout=LIMIT)
        assert process.returncode == code, said
        return str(said)

    def job(self, *words: object) -> Job:
        return Job(self.hosts, ["--pool", "p", *words], {"XDG_STATE_HOME": self.env["XDG_STATE_HOME"]})

    def process(self) -> Process:
        [one] = [each for each in self.hosts.driver.processes() if "up" in each.argv]
        return one

    def is_shown(self, text: str) -> None:
        wait_until(lambda: text in self.do("status"), f"the status has {text!r}", LIMIT)


@pytest.fixture
def pool(cluster: TestHosts, tmp_path: Path) -> Iterator[Pool]:
    one = Pool(cluster, tmp_path)
    assert one.do("up", "p", "-H", "a:2,b:2,c:2", "--lease", "12") == "p\n"
    yield one
    one.do("down", "p", "--kill")


def warm(host: Host) -> list[Process]:
    return [each for each in host.user_processes() if each.comm == "hvl-warm"]


def warm_pids(pool: "Pool") -> dict[str, list[int]]:
    return {host.name: [each.pid for each in warm(host)] for host in pool.hosts}


def workers(host: Host) -> list[Process]:
    return [each for each in host.user_processes() if LINES in each.argv]


def lines_of(job: Job, rank: int) -> list[int]:
    return [int(number) for number in re.findall(rf"line {rank} (\d+) ", job.stdout)]


def count(number: int) -> list[object]:
    return [sys.executable, "-c", LINES, number, 0.05, 0]


def test_sequential_and_concurrent_jobs_leave_nothing(pool: Pool) -> None:
    before = warm_pids(pool)
    assert [len(found) for found in before.values()] == [1, 1, 1, 0]
    for _ in range(2):
        job = pool.job("-H", "b:2,c:1", sys.executable, "-c", "import os; print(os.uname().nodename)")
        assert job.code(LIMIT) == 0, job.stderr
        assert sorted(line.split()[-1] for line in job.stdout.splitlines()) == ["b", "b", "c"]
    first, second = pool.job(*count(60)), pool.job("-H", "a:2", *count(60))
    for job in (first, second):
        job.saw("line 0 5 ")
    said = pool.do("down", "p", code=2)
    assert "pool p is used by 2 jobs; try: hvlaunch jobs" in said
    assert [job.code(LIMIT) for job in (first, second)] == [0, 0]
    assert [lines_of(first, rank) for rank in range(6)] == [list(range(60))] * 6
    wait_until(lambda: warm_pids(pool) == before, "the jobs' processes have ended, and no other", LIMIT)
    assert "p: 3 hosts, no job for" in pool.do("status")
    assert pool.do("down", "p") == "pool p is down\n"
    wait_until(lambda: not any(host.user_processes() for host in pool.hosts), "nothing is left", LIMIT)
    assert not pool.hosts.driver.processes()
    pool.do("up", "p", "-H", "a")


@pytest.mark.parametrize("options", [(), ("--min-np", "6")], ids=["static", "elastic"])
def test_a_job_outlives_the_process_of_its_pool(pool: Pool, options: tuple[str, ...]) -> None:
    job = pool.job(*options, *count(200)).saw("line 2 20 ")
    pool.hosts.driver.run(["kill", "-9", str(pool.process().pid)], check=True)
    job.saw("host b: connected again after")
    wait_until(lambda: not any(map(warm, pool.hosts)), "the warm agents have ended", LIMIT)
    assert job.code(LIMIT) == 0, job.stderr
    assert [lines_of(job, rank) for rank in range(6)] == [list(range(200))] * 6
    assert "p: its process was killed" in pool.do("status")


def test_lost_connection_with_and_without_a_running_job(pool: Pool) -> None:
    job = pool.job(*count(200)).saw("line 2 20 ")
    kill_sshd(pool.hosts)
    job.saw("host b: connected again after")
    assert job.code(LIMIT) == 0, job.stderr
    pool.is_shown("ready: a,b,c")
    before = {each.pid for each in warm(pool.hosts["b"])}
    kill_sshd(pool.hosts)
    wait_until(
        lambda: {each.pid for each in warm(pool.hosts["b"])} - before, "b has another warm agent", LIMIT
    )
    pool.is_shown("ready: a,b,c")
    assert pool.job("true").code(LIMIT) == 0


def test_lost_host_fails_the_job(pool: Pool) -> None:
    job = pool.job(*count(100_000)).saw("line 2 20 ")
    agent = agent_of(pool.hosts["b"])  # no spare is there while a job runs
    pool.hosts["b"].run(["kill", "-9", str(agent.pid)], check=True)
    assert job.code(LIMIT) == 69
    assert "host b: lost: hvlaunch agent: killed by SIGKILL" in job.stderr
    pool.hosts["b"].kill()
    pool.is_shown("away: b (")
    job = pool.job("true")
    assert job.code(LIMIT) == 69
    assert "host b: pool p has no connection to it now: " in job.stderr
    assert pool.job("-H", "a:2,c:2", "true").code(LIMIT) == 0


def test_killed_driver_leaves_no_workers(pool: Pool) -> None:
    job = pool.job(*count(100_000)).saw("line 2 20 ")
    job.send(signal.SIGKILL)
    wait_until(lambda: not any(map(workers, pool.hosts)), "no worker", LIMIT)
    assert pool.job("true").code(LIMIT) == 0


MEET = """
import os, socket, sys, time
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    listener = socket.create_server(where, reuse_port=True)
    listener.accept()
else:
    while True:
        try:
            sys.exit(socket.create_connection(where, timeout=2).close())
        except ConnectionRefusedError:
            time.sleep(0.05)
"""


def probe_results(job: Job) -> dict[str, int]:
    """Count the hosts' reports of addresses that they reach."""
    text = job.journal.read_text()
    return {kind: text.count(f'"{kind}"') for kind in ("HostProbed", "RendezvousReached")}


def test_each_job_on_a_pool_probes_the_network_itself(pool: Pool) -> None:
    command = ["-H", "b:1,c:1", sys.executable, "-c", MEET]
    for _ in range(2):
        job = pool.job(*command)
        assert job.code(LIMIT) == 0, job.stderr
        assert probe_results(job)["HostProbed"] >= 2
        assert probe_results(job)["RendezvousReached"] == 2
    pool.hosts["b"].part(pool.hosts["c"])
    job = pool.job(*command)
    assert job.code(LIMIT) == 69
    assert "can't connect to host" in job.stderr


def test_a_successor_continues_a_job_on_a_pool(cluster: TestHosts, tmp_path: Path) -> None:
    pool = Pool(cluster, tmp_path)
    pool.do("up", "p", "-H", "a:2,b:2,c:2,d:2")
    assert pool.job("true").code(LIMIT) == 0
    job = Succession(cluster, tmp_path, "--pool", "p", command=count(200))
    job.first.saw("line 2 20 ", 1)
    job.kill()
    job.succeed()
    assert job.code() == 0, job.process.stderr.read()  # type: ignore[union-attr]
    is_whole(job.output, 200)
    pool.do("down", "p")


CLUSTER = """
import os, hvlaunch
with hvlaunch.Cluster(hosts="a:2,b:1", quiet=True) as cluster:
    for _ in range(2):
        print(cluster.run(lambda: os.uname().nodename), flush=True)
"""


def test_cluster_has_a_pool_of_its_own(cluster: TestHosts, tmp_path: Path) -> None:
    env = {**cluster.driver.env, "XDG_STATE_HOME": str(tmp_path)}
    program = cluster.driver.popen(
        [sys.executable, "-c", CLUSTER], env=env, stdout=subprocess.PIPE, text=True
    )
    said, _ = program.communicate(timeout=LIMIT)
    assert said == "['a', 'a', 'b']\n" * 2
    assert list((tmp_path / "hvlaunch/pools").iterdir()) == []


def test_hosts_that_cannot_be_reached(cluster: TestHosts, tmp_path: Path) -> None:
    pool = Pool(cluster, tmp_path)
    cluster["b"].cut()
    up = ("up", "p", "-H", "a,b", "--start-timeout", "3")
    assert "host b: " in pool.do(*up, code=69)
    assert pool.do("status") == "no pools\n"
    said = pool.do(*up, "--skip-bad-hosts")
    assert "host b: " in said
    assert said.endswith("p\n")
    pool.is_shown("away: b (")
    assert pool.do("up", "here", "-H", "localhost,b", *up[4:], "--skip-bad-hosts").endswith("here\n")
    pool.do("down", "here")
    cluster["b"].heal()
    pool.is_shown("ready: a,b")
    pool.do("down", "p")


def test_bound_workers(pool: Pool) -> None:
    script = "import os; print('mask', sorted(os.sched_getaffinity(0)))"
    everything = sorted(os.sched_getaffinity(0))
    job = pool.job("-np", 4, "--bind", "core", "python3", "-c", script)
    assert job.code() == 0, job.stderr
    masks = {line.partition("mask ")[2] for line in job.stdout.splitlines()}
    assert len(masks) == min(2, len(everything))
    # The pool's next job is not bound.
    job = pool.job("-np", 2, "python3", "-c", script)
    assert job.code() == 0, job.stderr
    assert {line.partition("mask ")[2] for line in job.stdout.splitlines()} == {str(everything)}
