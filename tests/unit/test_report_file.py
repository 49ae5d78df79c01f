"""--report: real jobs on this machine, all at once, and the file that each leaves."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.unit.test_local_jobs import DEADLINE, run, start

FAILS = "import os; raise ValueError('token=hunter2-hunter2') if os.environ['RANK'] == '1' else __import__('time').sleep(60)"
SLOW = "import time; print('up', flush=True); time.sleep(60)"


def report(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def test_each_end_of_a_job_leaves_a_report_and_has_its_own_code(tmp_path: Path) -> None:
    def job(name: str, np: int, *command: str) -> "subprocess.Popen[str]":
        return start("-np", np, "--report", tmp_path / name, *command)

    gone = tmp_path / "gone"
    gone.mkdir()
    jobs = {
        "failed.json": job("failed.json", 2, sys.executable, "-c", FAILS),
        "failed.html": job("failed.html", 2, sys.executable, "-c", FAILS),
        "well.json": job("well.json", 2, "true"),
        "stopped.json": job("stopped.json", 1, sys.executable, "-c", SLOW),
        "gone/x.json": job("gone/x.json", 1, "sh", "-c", f"rmdir {gone}; exit 3"),
    }
    stopped = jobs["stopped.json"]
    assert stopped.stdout is not None
    assert "up" in stopped.stdout.readline()
    stopped.send_signal(signal.SIGINT)
    told = {name: process.communicate(timeout=DEADLINE)[1] for name, process in jobs.items()}
    assert {name: process.returncode for name, process in jobs.items()} == {
        "failed.json": 1,
        "failed.html": 1,
        "well.json": 0,
        "stopped.json": 130,
        "gone/x.json": 3,
    }
    failed = report(tmp_path / "failed.json")
    assert (failed["cause"]["rank"], failed["cause"]["kind"]) == (1, "exception")
    assert failed["cause"]["exception"] == "ValueError: token=****"
    assert failed["text"].replace("****", "hunter2-hunter2") in told["failed.json"]
    page = (tmp_path / "failed.html").read_text()
    assert "ValueError: token=****" in page
    assert "hunter2" not in page
    assert report(tmp_path / "well.json")["outcome"] == "well"
    assert report(tmp_path / "stopped.json")["interrupted"] == "SIGINT"
    missing = f"--report {gone}/x.json: no such file or directory; the report was not written"
    assert told["gone/x.json"].count(missing) == 1
    assert {one.name for one in tmp_path.iterdir()} == {*jobs} - {"gone/x.json"}


def test_a_name_that_is_no_report_and_a_place_where_none_can_be_are_refused_at_once(tmp_path: Path) -> None:
    for path, cause in (
        (tmp_path / "x.txt", "neither with .json"),
        (tmp_path / "no" / "x.html", "no such file"),
    ):
        done = run("-np", 1, "--report", path, "touch", tmp_path / "began")
        assert (done.returncode, done.stdout) == (2, "")
        assert cause in done.stderr
    assert not [*tmp_path.iterdir()]


def test_each_round_that_failed_is_in_the_report_and_in_the_jobs_directory(tmp_path: Path) -> None:
    # A worker's second start goes well.
    seen = tmp_path / "seen"
    script = (
        f"[ $RANK = 0 ] || exec sleep 60; [ -e {seen} ] && exit 9; touch {seen}; echo first words >&2; exit 7"
    )
    elastic = [
        "--min-np",
        1,
        "--max-restarts",
        1,
        "-H",
        "localhost:2",
        "--blacklist-cooldown-range",
        0.1,
        0.1,
    ]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    done = run("-np", 2, *elastic, "--report", tmp_path / "r.json", "sh", "-c", script, env=env)
    assert done.returncode == 9, done.stderr
    found = report(tmp_path / "r.json")
    first = found["rounds"][0]
    assert (first["number"], first["failures"][0]["code"]) == (0, 7)
    assert first["failures"][0]["evidence"]["lines"] == ["first words"]
    assert found["cause"]["code"] == 9
    [kept] = (tmp_path / "state").glob("hvlaunch/jobs/*/report.json")
    assert report(kept)["rounds"] == found["rounds"]
    logs = run("logs", kept.parent.name, env=env)
    assert (logs.returncode, logs.stdout) == (0, found["text"])
