"""A slow host in a job of torch and Gloo: named with its reason, and moved; moves of hosts under load."""

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.cgroups import Group, outside_pid
from tests.cluster.jobs import HVLAUNCH, PROGRAMS, Job
from tests.testhosts.hosts import TestHosts, wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500), pytest.mark.xdist_group("torch slow")]

LIMIT = 300.0
LIMITS: Mapping[str, int] = {"cpu.cfs_period_us": 100_000, "cpu.cfs_quota_us": 20_000}
MOVES = 20
MOST_PAUSE = 1.0


class Training(Job):
    """An elastic job of elastic_steps.py; `directory` is one that all hosts see."""

    def __init__(self, hosts: TestHosts, *options: object) -> None:
        self.hosts = hosts
        self.directory = Path(tempfile.mkdtemp(prefix="hvlaunch-slow-", dir="/var/tmp"))
        arguments = [
            *(
                "--grace",
                30,
                "--events",
                self.directory / "events",
                "--report",
                self.directory / "report.json",
            ),
            *("-x", "OMP_NUM_THREADS=1", *options),
            *(sys.executable, PROGRAMS / "elastic_steps.py", self.directory),
        ]
        super().__init__(hosts, arguments)

    def finish(self) -> dict[str, Any]:
        """Let the training end well; return what it has counted."""
        (self.directory / "end").touch()
        assert self.code(LIMIT) == 0, self.stdout[-2000:] + self.stderr
        (done,) = re.findall(r"done (\{.*\})", self.stdout)
        report: dict[str, Any] = json.loads(done)
        return report

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.directory)

    def command(self, *words: str) -> tuple[int, str]:
        done = self.hosts.driver.run([*HVLAUNCH, *words], env=self.hosts.driver.env, timeout=LIMIT)
        return done.returncode, done.stdout + done.stderr

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.directory / "events").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["type"] == kind]

    @property
    def steps(self) -> list[tuple[int, float]]:
        """Return the steps that rank 0 has printed, with their times."""
        return [(int(step), float(at)) for step, at in re.findall(r"step (\d+) at ([\d.]+)", self.stdout)]


@pytest.fixture
def hosts() -> Iterator[TestHosts]:
    with TestHosts(["a", "b", "c", "d"]) as hosts:
        yield hosts


def test_a_host_with_a_cpu_limit_is_named_and_replaced(hosts: TestHosts) -> None:
    with ExitStack() as stack:
        group = stack.enter_context(Group("cpu"))
        for name, value in LIMITS.items():
            group.set(name, value)
        listener = hosts["b"].run(["cat", "/run/sshd/sshd.pid"], check=True).stdout
        group.set("cgroup.procs", outside_pid(hosts["b"].pid, int(listener)))
        job = Training(hosts, "-H", "a:1,b:1,c:1,d:1", "--min-np", 3, "--max-np", 3, "--evict-slow", 1.3)
        stack.callback(job.close)
        job.saw("step 3 at", timeout=LIMIT)
        shown = stack.enter_context((job.directory / "top").open("w+"))
        words = [*HVLAUNCH, "top", "--plain"]
        top = hosts.driver.popen(words, env=hosts.driver.env, stdout=shown, stderr=shown)
        stack.callback(top.kill)
        job.saw("hvlaunch: host b is free after", timeout=LIMIT)
        report = job.finish()
        assert report["weight"] == 3 * report["step"]
        (slow,) = job.events("host_slow")
        assert (slow["host"], slow["kind"]) == ("b", "cpu")
        assert slow["factor"] >= 1.3
        assert slow["evidence"].startswith("the CPU limit of its cgroup stops its workers for ")
        (beginning,) = job.events("move_beginning")
        assert beginning["reason"] == f"--evict-slow: {slow['evidence']}"
        assert job.events("round_formed")[-1]["hosts"] == ["a", "c", "d"]
        assert not job.events("round_broken") + job.events("host_excluded")
        assert json.loads((job.directory / "report.json").read_text())["slow_hosts"] == {
            "b": slow["evidence"]
        }
        remembered = job.command("hosts")[1]
        assert re.search(r"^b .*slow", remembered, re.MULTILINE), remembered
        top.wait(LIMIT)
        shown.seek(0)
        assert "slow: the CPU limit of its cgroup" in shown.read()


def test_hosts_are_moved_again_and_again_and_no_step_is_lost(hosts: TestHosts) -> None:
    """Each move frees a host, by --hostfile rounds of two of three hosts that come back by their removal from the list."""
    pool = Path(tempfile.mkdtemp(prefix="hvlaunch-pool-", dir="/var/tmp")) / "pool"
    pool.write_text("a:1\nb:1\nc:1\n")
    script = ("--host-discovery-script", f"cat {pool}", "--discovery-interval", 0.2)
    job = Training(hosts, *script, "--min-np", 2, "--max-np", 2)
    pauses: list[float] = []
    try:
        job.saw("step 3 at", timeout=LIMIT)
        inside, spare = ["a", "b"], "c"
        for _ in range(MOVES):
            host = inside.pop(0)
            code, text = job.command("move", host, spare)
            assert code == 0, text
            assert text.startswith(f"host {host} is free after "), text
            # A host that leaves the list and comes back is used again.
            pool.write_text("".join(f"{name}:1\n" for name in (*inside, spare)))
            wait_until(
                lambda: len(job.events("hosts_discovered")[-1]["hosts"]) == 2, "the pool is smaller", LIMIT
            )
            pool.write_text("".join(f"{name}:1\n" for name in (*inside, spare, host)))
            wait_until(
                lambda: len(job.events("hosts_discovered")[-1]["hosts"]) == 3, "the pool is back", LIMIT
            )
            inside, spare = [*inside, spare], host
        steps = job.steps
        report = job.finish()
    finally:
        job.close()
        shutil.rmtree(pool.parent)
    numbers = [step for step, _ in steps]
    assert numbers == [*range(numbers[0], numbers[0] + len(numbers))], "a step is lost or repeated"
    assert report["weight"] == 2 * report["step"]
    usual = sorted(after - before for (_, before), (_, after) in pairwise(steps))
    pauses = usual[-MOVES:]
    sys.stdout.write(f"median step {usual[len(usual) // 2]:.3f} s; the longest {MOVES}: {pauses}\n")
    assert pauses[-1] <= MOST_PAUSE + usual[len(usual) // 2]
