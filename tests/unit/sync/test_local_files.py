"""Files to and from hosts, through the command line, on this machine as the only host."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

HVLAUNCH = [sys.executable, "-m", "hvlaunch"]
LIMIT = 100.0
MB = 1 << 20


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory; jobs and caches of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "state").mkdir(0o700)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PWD", str(tmp_path / "work"))
    return tmp_path / "work"


def hvlaunch(*words: object) -> subprocess.CompletedProcess[str]:
    command = [*HVLAUNCH, *map(str, words)]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT, check=False
    )


def start(*words: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*HVLAUNCH, *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def await_that(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def newest_job() -> str:
    return str(json.loads(hvlaunch("jobs", "--json").stdout.splitlines()[-1])["id"])


SCRIPT = "mkdir -p out; echo $RANK > out/$RANK.txt; echo log > x.log; ln -s /etc/passwd out/evil; exit 3"


def test_files_of_a_failed_job_come_back_and_others_later(home: Path) -> None:
    job = hvlaunch(
        "--collect", "out/**", "--collect", f"*.log:{home}/logs", "-H", "localhost:2", "sh", "-c", SCRIPT
    )
    assert job.returncode == 3, job.stderr
    assert sorted(path.name for path in (home / "results/localhost/out").iterdir()) == ["0.txt", "1.txt"]
    assert (home / "logs/localhost/x.log").read_text() == "log\n"
    assert "3 files of 1 host" in job.stderr
    assert "out/evil: it is a link that leads out" in job.stderr
    (home / "late").write_text("1")
    later = hvlaunch("collect", newest_job(), "late:more", "--json")
    assert json.loads(later.stdout)["hosts"]["localhost"]["files"] == 1, later.stderr
    assert (home / "more/localhost/late").read_text() == "1"


def test_a_running_job_is_asked_and_an_interrupted_one_collects(home: Path) -> None:
    job = start(
        "--collect", "a.log:res", "-H", "localhost:1", "sh", "-c", "echo 1 > a.log; touch begun; sleep 600"
    )
    await_that((home / "begun").exists, "the worker runs")
    asked = hvlaunch("collect", newest_job(), "*.log:now")
    assert asked.returncode == 0, asked.stderr
    assert (home / "now/localhost/a.log").read_text() == "1\n"
    job.send_signal(signal.SIGINT)
    _, stderr = job.communicate(timeout=LIMIT)
    assert job.returncode == 130, stderr
    assert (home / "res/localhost/a.log").read_text() == "1\n"


def test_what_had_come_before_the_driver_was_killed_is_not_sent_again(home: Path) -> None:
    content = os.urandom(256 * MB)
    (home / "big").write_bytes(content)
    job = start("--collect", "big:res", "-H", "localhost:1", "true")
    parts = home / "res/.localhost.hvlaunch"
    await_that(lambda: any(path.stat().st_size > 8 * MB for path in parts.glob("*.part")), "content comes")
    job.kill()
    job.communicate(timeout=LIMIT)
    assert not (home / "res/localhost").exists()
    job_after = hvlaunch("--collect", "big:res", "-H", "localhost:1", "true")
    assert job_after.returncode == 0, job_after.stderr
    (new,) = re.findall(r"\((\S+) MB were new\)", job_after.stderr)
    assert float(new) < 268
    assert (home / "res/localhost/big").read_bytes() == content
    assert [path.name for path in (home / "res").iterdir()] == ["localhost"]


def test_files_that_can_not_come_fail_a_job_that_went_well(home: Path) -> None:
    (home / "big").write_bytes(bytes(MB))
    job = hvlaunch("--collect", "big", "--collect-limit", "1K", "-H", "localhost:1", "true")
    assert job.returncode == 74
    assert "its files were not collected: the files have 1.0 MB, more than the limit of 0.0 MB" in job.stderr
    assert "try: hvlaunch collect " in job.stderr
    assert "exit code 0" not in job.stderr
    job = hvlaunch("--collect", "big", "--collect-limit", "1K", "-H", "localhost:1", "sh", "-c", "exit 5")
    assert job.returncode == 5, "the job's own code is not hidden"


def test_a_job_gets_files_first_and_cp_sends_nothing_twice(home: Path) -> None:
    (home / "m/sub").mkdir(parents=True)
    (home / "m/w").write_bytes(os.urandom(9 * MB))
    (home / "m/sub/c").write_text("{}")
    job = hvlaunch(
        "--bring",
        f"m:{home}/to/",
        "--bring",
        f"localhost:{home}/m/w:{home}/w",
        "-H",
        "localhost:1",
        "cat",
        "to/m/sub/c",
    )
    assert job.returncode == 0, job.stderr
    assert "{}" in job.stdout
    assert (home / "w").read_bytes() == (home / "m/w").read_bytes()
    answer = json.loads(hvlaunch("cp", "--json", "-H", "localhost", "m", f"{home}/to/m").stdout)
    assert answer["hosts"] == {"localhost": {"received": 0, "error": None}}
    assert hvlaunch("--bring", "nothing:/x", "-H", "localhost:1", "true").returncode == 2
    missing = hvlaunch("cp", "-H", "localhost", f"localhost:{home}/nothing", "x")
    assert missing.returncode == 69
    assert "host localhost: No such file or directory" in missing.stderr


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("cp", "a", "b"), "no hosts are named"),
        (("cp", "-H", "localhost", "a"), "SRC and DST come last"),
        (("cp", "-H", "localhost", "a", "b", "-v"), "SRC and DST come last"),
        (("cp", "--no-such", "a", "b"), "cp: unknown option '--no-such'"),
        (("cp", "-np", "2", "-H", "localhost", "a", "b"), "--num-proc is for jobs"),
        (("--bring", "x", "-H", "localhost:1", "true"), "is not SRC:DST"),
        (("--bring", "b:/x:/y", "-H", "localhost:1", "true"), "b is no host of this job"),
        (("--collect", "../x", "-H", "localhost:1", "true"), "names files below the workers' directory"),
        (("--collect", "/etc/*", "-H", "localhost:1", "true"), "names files below the workers' directory"),
        (("--collect", "x:", "-H", "localhost:1", "true"), "names files below the workers' directory"),
    ],
)
def test_wrong_words_are_named(words: tuple[str, ...], cause: str) -> None:
    done = hvlaunch(*words)
    assert done.returncode == 2
    assert cause in done.stderr
