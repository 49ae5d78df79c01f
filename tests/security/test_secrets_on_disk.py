"""Secrets of a job on disk: a successor needs them, and they do not outlive the job."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hvlaunch.errors import EXIT_HOSTS
from hvlaunch.gloo.controller import _past_and_keys, run_successor
from hvlaunch.outside import KnownJob, known_jobs, prune
from tests.testhosts.places import wait_until
from tests.unit.cli.job_site import DEADLINE, Site

HVLAUNCH = [sys.executable, "-m", "hvlaunch"]
SECRET = "hunter2-7f3a"
LEASE = 4.0
GONE = LEASE + 61.0
"""Seconds without a driver after which no agent can be there."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "state")
    yield site
    site.kill_jobs()


def begin(site: Site, *words: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*HVLAUNCH, "--lease", f"{LEASE:g}", "-x", f"TOKEN={SECRET}", *words],
        env=site.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def killed(site: Site) -> KnownJob:
    """A job without a minder, whose driver was killed while its worker ran."""
    with begin(site, "--detach-on-hangup", "sh", "-c", "echo ready; exec sleep 600") as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline().endswith(b"ready\n")
        driver.kill()
    [job] = known_jobs(site.root)
    assert job.result is None
    assert not job.has_driver
    return job


def places(job: KnownJob) -> set[str]:
    """Return the files with the secret or with a key of the job."""
    return {
        path.name
        for path in job.directory.iterdir()
        if path.is_file() and (SECRET.encode() in (data := path.read_bytes()) or b"PRIVATE KEY" in data)
    }


def _is_minder(process: psutil.Process, job: KnownJob) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return str(job.directory) in words and "run_minder" in " ".join(words)


def renewed(job: KnownJob) -> float:
    return (job.directory / "keys.json").stat().st_mtime


def test_a_job_that_has_ended_leaves_no_secret(site: Site) -> None:
    started = begin(site, "--detach", "sh", "-c", "exit 3")
    started.communicate(timeout=DEADLINE)
    wait_until(lambda: known_jobs(site.root)[0].result is not None, "the job has ended")
    wait_until(lambda: not known_jobs(site.root)[0].has_driver, "its driver has ended")
    [job] = known_jobs(site.root)
    assert (job.directory / "journal").exists()
    assert places(job) == set()


def test_a_job_has_its_secrets_in_one_private_file_for_a_successor(site: Site) -> None:
    job = killed(site)
    assert places(job) == {"keys.json"}
    assert stat.S_IMODE((job.directory / "keys.json").stat().st_mode) == 0o600
    past, _ = _past_and_keys(job.directory)
    assert past.begin.spec.env["TOKEN"] == SECRET


def code_of_successor(job: KnownJob, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["", str(job.directory)])
    with pytest.raises(SystemExit) as end:
        run_successor()
    return end.value.code


def test_a_dead_job_loses_its_secrets(
    site: Site, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = killed(site)
    prune(site.root, renewed(job) + GONE - 2)
    assert places(job) == {"keys.json"}
    prune(site.root, renewed(job) + GONE)
    assert places(job) == set()
    assert code_of_successor(job, monkeypatch) == EXIT_HOSTS
    assert "the job's keys were removed" in capfd.readouterr().err
    [known] = known_jobs(site.root)
    assert known.result is None


def test_any_word_about_jobs_removes_the_secrets_of_a_dead_job(site: Site) -> None:
    job = killed(site)
    past = time.time() - GONE
    os.utime(job.directory / "keys.json", (past, past))
    assert site.do("jobs") == 0
    assert places(job) == set()


def test_a_job_that_another_machine_may_run_keeps_its_secrets(site: Site) -> None:
    job = killed(site)
    about = job.directory / "about.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "machine": "another"}))
    prune(site.root, renewed(job) + GONE)
    assert places(job) == {"keys.json"}


def test_a_job_with_a_minder_keeps_its_secrets_and_is_taken_over(site: Site) -> None:
    """A minder that was stopped starts another driver when it goes on."""
    begin(site, "--detach", "sh", "-c", "exec sleep 600").communicate(timeout=DEADLINE)
    [job] = known_jobs(site.root)
    [minder] = [process for process in psutil.process_iter() if _is_minder(process, job)]
    minder.suspend()
    try:
        os.kill(job.about["pid"], signal.SIGKILL)
        wait_until(lambda: not known_jobs(site.root)[0].has_driver, "the driver is gone")
        prune(site.root, renewed(job) + GONE)
        assert places(job) == {"keys.json"}
    finally:
        minder.resume()
    wait_until(lambda: known_jobs(site.root)[0].about["pid"] != job.about["pid"], "another driver is there")


def test_a_living_driver_renews_the_time_of_the_keys(site: Site) -> None:
    begin(site, "--detach", "sh", "-c", "exec sleep 600").communicate(timeout=DEADLINE)
    [job] = known_jobs(site.root)
    os.utime(job.directory / "keys.json", (1.0, 1.0))
    wait_until(lambda: renewed(job) > time.time() - 60, "the driver renews it")
    # Even without: a job with a driver is not dead.
    os.utime(job.directory / "keys.json", (1.0, 1.0))
    prune(site.root)
    assert places(job) == {"keys.json"}


def test_secrets_beside_a_result_are_removed_by_the_next_look(
    site: Site,
) -> None:
    job = killed(site)
    (job.directory / "result.json").write_text('{"exit_code": 3}')
    prune(site.root)
    assert places(job) == set()


def test_a_refused_successor_removes_what_no_other_could_use(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = killed(site)
    (job.directory / "journal").write_bytes(
        (job.directory / "journal").read_bytes()[:-40] + bytes(range(40)) * 2
    )
    assert code_of_successor(job, monkeypatch) == EXIT_HOSTS
    assert places(job) == set()
