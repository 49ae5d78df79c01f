"""`hvlaunch check` through the command line, on this machine as the only host."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvlaunch.check import Finding, Level, Values
from hvlaunch.check.report import Comparison
from hvlaunch.check.table import CHECKS
from hvlaunch.cli.hosts.check import _remember
from hvlaunch.job import Host
from hvlaunch.outside.ledger import Ledger, ledger_directory

HVLAUNCH = [sys.executable, "-m", "hvlaunch"]
LIMIT = 100.0


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("raise SystemExit('started')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    return tmp_path


def check(*words: object) -> subprocess.CompletedProcess[str]:
    return hvlaunch("check", *words)


def hvlaunch(*words: object) -> subprocess.CompletedProcess[str]:
    command = [*HVLAUNCH, *map(str, words)]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT, check=False
    )


def test_the_line_of_a_job_is_checked_and_not_started() -> None:
    done = check("--json", "-np", "2", sys.executable, "train.py")
    answer = json.loads(done.stdout)
    assert (answer["errors"], answer["findings"]) == (0, []), done
    host = answer["hosts"]["localhost"]
    assert host["level"] == "good"
    assert host["values"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert host["values"]["script"] is not None
    assert abs(host["values"]["clock"][0]) < 0.5
    assert "started" not in done.stdout + done.stderr
    assert done.returncode == 0


def test_a_missing_script_and_a_missing_python_are_errors_with_a_remedy() -> None:
    done = check("./no-python", "absent.py")
    assert done.returncode == 69
    assert "error    localhost: program: ./no-python" in done.stdout
    assert "error    localhost: script: the script can't be read: no such file or directory" in done.stdout
    assert done.stdout.count("try: ") == 2


def test_words_of_the_command_are_not_options_of_the_check() -> None:
    done = check(sys.executable, "train.py", "--json", "--help")
    assert "1 host: no errors" in done.stdout


def test_a_hostfile_and_a_page_are_written(home: Path) -> None:
    done = check("--write-hostfile", "good", "--html", "page.html", "-H", "localhost:3")
    assert done.returncode == 0, done
    assert (home / "good").read_text().startswith("localhost slots=3")
    assert "<th>python</th>" in (home / "page.html").read_text()
    again = check("--json", "--hostfile", "good")
    assert json.loads(again.stdout)["hosts"]["localhost"]["details"]["session"]["slots"] == 3


def test_expected_values_are_read_from_a_file(home: Path) -> None:
    (home / "good.toml").write_text('python = "3.1"\ncpus = {min = 0.5}\ngpu-xid = "none"\n')
    done = check("--expect", "good.toml", sys.executable, "train.py")
    assert done.returncode == 69
    assert "1 host: 1 error" in done.stdout
    assert " here, 3.1 expected" in done.stdout
    (home / "good.toml").write_text('pythons = "3.1"\n')
    assert "good.toml: unknown name 'pythons'; the names are start, " in check("--expect", "good.toml").stderr


def test_a_job_is_refused_at_an_error_and_runs_without_one() -> None:
    refused = hvlaunch("--check", "-np", "2", sys.executable, "absent.py")
    assert refused.returncode == 69
    assert "host localhost: script: the script can't be read: no such file or directory" in refused.stderr
    assert "no worker was started" in refused.stderr
    ran = hvlaunch("--check", "-np", "2", sys.executable, "train.py")
    assert "started" in ran.stderr


@pytest.mark.parametrize("words", [["--html"], ["--no-such"], ["--expect"]])
def test_wrong_words_are_refused(words: list[str]) -> None:
    assert check(*words).returncode == 2


def test_the_page_for_programs_has_all_values() -> None:
    page = Path(__file__).parents[3] / "docs/interfaces/check.md"
    rows = [f"| `{check.name}` | {check.about} |" for check in CHECKS]
    assert [
        line for line in page.read_text().partition("| name | value |")[2].splitlines() if "`" in line
    ] == rows


def compared(levels: dict[str, Level | None], *, silent: str = "") -> Comparison:
    """Return a comparison with a finding of this level for each host; the silent host did not answer."""
    findings = [
        Finding(host, level, "gpu ecc", "a row of its memory could not be remapped")
        for host, level in levels.items()
        if level is not None
    ]
    values: dict[str, Values] = {host: {} for host in levels if host != silent}
    return Comparison([Host(host) for host in levels], [], values, findings)


def test_a_failed_check_is_remembered_and_a_good_one_clears(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    ledger = Ledger(ledger_directory(environ), print)
    for host in ("a", "b", "d"):
        ledger.record("", host, "gpu fault", "1", time.time())
    _remember(compared({"a": None, "b": "warning", "c": "error", "d": "error"}, silent="d"), environ)
    # A warning clears nothing, and no answer says nothing.
    assert {*ledger.suspects(time.time())} == {"b", "c", "d"}
    assert ledger.suspects(time.time())["c"].why == (
        "check failed: gpu ecc: a row of its memory could not be remapped"
    )
    _remember(compared({"b": "note", "c": None, "d": None}), environ)
    assert ledger.suspects(time.time()) == {}
    _remember(compared({"b": "error", "c": "error", "d": None}), environ)
    assert ledger.suspects(time.time()) == {}, "what most hosts have is no fault of one"
