"""What is not imported until it is needed: the command line answers at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import hvlaunch

ROOT = Path(hvlaunch.__file__).parents[1]
HEAVY = {
    "rich",
    "rich_argparse",
    "paramiko",
    "cryptography",
    "torch",
    "numpy",
    "ClusterShell",
    "shtab",
    "psutil",
    "httptools",
    "prometheus_client",
    "asyncio",
    "argparse",
    "tomllib",
    "tomli",
    "yaml",
}

SCRIPT = """
import json, sys
from hvlaunch.cli.main import main
from hvlaunch.job import JobResult
sys.stdout = open("/dev/null", "w")
main(sys.argv[1:], run=lambda spec, *, stdout, stderr, on_detached: JobResult(exit_code=0, elapsed=0.0))
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), file=sys.__stdout__)
"""


def modules(line):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *line.split()],
        capture_output=True,
        cwd=ROOT,
        timeout=60,
        check=True,
    )
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "line",
    [
        "-np 2 true",
        "-np 8 -H a:4,b:4 -p 22 -x A=1 python train.py",
        "-np 2 --prefix {host}/{rank} --ranks 0-1 --merge --color never --quiet --events e true",
        "--env all true",
        "--dry-run -np 2 true",
        "--check-build",
        "--version",
        "--bogus",
    ],
)
def test_a_plain_line_loads_nothing_heavy(line):
    assert not modules(line) & HEAVY


def test_the_controller_of_a_local_job_loads_nothing_heavy_either():
    script = "import json, sys, hvlaunch.gloo.controller; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, cwd=ROOT, timeout=60, check=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & (HEAVY - {"httptools", "asyncio"})


def test_what_is_needed_is_loaded():
    assert "rich" in modules("--help")
    assert "ClusterShell" in modules("-H gpu[01-02] true")
