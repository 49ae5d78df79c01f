"""A toy of reinforcement learning on real hosts: 2 trainers with Gloo, and 3 generators over HTTP."""

import re
import sys

import pytest

from tests.cluster.heirs import Heir
from tests.cluster.jobs import HVLAUNCH, PROGRAMS, Job, pids
from tests.testhosts.hosts import TestHosts, wait_until

RL = f"{sys.executable} {PROGRAMS / 'toy_rl.py'}"
LIMIT = 60.0


def start(hosts: TestHosts, *options: str, steps: int = 100_000) -> Job:
    return Job(
        hosts,
        [
            *("--role", f"train=2@a,b: {RL} train {{role:gen:all:http}} {steps}"),
            *("--role", f"gen=3@b,c: {RL} gen {{own_port:http}}", "--role-policy", "gen=restart"),
            *("--grace", 3, "--hang-timeout", 0, "--job-name", "rl", *options),
        ],
    )


def newest(text: str, label: str) -> int:
    """Return the pid of the worker's newest line."""
    return int(re.findall(rf"\[{label}\].*pid (\d+)", text)[-1])


def steps_of(text: str, label: str) -> list[tuple[int, int]]:
    """Return pid and step of each line of a trainer."""
    lines = re.findall(rf"\[{label}\].*step (\d+) sum 6 pid (\d+)", text)
    return [(int(pid), int(step)) for step, pid in lines]


def logs(hosts: TestHosts) -> str:
    """Return the output that the job's drivers have kept."""
    done = hosts.driver.run([*HVLAUNCH, "logs", "rl"], env=hosts.driver.env, timeout=LIMIT)
    return str(done.stdout)


def kill(hosts: TestHosts, host: str, pid: int) -> None:
    hosts[host].run(["kill", "-9", str(pid)], check=True)


def test_roles_restart_apart_through_another_driver_and_end_together(cluster: TestHosts) -> None:
    job = start(cluster, "--role-policy", "train=restart-all").saw("step 3 sum 6", 2, LIMIT)
    trainers = [newest(job.stdout, "train:0"), newest(job.stdout, "train:1")]
    generators = [newest(job.stdout, f"gen:{rank}") for rank in range(3)]
    # A generator alone starts again.
    kill(cluster, "c", generators[2])
    job.saw("gen:2 (rank 4) on host c was killed by SIGKILL: it starts again", timeout=LIMIT)
    job.saw("[gen:2]<stdout>: serves", 2, LIMIT)
    before = steps_of(job.stdout, "train:1")[-1][1]
    wait_until(lambda: steps_of(job.stdout, "train:1")[-1][1] > before + 3, "the trainers continue", LIMIT)
    assert {pid for pid, _ in steps_of(job.stdout, "train:0")} == {trainers[0]}
    # The driver is killed while the trainers start again: the surviving one has its grace.
    heir = Heir(cluster, job.process)
    listed = cluster.driver.run([*HVLAUNCH, "jobs"], env=cluster.driver.env, timeout=60)
    assert "train:" in listed.stdout
    kill(cluster, "b", trainers[1])
    job.saw("train:1 (rank 1) on host b was killed by SIGKILL: all 2 workers of train start again")
    heir.kill()
    heir.succeed()

    def has_trained_again() -> bool:
        text = logs(cluster)
        trained = [{pid for pid, step in steps_of(text, f"train:{rank}") if step > 3} for rank in range(2)]
        return all(trained[rank] - {trainers[rank]} for rank in range(2))

    wait_until(has_trained_again, "both trainers train again", LIMIT)
    alive = pids(cluster)
    assert {*generators[:2]} <= alive["b"]
    assert newest(job.stdout, "gen:2") in alive["c"]
    stopped = cluster.driver.run([*HVLAUNCH, "stop", "rl"], env=cluster.driver.env, timeout=LIMIT)
    assert stopped.returncode == 0
    assert heir.process.wait(LIMIT) == 128 + 15


@pytest.mark.parametrize("is_killed", [True, False])
def test_the_end_of_a_trainer_is_that_of_the_generators(cluster: TestHosts, *, is_killed: bool) -> None:
    steps = 100_000 if is_killed else 4
    job = start(cluster, "--end-with-role", "train", steps=steps).saw("step 3 sum 6", 2, LIMIT)
    if is_killed:
        kill(cluster, "a", newest(job.stdout, "train:0"))
    assert job.code(LIMIT) == (137 if is_killed else 0)
    if is_killed:
        assert "train:0 (rank 0 of 5) on host a failed first" in job.stderr
    else:
        assert "the job ends: role train is done (--end-with-role)" in job.stderr
