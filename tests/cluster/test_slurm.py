"""A real Slurm: its allocation, and its srun in place of ssh."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.jobs import HVLAUNCH
from tests.cluster.slurm_site import MUNGED, SLURMCTLD, SlurmSite
from tests.testhosts.hosts import wait_until

pytestmark = [
    pytest.mark.skipif(
        not all(Path(one).exists() for one in (SLURMCTLD, MUNGED)), reason="no Slurm, or no munge"
    ),
    pytest.mark.xdist_group("slurm"),
]
SRUN = [*HVLAUNCH, "--srun"]
WHO = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK on $SLURMD_NODENAME is $HVLAUNCH_HOST"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmSite]:
    with SlurmSite(tmp_path_factory.mktemp("slurm")) as site:
        yield site


def said(job: "subprocess.CompletedProcess[str]") -> list[str]:
    assert job.returncode == 0, job.stderr
    return sorted(re.findall(r"^\[\d+\]<stdout>: (.*)$", job.stdout, re.MULTILINE))


def marked(mark: str) -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if mark in (one.info["cmdline"] or ())]


def test_the_workers_are_the_tasks_of_the_allocation(slurm: SlurmSite) -> None:
    job = slurm.in_job(["-N2", "-n4"], [*SRUN, "sh", "-c", WHO])
    assert said(job) == [
        f"{rank} of 4, {rank % 2} on n{1 + rank // 2} is n{1 + rank // 2}" for rank in range(4)
    ]
    assert re.search(r"^hvlaunch: hosts of Slurm job \d+: n\[1-2\]$", job.stderr, re.MULTILINE)


def test_uneven_hosts(slurm: SlurmSite) -> None:
    job = slurm.in_job(["-N2", "-n4"], [*SRUN, "-H", "n1:1,n2:2", "sh", "-c", WHO])
    assert said(job) == ["0 of 3, 0 on n1 is n1", "1 of 3, 0 on n2 is n2", "2 of 3, 1 on n2 is n2"]
    assert "Slurm job" not in job.stderr


def test_the_allocation_is_named_without_srun_too(slurm: SlurmSite) -> None:
    job = slurm.in_job(["-N2", "-n4"], [*HVLAUNCH, "--dry-run", "true"])
    assert job.returncode == 0, job.stderr
    assert "n1" in job.stdout
    assert "n2" in job.stdout
    alone = slurm.in_job(
        ["-N2", "-n4"], [*HVLAUNCH, "--no-scheduler", "-np", 2, "sh", "-c", "echo $HVLAUNCH_HOST"]
    )
    assert said(alone) == ["localhost", "localhost"]


def test_the_first_failure_and_its_code(slurm: SlurmSite) -> None:
    mark = f"mark-{id(slurm)}"
    script = "test $RANK = 3 && exit 7; exec sleep 3600"
    job = slurm.in_job(["-N2", "-n4"], [*SRUN, "sh", "-c", script, mark])
    assert job.returncode == 7, job.stderr
    assert "rank 3 of 4 on host n2 failed first" in job.stderr
    assert not marked(mark)


def test_an_interrupt_leaves_nothing(slurm: SlurmSite) -> None:
    mark = f"mark-{id(test_an_interrupt_leaves_nothing)}"
    program = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(3600)", mark]
    line = ["salloc", "--quiet", "-N2", "-n2", *SRUN, *program]
    with subprocess.Popen(
        line, env=slurm.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        assert "ready" in job.stdout.readline()
        assert "ready" in job.stdout.readline()
        (hvlaunch,) = [one for one in psutil.Process(job.pid).children() if "--srun" in one.cmdline()]
        hvlaunch.send_signal(signal.SIGINT)
        _, stderr = job.communicate(timeout=100)
    assert job.returncode == 130, stderr
    wait_until(lambda: not marked(mark), "nothing is left", 60)


def test_outside_of_a_slurm_job_is_an_error(slurm: SlurmSite) -> None:
    job = slurm.run([*SRUN, "true"])
    assert (job.returncode, job.stdout) == (2, "")
    assert job.stderr == (
        "hvlaunch: --srun works only inside a job of Slurm, and SLURM_JOB_ID is not set; try: salloc or sbatch first\n"
    )
