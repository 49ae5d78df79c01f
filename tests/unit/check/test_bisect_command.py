"""`hvlaunch bisect` without other hosts: its conclusions, limits and errors."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testhosts.hosts import wait_until


def bisect(tmp_path: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "hvlaunch", "bisect", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )


def test_nothing_is_wrong_and_repeats_raise_the_confidence(tmp_path: Path) -> None:
    result = bisect(tmp_path, "--json", "--repeat", "3", "-H", "localhost:2", "--", "true")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert (answer["cause"], answer["hosts"], answer["rounds"]) == ("nothing", [], 1)
    assert answer["confidence"] == 0.875


def test_command_that_fails_everywhere_blames_the_command(tmp_path: Path) -> None:
    result = bisect(tmp_path, "-H", "localhost:1", "--", "sh", "-c", "echo a reason >&2; exit 3")
    assert result.returncode == 69
    assert "the command fails on each host alone" in result.stdout
    assert "a reason" in result.stdout
    assert not (tmp_path / "hvlaunch" / "ledger").exists()


def test_run_without_end_is_stopped_and_counts_as_failed(tmp_path: Path) -> None:
    result = bisect(tmp_path, "--seconds", "2", "-H", "localhost:1", "--", "sleep", "1000")
    assert result.returncode == 69
    assert "it was stopped after 2.0 s" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-H", "localhost", "true"], "a command behind -- is needed"),
        (["-H", "localhost", "--"], "a command behind -- is needed"),
        (["-np", "2", "-H", "localhost:2", "--", "true"], "-np has no meaning"),
        (["--repeat", "0", "-H", "localhost", "--", "true"], "--repeat"),
    ],
)
def test_usage(tmp_path: Path, words: list[str], message: str) -> None:
    result = bisect(tmp_path, *words)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_jobs_end_with_the_search(tmp_path: Path, number: signal.Signals) -> None:
    file = tmp_path / "pid"
    words = [
        "-H",
        "localhost:1",
        "--",
        "sh",
        "-c",
        f"echo $$ > {file}.new; mv {file}.new {file}; exec sleep 1000",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "hvlaunch", "bisect", *words],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )
    wait_until(file.exists, "the worker runs")
    pid = int(file.read_text())
    process.send_signal(number)
    assert process.wait(60) == (130 if number == signal.SIGINT else -number)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the worker has ended")


def test_help(tmp_path: Path) -> None:
    assert bisect(tmp_path, "--help").stdout.startswith("usage: hvlaunch bisect ")
