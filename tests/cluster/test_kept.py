"""Commits in the memory of hosts: hosts are lost with their workers, and others continue from the copies."""

import re
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cluster.elastic_jobs import LIMIT
from tests.cluster.jobs import LIGHT, PROGRAMS, Job
from tests.testhosts.hosts import TestHosts, wait_until


def is_safe(cluster: TestHosts, host: str, number: int) -> bool:
    """Return True if the host knows of a version of this round with all of its copies."""
    pins = cluster[host].run(["sh", "-c", "cat /dev/shm/*.kept/pins"]).stdout.splitlines()
    # A second version, or a hold, means that copies are on their way.
    return len(pins) == 2 and pins[0] == "0" and pins[1].startswith(f"{number} ")


class Start(NamedTuple):
    """What a worker printed at its start."""

    round: int
    rank: int
    host: str
    step: int
    word: str


def starts(job: Job, number: int) -> list[Start]:
    """Return the starts of a round by rank, once there are two."""
    lines = re.findall(r"round (\d+) rank (\d+) host (\w+) starts at step (\d+): (\w+)", job.stdout)
    all_starts = [Start(int(line[0]), int(line[1]), line[2], int(line[3]), line[4]) for line in lines]
    of_round = sorted(start for start in all_starts if start.round == number)
    return of_round if len(of_round) == 2 else []


@pytest.mark.long
def test_ranks_of_lost_hosts_continue_from_copies(cluster: TestHosts, tmp_path: Path) -> None:
    end = Path("/var/tmp") / f"end-{tmp_path.name}-{id(tmp_path)}"
    options = ("-H", "a:1,b:1,c:1,d:1", "--min-np", 2, "--max-np", 2, "--spares", 2, "--lease", 5)
    command = (sys.executable, PROGRAMS / "keep_steps.py", end)
    job = Job(cluster, [*options, *command], {"PYTHONPATH": str(LIGHT)})
    seen: list[list[Start]] = []
    try:
        for number in range(3):
            seen.append(wait_until(partial(starts, job, number), f"round {number}", LIMIT))
            if number < 2:
                first, second = seen[-1]
                wait_until(partial(is_safe, cluster, second.host, number), f"copies of round {number}", LIMIT)
                cluster[first.host].kill()
    except TimeoutError as late:
        raise AssertionError(f"{late}\n{job.stdout[-2000:]}\n{job.stderr[-2000:]}") from None
    finally:
        end.touch()
        try:
            assert job.code(LIMIT) == 0, job.stdout + job.stderr
        finally:
            end.unlink()
    assert {start.word for round_starts in seen for start in round_starts} == {"right"}
    steps = [{start.step for start in round_starts} for round_starts in seen]
    assert [len(both) for both in steps] == [1, 1, 1], steps
    assert 0 == max(steps[0]) < max(steps[1]) < max(steps[2])
    # Ranks change their hosts with the loss: at least one state came over the network for a new host.
    assert {start.host for start in seen[0]} != {start.host for start in seen[2]}
    for host in {start.host for start in seen[2]}:
        assert cluster[host].run(["sh", "-c", "ls /dev/shm"]).stdout == ""
