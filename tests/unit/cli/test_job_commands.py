"""The commands for jobs that are there already: with real jobs on this machine, as a user types them."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hvlaunch.cli.jobs import job_table, listed, since
from hvlaunch.cli.jobs.output import described
from hvlaunch.cli.main import WORDS, main
from hvlaunch.cli.options import BadValue
from hvlaunch.cli.options.parser import JOB_WORDS
from hvlaunch.console.status import ago, size_words
from hvlaunch.errors import BadUsage
from hvlaunch.outside import KnownJob, known_jobs
from hvlaunch.outside.control import DriverGone
from tests.testhosts.places import wait_until
from tests.unit.cli.job_site import DEADLINE, Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "state")
    yield site
    site.close()


def test_a_job_from_its_start_to_its_end(site, capsys):
    job = site.start("--job-name", "base")
    site.do("jobs")
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["JOB", "NAME", "STATE", "WORKERS", "HOSTS", "BEGAN", "COMMAND"]
    assert line.split()[1:5] == ["base", "running", "2", "localhost"]
    site.do("jobs", "--json")
    record = json.loads(capsys.readouterr().out)
    assert [worker["rank"] for worker in record["state"]["workers"]] == [0, 1]
    site.do("signal", "USR1", "base")
    assert {job.stdout.readline()[-9:-1] for _ in range(2)} == {"got USR1"}
    assert site.do("stop") == 0
    assert capsys.readouterr().out == f"job {record['id']} has ended, exit code 143\n"
    assert job.wait(DEADLINE) == 143
    site.do("jobs")
    assert "exit code 143" in capsys.readouterr().out
    assert site.do("wait", "base") == 143
    site.do("forget", "base")
    site.do("jobs")
    assert capsys.readouterr().out == "no jobs\n"


def test_what_workers_are_doing_and_what_they_did_before_they_were_stopped(site, capsys):
    job = site.start("--job-name", "base")
    assert site.do("stacks", "--ranks", "1", "--json") == 0
    (one,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (one["rank"], one["is_child"]) == (1, False)
    assert site.do("stacks") == 0
    assert "ranks 0-1" in capsys.readouterr().out
    os.kill(one["pid"], signal.SIGKILL)
    assert job.wait(DEADLINE) == 137
    assert job.stderr is not None
    assert "Before they were stopped:\n    rank 0 in " in job.stderr.read()
    assert site.do("stacks", "base") == 0
    told = capsys.readouterr()
    assert told.out.startswith("rank 0: ")
    assert "has ended: its workers' stacks before they were stopped:" in told.err
    assert site.do("stacks", "base", "--ranks", "1") == 0
    assert capsys.readouterr().out == "no workers\n"


def test_metrics_are_printed_written_and_scraped(site, capsys, tmp_path):
    assert site.do("metrics") == 0
    assert capsys.readouterr().out == ""
    site.start("--job-name", "base")
    assert site.do("metrics") == 0
    printed = capsys.readouterr().out
    families = {one.name: one for one in text_string_to_metric_families(printed)}
    assert {
        one.value for one in families["hvlaunch_workers"].samples if one.labels["state"] == "working"
    } == {2}
    assert len(families["hvlaunch_worker_resident_memory_bytes"].samples) == 2
    assert {one.labels["job_name"] for family in families.values() for one in family.samples} == {"base"}
    path = tmp_path / "hvlaunch.prom"
    assert site.do("metrics", "base", "--textfile", str(path)) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert "hvlaunch_workers{" in path.read_text()
    assert list(tmp_path.glob(".hvlaunch*")) == []
    with pytest.raises(BadUsage, match="no such file"):
        site.do("metrics", "--textfile", str(tmp_path / "none" / "x.prom"))
    words = [sys.executable, "-m", "hvlaunch", "metrics", "--scrape"]
    with subprocess.Popen(words, env=site.environ, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url, token = (server.stdout.readline().strip() for _ in range(2))
        with urlopen(Request(url, headers={"Authorization": f"Bearer {token}"}), timeout=DEADLINE) as answer:
            assert b"hvlaunch_goodput_ratio{" in answer.read()
        with pytest.raises(HTTPError, match="401"):
            urlopen(Request(url, headers={"Authorization": "Bearer x"}), timeout=DEADLINE)
        assert site.do("stop", "base") == 0
        assert server.wait(DEADLINE) == 0


def test_a_file_of_metrics_is_kept_fresh_and_goes_with_the_command(site, tmp_path):
    path = tmp_path / "hvlaunch.prom"
    words = [sys.executable, "-m", "hvlaunch", "metrics", "--textfile", str(path), "--interval", "0.1"]
    command = subprocess.Popen(words, env=site.environ)
    wait_until(path.exists, "a first file")
    assert path.read_bytes() == b""
    site.start()
    wait_until(lambda: b"hvlaunch_workers{" in path.read_bytes(), "the new job")
    command.terminate()
    assert command.wait(DEADLINE) == 0
    assert not path.exists()


@pytest.mark.parametrize(
    "words", ["--interval 1", "--scrape --textfile x", "--bind ::1", "--scrape --no-tls"]
)
def test_ways_of_metrics_that_do_not_go_together(site, words):
    with pytest.raises(BadUsage):
        site.do("metrics", *words.split())


def test_a_job_that_ends_well_leaves_nothing(site, capsys):
    command = [sys.executable, "-m", "hvlaunch", "--quiet", "-np", "2", "true"]
    subprocess.run(command, env=site.environ, check=True)
    assert list(site.root.iterdir()) == []


def test_stop_kills_at_once_if_it_is_told_to(site):
    job = site.start("--grace", "1000")
    site.do("stop", "--kill")
    assert job.wait(DEADLINE) == 143


def test_events_so_far_and_until_the_end(site, capsys):
    job = site.start("--job-name", "base")
    site.do("events")
    so_far = [json.loads(line)["type"] for line in capsys.readouterr().out.splitlines()]
    assert so_far[0] == "job_started"
    assert so_far.count("worker_started") == 2
    follower = subprocess.Popen(
        [sys.executable, "-m", "hvlaunch", "events", "-f"],
        env=site.environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert follower.stdout is not None
    assert json.loads(follower.stdout.readline())["type"] == "job_started"
    site.do("stop")
    rest = [json.loads(line) for line in follower.communicate(timeout=DEADLINE)[0].splitlines()]
    assert rest[-1]["type"] == "job_ended"
    assert rest[-1]["exit_code"] == 143
    assert follower.returncode == 0
    assert job.wait(DEADLINE) == 143
    with pytest.raises(BadUsage, match="has ended, and its events were not kept"):
        site.do("events", "base")


def test_a_driver_that_was_killed(site, capsys):
    job = site.start()
    job.kill()
    job.wait(DEADLINE)
    site.do("jobs")
    assert "driver killed" in capsys.readouterr().out
    (known,) = known_jobs(site.root)
    with pytest.raises(DriverGone, match="its driver was killed"):
        site.do("wait", known.id)
    with pytest.raises(BadUsage, match="has ended"):
        site.do("stop", known.id)
    site.do("forget", known.id)
    assert not known.directory.exists()


def test_wait_returns_what_the_job_did(site):
    site.start("--job-name", "base")
    waiter = subprocess.Popen([sys.executable, "-m", "hvlaunch", "wait"], env=site.environ)
    wait_until(lambda: _sleeps_between_looks(waiter.pid), "it waits")
    site.do("stop")
    assert waiter.wait(DEADLINE) == 143


def _sleeps_between_looks(pid: int) -> bool:
    """True if it was asleep at each of 20 moments: a process that still starts would have run at one of them."""
    for _ in range(20):
        time.sleep(0.01)
        if psutil.Process(pid).status() != psutil.STATUS_SLEEPING:
            return False
    return True


def test_a_job_that_runs_is_not_forgotten(site):
    site.start("--job-name", "base")
    with pytest.raises(BadUsage, match="runs; try: hvlaunch stop"):
        site.do("forget", "base")


def test_the_driver_of_a_stopped_process_does_not_answer(site, capsys, monkeypatch):
    monkeypatch.setattr("hvlaunch.outside.control._PATIENCE", 0.2)
    job = site.start()
    job.send_signal(signal.SIGSTOP)
    site.do("jobs")
    assert "no answer" in capsys.readouterr().out
    job.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["stop"], "no job runs here; try: hvlaunch jobs"),
        (["stop", "abcd"], "there is no job abcd; try: hvlaunch jobs"),
        (["forget"], "forget needs JOB; try: hvlaunch forget --help"),
        (["signal"], "signal needs SIGNAL; try: hvlaunch signal --help"),
        (
            ["stop", "--kil", "3f"],
            "unknown option '--kil', and options can't be cut short; try: hvlaunch stop --kill 3f, or hvlaunch stop --help",
        ),
        (
            ["logs", "--folow"],
            "unknown option '--folow'; try: hvlaunch logs --follow, or hvlaunch logs --help",
        ),
        (["jobs", "x"], "jobs takes no 'x'; try: hvlaunch jobs --help"),
        (["signal", "FOO"], "FOO is not a signal; try: hvlaunch signal USR1"),
    ],
)
def test_a_wrong_line_has_one_message_and_code_2(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(words) == 2
    assert capsys.readouterr().err == f"hvlaunch: {told}\n"


def test_exit_codes_of_what_the_driver_does_not_do(site, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", site.environ["XDG_STATE_HOME"])
    job = site.start("--job-name", "base")
    assert main(["signal", "NOSUCH"]) == 2
    job.kill()
    job.wait(DEADLINE)
    assert main(["wait", "base"]) == 69
    assert "its driver was killed" in capsys.readouterr().err


def test_the_start_of_a_line_knows_all_words():
    assert tuple(JOB_WORDS) == WORDS


@pytest.mark.parametrize("word", JOB_WORDS)
def test_each_has_help(word, capsys):
    assert main([word, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: hvlaunch {word} ")


def test_a_program_of_such_a_name_still_runs(tmp_path, capfd):
    program = tmp_path / "stop"
    program.write_text("#!/bin/sh\necho ran\n")
    program.chmod(0o755)
    assert main(["--quiet", "-np", "1", str(program)]) == 0
    assert "ran" in capfd.readouterr().out


def known(number, *, result=None, is_elastic=False, began=0.0):
    about = {"began": began + number, "is_elastic": is_elastic, "command": ["python", f"{number}.py"]}
    return KnownJob(f"{number:012}", Path("/nowhere"), about, result, has_driver=result is None)


def numbers(jobs):
    return [int(job.id) for job in jobs]


def test_the_short_list_has_running_jobs_first_and_the_newest_five_that_ended():
    ended, unborn = {"exit_code": 1, "has_run": True}, {"exit_code": 127, "has_run": False}
    results = {1: None, 9: None, 3: unborn, 10: unborn}
    jobs = [known(number, result=results.get(number, ended)) for number in range(1, 12)]
    assert numbers(listed(jobs)) == [9, 1, 11, 8, 7, 6, 5]


def test_a_result_of_an_older_version_counts_as_a_job_that_ran():
    assert numbers(listed([known(1, result={"exit_code": 1})])) == [1]


def test_times_are_short_and_only_elastic_jobs_have_a_round():
    state = {"phase": "running", "round": {"number": 0}, "workers": [1, 2], "hosts": []}
    static = job_table([(known(1), state), (known(2, result={"exit_code": 3}), None)], now=150.0)
    assert [line.split()[:3] for line in static.splitlines()] == [
        ["JOB", "NAME", "STATE"],
        ["000000000001", "-", "running"],
        ["000000000002", "-", "exit"],
    ]
    assert "ROUND" not in static
    assert static.count("2 min ago") == 2
    both = job_table([(known(1), state), (known(2, is_elastic=True), state)], now=150.0)
    assert [line.split()[3] for line in both.splitlines()] == ["ROUND", "-", "0"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (65_536, "65.5 kB"),
        (999_600, "1 MB"),
        (999_900_000, "1 GB"),
        (1 << 20, "1.05 MB"),
        (80e9, "80 GB"),
        (123.4e15, "123000 TB"),
    ],
)
def test_sizes_have_three_digits(number, text):
    assert size_words(number) == text


@pytest.mark.parametrize(
    ("bill", "cell"),
    [
        (
            {"wall_seconds": 7800.0, "training_seconds": 7488.0, "gpu_hours": 34.667},
            "2 h 10 min, 96 %, 34.7 GPU h",
        ),
        ({"wall_seconds": 7800.0, "training_seconds": 7488.0, "gpu_hours": None}, "2 h 10 min, 96 %  "),
        ({"wall_seconds": 0, "training_seconds": 0, "gpu_hours": None}, "0.00 s "),
        ({"wall_seconds": "x", "training_seconds": 0, "gpu_hours": None}, None),
        ({}, None),
        ([], None),
        (None, None),
    ],
)
def test_the_list_says_what_an_ended_job_took(bill, cell):
    table = job_table([(known(1), None), (known(2, result={"exit_code": 0, "bill": bill}), None)])
    assert ("TOOK" in table, cell is None or cell in table) == (cell is not None, True)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1.0, "0 s"), (59.9, "59 s"), (60.0, "1 min"), (7199.0, "1 h"), (90_000.0, "1 d")],
)
def test_how_long_ago(seconds, text):
    assert ago(seconds) == f"{text} ago"


def test_a_job_without_a_worker_has_no_row(site, capsys, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", site.environ["XDG_STATE_HOME"])
    assert main(["-np", "2", "no-such-program"]) == 127
    assert main(["-np", "1", "-H", "localhost:1", "sh", "-c", "exit 3"]) == 3
    assert main(["-np", "2", "-H", "localhost:1", "true"]) == 2
    capsys.readouterr()
    site.do("jobs")
    table = capsys.readouterr().out
    assert "exit code 3" in table
    assert "exit code 127" not in table
    assert table.endswith("1 more job, ended: hvlaunch jobs --all\n")
    site.do("jobs", "--all")
    assert "exit code 127" in capsys.readouterr().out
    site.do("jobs", "--json")
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_attach_tells_no_round_of_a_static_job(site):
    site.start("--job-name", "base")
    (job,) = known_jobs(site.root)
    assert f"job {job.id} (base): running, 2 workers on localhost, begun " in described(job)


NOW = datetime(2026, 11, 22, 14, 30, 5, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("0s", timedelta(0)),
        ("10m", timedelta(minutes=10)),
        ("2h", timedelta(hours=2)),
        ("3d", timedelta(days=3)),
        ("14:30", timedelta(seconds=5)),
        ("9:30", timedelta(hours=5, seconds=5)),
        ("14:30:04", timedelta(seconds=1)),
        ("14:31", timedelta(hours=23, minutes=59, seconds=5)),
        ("2026-11-22T14:00:00+00:00", timedelta(minutes=30, seconds=5)),
    ],
)
def test_times(text, ago):
    assert since(text, NOW) == (NOW - ago).timestamp()


@pytest.mark.parametrize("text", ["", "m", "10", "10w", "25:00", "yesterday", "2026-13-01", "-1s", "1:2"])
def test_malformed_times_are_refused(text):
    with pytest.raises(BadValue):
        since(text, NOW)
