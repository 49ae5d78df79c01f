"""Whole jobs on this machine with options from files: horovodrun's line and file, a file's command, a job in a worker."""

import os
import subprocess
import sys

import pytest

HVLAUNCH = [sys.executable, "-m", "hvlaunch"]
SHOW = "import os; print(*sorted(f'{name}={value}' for name, value in os.environ.items() if name.startswith('HOROVOD_')), sep='\\n')"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*words, **environ):
    done = subprocess.run(
        [*HVLAUNCH, *words],
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def write(name, text):
    with open(name, "w") as file:  # noqa: PTH123
        file.write(text)


def test_a_line_of_horovodrun():
    line = "-np 2 -H localhost:2 --fusion-threshold-mb 32 --timeline-filename /tmp/t.json --no-stall-check --disable-cache --gloo"
    out = run(*line.split(), sys.executable, "-c", SHOW)
    for rank in "01":
        for variable in ("FUSION_THRESHOLD=33554432", "TIMELINE=/tmp/t.json", "STALL_CHECK_DISABLE=1"):
            assert f"[{rank}]<stdout>: HOROVOD_{variable}\n" in out


def test_a_file_of_horovodrun():
    write(
        "h.yaml",
        "controller: gloo\nparams:\n    cycle_time_ms: 10\nautotune:\n    enabled: true\n    log_file: a.csv\n",
    )
    out = run("-np", "2", "--config-file", "h.yaml", sys.executable, "-c", SHOW)
    for variable in ("CYCLE_TIME=10", "AUTOTUNE=1", "AUTOTUNE_LOG=a.csv"):
        assert out.count(f"HOROVOD_{variable}\n") == 2


def test_a_job_in_a_worker_inherits_no_options():
    inner = [
        sys.executable,
        "-m",
        "hvlaunch",
        "--prefix",
        "inner {rank}: ",
        "sh",
        "-c",
        "echo A is ${A-unset}",
    ]
    write("hvlaunch.toml", f"command = {inner!r}\nnp = 2\nx = {{A = '1'}}\n")
    out = run("--prefix", "outer {rank}: ", HVLAUNCH_QUIET="1", HVLAUNCH_MERGE="0")
    # The variable is the worker's own environment by then, and so the inner job's; the option that set it is not.
    assert sorted(out.splitlines()) == [f"outer {rank}: inner 0: A is 1" for rank in "01"]


@pytest.mark.parametrize(
    "line",
    [
        "{} --config-file <(sleep 0.1; echo np: 2) --show-config",
        "echo np: 2 | {} --config-file /dev/stdin --show-config",
        "mkfifo pipe; echo np: 2 > pipe & until test -p pipe; do :; done; {} --config-file pipe --show-config",
    ],
)
def test_a_file_may_be_a_pipe_of_the_shell(line):
    done = subprocess.run(
        ["bash", "-c", line.format(f"{sys.executable} -m hvlaunch")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "num-proc = 2 " in done.stdout, done.stderr


@pytest.mark.parametrize("name", ["/dev/null", "empty"])
def test_an_empty_file_sets_nothing(name):
    write("empty", "")
    assert run("--config-file", name, "--show-config") == "# no option is set\n"
