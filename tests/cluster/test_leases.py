"""Leases of GPUs on real hosts, by two users: NVML is a stand-in that reads files, the locks are real."""

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.lease_schedules import lease_site, play_all
from tests.cluster.gpus import add_gpus
from tests.cluster.jobs import HVLAUNCH, Job
from tests.testhosts.hosts import TestHosts, wait_until

HOSTS = ["a", "b"]
LEASE = ("--lease-gpus", "--lease-directory", "/tmp/leases")
SHOW = "import os, sys, time; print('at', time.time(), os.environ['CUDA_VISIBLE_DEVICES'], flush=True)"
STAY = f"{SHOW}; time.sleep(600)"


@pytest.fixture
def lab(new_hosts: Callable[..., TestHosts]) -> Iterator[TestHosts]:
    """Two hosts with four GPUs each, for users ann and bob."""
    hosts = new_hosts(HOSTS, users=["ann", "bob"])
    add_gpus(hosts)
    yield hosts


LATEST = 10.0
"""Seconds from one job's end to the next one's start on a machine with other work; 1 s on a quiet one."""


def job(lab: TestHosts, user: str, *words: object) -> Job:
    return Job(lab, [*LEASE, "--ssh-user", user, "-H", ",".join(HOSTS), *words])


def table(lab: TestHosts, *words: str) -> str:
    command = [*HVLAUNCH, "hosts", "-H", ",".join(HOSTS), "--ssh-user", "bob", *LEASE[1:], *words]
    return str(lab.driver.run(command, check=True).stdout)


def times(job: Job) -> list[float]:
    return [float(text) for text in re.findall(r"at (\S+) ", job.stdout)]


def test_two_users_share_gpus_by_whole_jobs_in_turn(lab: TestHosts) -> None:
    first = job(lab, "ann", "-np", 6, "--job-name", "big", "python3", "-c", STAY).saw("at ", 6)
    assert "leases 6 GPUs: 4 on a, 2 on b" in first.stderr
    assert first.stdout.count("GPU-a-0,GPU-a-1,GPU-a-2,GPU-a-3") == 4
    assert first.stdout.count("GPU-b-0,GPU-b-1\n") == 2
    # A program without a lease.
    lab["b"].run(["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $! > /run/gpus/pid-3"], check=True)
    refused = job(lab, "bob", "-np", 2, "true")
    assert refused.code() == 75
    assert "2 GPUs were asked for; free: 1 of 8; " in refused.stderr
    assert "6 GPUs on a,b: ann, job big for " in refused.stderr
    assert "1 GPU on b: outside hvlaunch, sleep of root" in refused.stderr
    too_many = job(lab, "bob", "--wait", "-np", 9, "true")
    assert too_many.code() == 2
    shown = table(lab)
    assert len(re.findall(r"^[ab] +\d +ann +big +", shown, re.MULTILINE)) == 6
    assert re.search(r"^b +3 +outside hvlaunch +sleep \(pid \d+\) of root", shown, re.MULTILINE)
    assert "free: 1 of 8\n" in shown
    second = job(lab, "bob", "--wait", "-np", 4, "--gpus-per-worker", 2, "python3", "-c", SHOW)
    second.saw("waits for 8 GPUs; free: 1 of 8")
    wait_until(lambda: "waits for" in table(lab), "its ticket", 20.0)
    states = [json.loads(line) for line in table(lab, "--json").splitlines()]
    assert [len(state["tickets"]) for state in states] == [1, 1]
    # Killed, so that the driver can tell nobody: agents and workers end by themselves.
    lab["b"].run(["sh", "-c", "kill $(cat /run/gpus/pid-3); rm /run/gpus/pid-3"], check=True)
    first.send(signal.SIGKILL).process.wait()
    assert second.code(60.0) == 0, second.stderr
    # All of them: with fewer it would depend on which the first job gives back first.
    assert "leases 8 GPUs: 4 on a, 4 on b" in second.stderr
    assert {line.split(" ")[-1] for line in second.stdout.splitlines()} == {
        "GPU-a-0,GPU-a-1",
        "GPU-a-2,GPU-a-3",
        "GPU-b-0,GPU-b-1",
        "GPU-b-2,GPU-b-3",
    }
    assert "free: 8 of 8\n" in table(lab)


@pytest.mark.long
def test_a_waiting_job_starts_when_the_last_gpu_is_free(lab: TestHosts) -> None:
    # The first job works for as long as the second one takes to queue up.
    work = f"{SHOW}; time.sleep(6); print('end', time.time(), '')"
    first = job(lab, "ann", "-np", 8, "python3", "-c", work)
    first.saw("at ", 8)
    second = job(lab, "bob", "--wait", "-np", 8, "python3", "-c", SHOW).saw("waits for 8 GPUs")
    assert first.code() == 0
    assert second.code() == 0, second.stderr
    ended = max(float(text) for text in re.findall(r"end (\S+) ", first.stdout))
    assert max(times(second)) - ended < LATEST


@pytest.mark.long
@pytest.mark.timeout(900)
def test_random_schedules_on_eight_hosts() -> None:
    """Jobs of four users start, end, lose their driver or agent, their link, or a host; at the end every GPU is free again."""
    with lease_site() as site:
        played = play_all(site, iter(range(60)), lambda: False)
    assert [problem for schedule in played for problem in schedule.problems] == []
    jobs = [job for schedule in played for job in schedule.jobs]
    assert len(played) == 60
    assert sum(job.is_whole for job in jobs) > len(jobs) / 2
    assert sum(job.waits is not None for job in jobs) > 30
    assert {*site.counts} == {"drivers killed", "agents killed", "cuts", "power losses"}


def test_hosts_without_the_library_say_so(cluster: TestHosts, tmp_path: Path) -> None:
    refused = Job(cluster, [*LEASE, "-np", 2, "-H", "a,b", "true"])
    assert refused.code() == 69, refused.stderr
    assert "no GPUs: libnvidia-ml.so.1" in refused.stderr


@pytest.mark.long
def test_job_with_idle_gpus_is_warned_and_ends(lab: TestHosts) -> None:
    # GPU 1 works until its file is removed.
    lab["a"].run(["sh", "-c", "echo 90 > /run/gpus/busy-1"], check=True)
    idle = job(lab, "ann", "-np", 3, "--quiet", "--max-idle", "4s", "python3", "-c", STAY).saw("at ", 3)
    busy = job(lab, "bob", "-np", 2, "--max-idle", "600s", "python3", "-c", STAY).saw("at ", 2)
    wait_until(
        lambda: re.search(r"idle for more than 2\.0 s: .*b \d of bob", table(lab, "--max-idle", "2s")),
        "it is named",
    )
    assert idle.process.poll() is None
    lab["a"].run(["rm", "/run/gpus/busy-1"], check=True)
    assert idle.code() == 143
    assert re.search(
        r"hvlaunch: the job is stopped: its 3 GPUs have done nothing for \d.* s \(--max-idle\)", idle.stderr
    )
    assert "warning: its 3 GPUs" not in idle.stderr  # --quiet
    assert busy.interrupt().code() == 130
