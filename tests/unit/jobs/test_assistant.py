"""`hvlaunch mcp`: an assistant asks by the library's own client, and gets the answers of the commands and the control socket."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hvlaunch.cli.jobs.assistant import Tools
from hvlaunch.outside.control import REQUESTS
from tests.cluster.incidents import INCIDENTS, Incident, asked, verdicts

HVLAUNCH = [sys.executable, "-m", "hvlaunch"]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path)}


@pytest.fixture
def running(environ: dict[str, str]) -> Iterator["subprocess.Popen[str]"]:
    line = [*HVLAUNCH, "-np", "2", "--job-name", "base", "sh", "-c", "echo up $RANK; exec sleep 1000"]
    with subprocess.Popen(
        line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert "up" in process.stdout.readline() + process.stdout.readline()
        yield process
        process.terminate()
        process.wait(60.0)


def test_tools_are_the_requests_of_the_control_socket_and_others() -> None:
    tools = Tools({}, allow_actions=True).by_name
    assert tools.keys() == {path.removeprefix("/") for path in REQUESTS} | {
        "jobs",
        "verdict",
        "logs",
        "hosts",
        "queue",
    }
    readers = Tools({}, allow_actions=False).by_name
    assert tools.keys() - readers.keys() == {"signal", "stop", "output", "collect", "move"}


def test_a_failed_job_is_explained_without_its_id(environ: dict[str, str]) -> None:
    words = ["-np", "3", "--job-name", "broken", sys.executable, "-c", INCIDENTS["exception"].program(2)]
    subprocess.run([*HVLAUNCH, *words], env=environ, capture_output=True, check=False)
    verdict, logs = asked(environ, [("verdict", {}), ("logs", {"ranks": "2", "lines": 40})])
    assert (verdict.value["rank"], verdict.value["host"]) == (2, "localhost")
    assert INCIDENTS["exception"].words in verdict.text
    assert "ValueError: bad batch 7" in logs.text


def test_a_running_job_is_described_and_is_not_touched(
    environ: dict[str, str], running: "subprocess.Popen[str]"
) -> None:
    answers = asked(
        environ,
        [
            ("jobs", {}),
            ("job", {"job": "base"}),
            ("verdict", {}),
            ("events", {"since": 1}),
            ("stop", {}),
            ("job", {"rank": 1}),
            ("job", {"job": "nothing"}),
            ("ready", {}),
        ],
    )
    jobs, job, verdict, events, stop, unknown, missing, ready = answers
    assert [entry["name"] for entry in jobs.value] == ["base"]
    assert {worker["host"] for worker in job.value["workers"]} == {"localhost"}
    assert (verdict.value["outcome"], verdict.value["rank"]) == ("running", None)
    assert events.value["next"] > 1
    assert stop.is_error and "--allow-actions" in stop.text
    assert unknown.is_error and "no argument rank" in unknown.text
    assert missing.is_error and "nothing" in missing.text
    assert ready.is_error
    assert running.poll() is None


def test_with_allow_actions_a_job_is_stopped(
    environ: dict[str, str], running: "subprocess.Popen[str]"
) -> None:
    (answer,) = asked(environ, [("stop", {"kill": True})], "--allow-actions")
    assert not answer.is_error
    assert running.wait(60.0) != 0


def test_a_long_answer_is_cut(tmp_path: Path) -> None:
    def own(words: Sequence[str]) -> str:
        assert words == ["hosts", "--json"]
        return json.dumps({"host": "a" * 100_000})

    text, is_error = Tools({"XDG_STATE_HOME": str(tmp_path)}, allow_actions=False, run_own=own).call(
        "hosts", {}
    )
    assert not is_error
    assert len(text) < 70_000
    assert text.endswith("cut here: ask for less")


def test_without_the_library_the_message_names_the_extra() -> None:
    program = (
        "import sys; sys.modules['mcp'] = None; from hvlaunch.cli.main import main; sys.exit(main(['mcp']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "hvlaunch: hvlaunch mcp needs the package mcp; try: pip install 'hvlaunch[mcp]'\n",
    )


def test_incidents_are_explained(environ: dict[str, str]) -> None:
    names: Mapping[str, Incident] = {name: INCIDENTS[name] for name in ("exception", "exit code", "segfault")}

    def start(incident: Incident, rank: int) -> Any:
        line = [*HVLAUNCH, "-np", "3", "--grace", "1", sys.executable, "-c", incident.program(rank)]
        return subprocess.run(line, env=environ, capture_output=True, check=False)

    for name, verdict in verdicts(environ, names, start):
        assert verdict.value["host"] == "localhost", name
