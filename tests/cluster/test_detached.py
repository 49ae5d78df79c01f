"""Jobs that have left their terminal, on real hosts: who looks on, and what becomes of them without a driver."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil
import pytest

from hvlaunch.outside import ABOUT, known_jobs
from tests.cluster.incidents import INCIDENTS, Incident, verdicts
from tests.cluster.jobs import HVLAUNCH, Job
from tests.cluster.test_sessions import LINES
from tests.cluster.test_successor import is_whole
from tests.testhosts.hosts import TestHosts, wait_until

LIMIT = 90.0
LEASE, GRACE, SLACK = 6.0, 1.0, 4.0
HOSTS = ["-H", "a:2,b:2,c:2,d:2", "--grace", "1", "--lease", f"{LEASE:g}"]


class User:
    """Somebody at the driver's machine, with jobs of their own."""

    def __init__(self, hosts: TestHosts, state: Path) -> None:
        self.hosts = hosts
        self.jobs = state / "hvlaunch" / "jobs"
        self.env = {**hosts.driver.env, "XDG_STATE_HOME": str(state)}

    def do(self, *words: object) -> "subprocess.CompletedProcess[str]":
        return self.hosts.driver.run([*HVLAUNCH, *map(str, words)], env=self.env, timeout=LIMIT)

    def detach(self, lines: int) -> str:
        """The id of a job that prints so many lines."""
        done = self.do("--detach", *HOSTS, sys.executable, "-c", LINES, lines, 0.05, 0)
        assert done.returncode == 0, done.stderr
        return str(done.stdout).strip()

    @property
    def directory(self) -> Path:
        """The newest job's."""
        return max(known_jobs(self.jobs), key=lambda job: float(job.about["began"])).directory

    @property
    def driver(self) -> int:
        """Its pid."""
        return int(json.loads((self.directory / ABOUT).read_text())["pid"])

    @property
    def has_workers(self) -> bool:
        return any(host.user_processes() for host in self.hosts)


@pytest.fixture
def user(cluster: TestHosts, tmp_path: Path) -> User:
    return User(cluster, tmp_path)


def test_output_of_a_detached_job_survives_killed_drivers(user: User) -> None:
    job = user.detach(200)
    for _ in range(2):
        killed = user.driver
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda killed=killed: user.driver != killed, "another driver takes it over", LIMIT)  # type: ignore[misc]
    done = user.do("wait", job)
    assert done.returncode == 0, done.stderr
    logs = user.do("logs", job)
    is_whole(logs.stdout, 200)
    assert "failed" not in logs.stderr


def test_without_driver_and_minder_nothing_is_left_after_the_lease_and_the_grace(user: User) -> None:
    user.detach(100_000)
    driver = user.driver
    # Its command line is the driver's until its own program begins.
    minders = wait_until(
        lambda: [
            child for child in psutil.Process(driver).children() if "minder" in " ".join(child.cmdline())
        ],
        "the minder",
    )
    minders[0].kill()
    os.kill(driver, signal.SIGKILL)
    began = time.monotonic()
    wait_until(lambda: not user.has_workers, "nothing is left", LIMIT)
    elapsed = time.monotonic() - began
    assert LEASE - SLACK / 2 < elapsed < LEASE + GRACE + SLACK


def test_attach_to_a_job_with_a_killed_driver_continues_it(user: User) -> None:
    """One in the foreground, whose agents wait 5 s for that."""
    script = [sys.executable, "-c", f"{LINES}sys.exit(5 * (rank == '3'))", 200, 0.05, 0]
    job = Job(user.hosts, [*HOSTS, *script], env={"XDG_STATE_HOME": user.env["XDG_STATE_HOME"]})
    job.saw("line 2 20 ")
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait(LIMIT)
    looking = user.do("attach")
    assert looking.returncode == 5, looking.stderr
    is_whole(job.stdout + looking.stdout, 200)
    assert "rank 3 of 8 on host b failed first" in looking.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
def test_each_notice_is_sent_once_whenever_drivers_are_killed(user: User, tmp_path: Path) -> None:
    sent = tmp_path / "sent"
    notify = ["--notify", f"cat >> {sent}; echo >> {sent}"]
    for number in range(50):
        # A second, so that the driver is killed before the job's end, at it, and after it.
        done = user.do("--detach", *notify, *HOSTS, "-np", 4, "sh", "-c", f"sleep 1; exit {number % 2}")
        assert done.returncode == 0, done.stderr
        # The moment is random: any is right.
        time.sleep(0.6 + Random(number).random())
        with suppress(ProcessLookupError):
            os.kill(user.driver, signal.SIGKILL)
        user.do("wait", done.stdout.strip())
        wait_until(lambda: len(events_of(sent)) > number, "the notice is sent", LIMIT)  # noqa: B023
    wait_until(
        lambda: not any(file.stat().st_size for file in user.jobs.with_name("notices").iterdir()),
        "all are sent",
        LIMIT,
    )
    assert events_of(sent) == ["done", "failed"] * 25


def events_of(sent: Path) -> list[str]:
    """The events of all notices, in the order in which the command got them."""
    return [json.loads(line)["event"] for line in sent.read_text().splitlines()] if sent.exists() else []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_assistant_gets_rank_host_and_reason_of_twenty_incidents(user: User) -> None:
    def start(incident: Incident, rank: int) -> object:
        return user.do("-H", "a:1,b:1,c:1", "--grace", 1, sys.executable, "-c", incident.program(rank))

    hosts = dict(enumerate("abc"))
    count = 0
    for name, verdict in verdicts(user.env, INCIDENTS, start):
        assert verdict.value["host"] == hosts[verdict.value["rank"]], name
        count += 1
    assert count == 20
