"""The driver is killed: another goes on with the job, and no worker is restarted, no line lost or doubled."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvlaunch.console.notes import UnfinishedLines
from hvlaunch.console.output_store import items, segment_path, segments
from hvlaunch.driver.job_record import UNFINISHED
from tests.cluster.jobs import Job
from tests.cluster.test_sessions import LIMIT, LINES
from tests.testhosts.hosts import TestHosts, wait_until

PYTHON = [sys.executable, "-c", "from hvlaunch.gloo.controller import run_successor; run_successor()"]
LINE = re.compile(r"line (\d+) (\d+) ")
GO = "/tmp/workers-may-end"


class Succession:
    """A job, and the drivers that take it over from each other."""

    def __init__(self, hosts: TestHosts, state: Path, *options: object, command: list[Any]) -> None:
        self._hosts = hosts
        self._env = {"XDG_STATE_HOME": str(state)}
        fixed = ["-H", "a:2,b:2,c:2,d:2", "--grace", 1, "--reconnect-timeout", 20, *options]
        self.first = Job(hosts, [*fixed, *command], env=self._env)
        self._jobs = state / "hvlaunch" / "jobs"
        self.process: subprocess.Popen[bytes] = self.first.process

    @property
    def directory(self) -> Path:
        wait_until(
            lambda: self._jobs.is_dir() and any(map(_is_job, self._jobs.iterdir())), "its directory", LIMIT
        )
        return next(filter(_is_job, self._jobs.iterdir()))

    @property
    def driver(self) -> int:
        """The pid of the one that there is."""
        pid: int = json.loads((self.directory / "about.json").read_text())["pid"]
        return pid

    @property
    def stored(self) -> str:
        """What the successors have stored: the output of one rank after the other, and messages."""
        texts: dict[tuple[int, str], bytes] = {}
        for number in segments(self.directory):
            with segment_path(self.directory, number).open("rb") as file:
                for item, _ in items(file.fileno()):
                    if item.kind in ("stdout", "stderr", "said", "shown"):
                        who = -1 if item.rank is None else item.rank, item.kind
                        texts[who] = texts.get(who, b"") + item.data
        return b"\n".join(texts.values()).decode()

    @property
    def output(self) -> str:
        return self.first.stdout + self.stored

    def kill(self) -> None:
        """The driver that there is."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(LIMIT)

    def succeed(self) -> None:
        """Another one comes."""
        self.process = self._hosts.driver.popen(
            [*PYTHON, str(self.directory)],
            env={**self._hosts.driver.env, **self._env},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def code(self) -> int:
        return self.process.wait(LIMIT)


def _is_job(path: Path) -> bool:
    return not path.name.startswith(".")


def is_whole(text: str, lines: int) -> None:
    """All lines of all ranks, each once and in order."""
    found: dict[int, list[int]] = {rank: [] for rank in range(8)}
    for rank, number in LINE.findall(text):
        found[int(rank)].append(int(number))
    wrong = {
        rank: ([number for number in range(lines) if numbers.count(number) != 1], numbers == sorted(numbers))
        for rank, numbers in found.items()
        if numbers != list(range(lines))
    }
    assert not wrong


def test_the_minder_of_a_detached_job_starts_a_successor(cluster: TestHosts, tmp_path: Path) -> None:
    job = Succession(cluster, tmp_path, "--detach", command=[sys.executable, "-c", LINES, 200, 0.05, 0])
    assert job.first.process.wait(LIMIT) == 0
    wait_until(lambda: "line 2 20 " in job.stored, "the workers print", LIMIT)
    pid = job.driver
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: job.driver != pid, "another driver", LIMIT)
    wait_until((job.directory / "result.json").exists, "the end", LIMIT)
    is_whole(job.stored, 200)
    assert json.loads((job.directory / "result.json").read_text())["exit_code"] == 0


@pytest.mark.parametrize("options", [(), ("--min-np", 8)], ids=["static", "elastic"])
def test_a_driver_is_killed_and_another_goes_on(
    cluster: TestHosts, tmp_path: Path, options: tuple[object, ...]
) -> None:
    command = [sys.executable, "-c", LINES, 200, 0.05, 0]
    kept = tmp_path / "kept"
    job = Succession(cluster, tmp_path, *options, "--output-filename", kept, command=command)
    job.first.saw("line 2 20 ", 1)
    job.kill()
    job.succeed()
    assert job.code() == 0, job.process.stderr.read()  # type: ignore[union-attr]
    is_whole(job.output, 200)
    [folder] = (path for path in kept.iterdir() if not path.is_symlink())
    is_whole("".join(path.read_text() for path in folder.rglob("stdout")), 200)
    assert "restart" not in job.output
    assert json.loads((job.directory / "result.json").read_text())["exit_code"] == 0


def test_the_exit_code_is_that_of_the_first_failing_worker(cluster: TestHosts, tmp_path: Path) -> None:
    """And the line is whole that had only begun when the driver was killed."""
    script = (
        'import os, sys, time; rank = os.environ["RANK"]; print("up", flush=True); print("begun", rank, end="", flush=True);'
        f'[time.sleep(0.05) for _ in iter(lambda: os.path.exists("{GO}"), True)];'
        'print(" and ended") if rank == "0" else sys.exit(7 * (rank == "3"))'
    )
    job = Succession(cluster, tmp_path, command=[sys.executable, "-c", script])
    job.first.saw("<stdout>: up", 8)
    unfinished = UnfinishedLines(job.directory / UNFINISHED)
    wait_until(lambda: len(unfinished.read()) == 8, "the unfinished lines", LIMIT)
    job.kill()
    # All workers end while there is no driver, so rank 3 stops no other.
    for host in cluster:
        host.run(["touch", GO], check=True)
    job.succeed()
    assert job.code() == 7
    for host in cluster:
        host.run(["rm", GO], check=True)
    assert "begun 0 and ended\n" in job.stored
    assert "begun" not in job.first.stdout
    assert "rank 3 of 8 on host b failed first" in job.stored


def test_only_one_of_two_successors_drives(cluster: TestHosts, tmp_path: Path) -> None:
    job = Succession(cluster, tmp_path, command=[sys.executable, "-c", LINES, 200, 0.02, 0])
    job.first.saw("line 2 20 ", 1)
    job.kill()
    job.succeed()
    first = job.process
    job.succeed()
    ends = {one.wait(LIMIT): one.stderr.read().decode() for one in (first, job.process)}  # type: ignore[union-attr]
    assert ends.keys() == {0, 2}
    assert "the job's driver lives" in ends[2]
    is_whole(job.output, 200)


def test_one_killed_after_another_at_random_moments(cluster: TestHosts, tmp_path: Path) -> None:
    chance = random.Random(int(os.environ.get("SEED", "1")))
    command = [sys.executable, "-c", LINES, 300, 0.05, 0]
    job = Succession(cluster, tmp_path, command=command)
    job.first.saw("line 2 20 ", 1)
    for _ in range(3):
        job.kill()
        job.succeed()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(chance.uniform(0.0, 3.0))
    assert job.code() == 0
    is_whole(job.output, 300)
