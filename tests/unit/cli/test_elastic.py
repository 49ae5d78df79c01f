"""The flags of elastic jobs."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from hvlaunch.cli.arguments import parse
from hvlaunch.cli.main import main
from hvlaunch.cli.spec import first_round, job_spec
from hvlaunch.errors import BadUsage
from hvlaunch.gloo import reporting
from hvlaunch.job import ElasticOptions, Host, JobSpec
from hvlaunch.report import bill


def spec(*flags: str) -> JobSpec:
    return job_spec(parse([*flags, "train", "--min-np", "x"]), os.environ)[0]


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (["--min-np", "2"], ElasticOptions(min_np=2)),
        (["-np", "4", "--max-np", "8"], ElasticOptions(min_np=4, max_np=8)),
        (["--min-num-proc=2", "--max-num-proc=3"], ElasticOptions(min_np=2, max_np=3)),
        (["-np", "4", "--max-restarts", "0"], ElasticOptions(min_np=4, max_restarts=0)),
        (["--reset-limit", "5"], ElasticOptions(min_np=1, max_restarts=5)),
        (["--spares", "1", "--min-np", "2"], ElasticOptions(min_np=2, spares=1)),
        (
            ["--host-discovery-script", "./discover.sh"],
            ElasticOptions(min_np=1, discovery_script="./discover.sh"),
        ),
        (
            ["--min-np", "1", "--blacklist-cooldown-range", "5", "60"],
            ElasticOptions(min_np=1, cooldown=(5.0, 60.0)),
        ),
        (
            ["--min-np", "1", "--elastic-timeout", "9", "--worker-timeout", "3", "--commit-timeout", "8"],
            ElasticOptions(min_np=1, elastic_timeout=9.0, worker_timeout=3.0, commit_timeout=8.0),
        ),
    ],
)
def test_options_of_an_elastic_job(flags, options):
    made = spec(*flags)
    assert made.elastic == options
    assert made.command == ("train", "--min-np", "x")


def test_a_job_without_such_flags_is_static():
    assert spec("-np", "2").elastic is None


def test_a_hostfile_is_a_pool_and_a_script_leaves_the_hosts_open(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("a:2\n")
    made = spec("--hostfile", str(path), "--min-np", "1")
    assert made.elastic is not None
    assert made.elastic.hostfile == Path(path)
    assert spec("--host-discovery-script", "x").hosts == ()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--min-np", "5", "-np", "4"], "--min-np 5 is more than -np 4"),
        (["-np", "9", "--max-np", "8"], "-np 9 is more than --max-np 8"),
        (["--min-np", "9", "--max-np", "8"], "--min-np 9 is more than --max-np 8"),
        (["--min-np", "0"], "--min-np"),
        (["--host-discovery-script", "x", "-H", "a"], "not allowed with "),
        (["--blacklist-cooldown-range", "1", "2"], "--blacklist-cooldown-range is for elastic jobs"),
        (["-np", "2", "--worker-timeout", "30"], "--worker-timeout is for elastic jobs"),
        (["-np", "2", "--save-to", "/shared"], "--save-to is for elastic jobs"),
        (["--min-np", "2", "--save-every", "30"], "--save-every needs a directory"),
        (
            ["--min-np", "1", "--blacklist-cooldown-range", "9", "2"],
            "the first number is larger than the second",
        ),
        (["--min-np", "1", "--mpi"], "hvlaunch's own controller"),
        (["--min-np", "1", "--horovod"], "static jobs"),
    ],
)
def test_contradicting_options_are_refused(flags, message):
    with pytest.raises(BadUsage) as caught:
        spec(*flags)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_first_round_is_what_all_hosts_would_give():
    assert first_round(spec("-H", "a:4,b:4", "--min-np", "2")).np == 8
    assert first_round(spec("-H", "a:4,b:4", "--min-np", "2", "--max-np", "6")).np == 6
    static = spec("-np", "2")
    assert first_round(static) is static


def test_a_dry_run_asks_the_script(tmp_path, capsys):
    script = tmp_path / "discover.sh"
    script.write_text("#!/bin/sh\necho a:2; echo b:1\n")
    script.chmod(0o755)
    flags = ["--host-discovery-script", str(script), "--min-np", "1"]
    assert first_round(spec(*flags)).hosts == (Host("a", 2), Host("b", 1))
    assert main([*flags, "--dry-run", "--verbose", "true"]) == 0
    printed = capsys.readouterr().out
    assert "HVLAUNCH_ELASTIC" in printed
    script.write_text("#!/bin/sh\necho the cloud is closed >&2; exit 3\n")
    assert main([*flags, "--dry-run", "true"]) == 69
    assert "the cloud is closed" in capsys.readouterr().err


def test_a_crash_loop_ends_with_the_suspect_and_a_code_of_its_own(tmp_path, capfd):
    tries = tmp_path / "tries"
    assert main(["--min-np", "1", "-np", "1", "sh", "-c", f"echo x >> {tries}; exit 3"]) == 77
    assert tries.read_text() == "x\n" * 3
    told = capfd.readouterr().err
    assert (
        "the job ends: the workers failed 3 times in a row without progress, mostly those on host localhost"
        in told
    )
    assert "exit code 3" in told


STEPS = """
import os, pathlib, sys, time
from hvlaunch.rendezvous import progress
from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.messages import PROGRESS
tries = pathlib.Path(sys.argv[1])
tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
# Each try gets further than the one before.
progress(len(tries.read_text()))
client = Client.from_environment()
while client.get(PROGRESS, os.environ["HVLAUNCH_WORKER"]) is None:
    time.sleep(0.02)
sys.exit(len(tries.read_text()) < 6)
"""


def test_a_job_with_new_steps_goes_further_than_three_failures(tmp_path):
    script, tries = tmp_path / "train.py", tmp_path / "tries"
    script.write_text(STEPS)
    assert main(["--quiet", "--min-np", "1", "-np", "1", sys.executable, str(script), str(tries)]) == 0
    assert tries.read_text() == "x" * 6


COMMITS = """
import os, sys, time
import torch
from hvlaunch.rendezvous.client import Client
from hvlaunch.rendezvous.messages import KEPT
from hvlaunch.torch import checkpoint
step, weights = checkpoint.load() or (0, torch.zeros(1000))
for step in range(step + 1, step + 4):
    weights = weights + 1
    checkpoint.save(step, weights)
# The report on costs comes by a thread.
client = Client.from_environment()
while b'"step": 3' not in (client.get(KEPT, "cost." + os.environ["HVLAUNCH_WORKER"]) or b""):
    time.sleep(0.02)
# The second life saves once more than is written now: this file is of the first.
while len(sys.argv) > 1 and not any(name.startswith("default.0.") for name in os.listdir(sys.argv[1])):
    time.sleep(0.02)
sys.exit(step < 6)
"""


def test_a_job_with_commits_and_a_failure_suggests_their_interval(tmp_path, capfd, monkeypatch):
    # The job of this test is a short one.
    monkeypatch.setattr(reporting, "_LONG", 0.0)
    monkeypatch.setattr(bill, "_LEAST_SECONDS", 0.0)
    script, report, disk = tmp_path / "train.py", tmp_path / "report.json", tmp_path / "disk"
    script.write_text(COMMITS)
    disk.mkdir(0o700)
    options = [
        "--report",
        str(report),
        "--min-np",
        "1",
        "-np",
        "1",
        "--save-to",
        str(disk),
        "--save-every",
        "1",
    ]
    assert main([*options, sys.executable, str(script), str(disk)]) == 0
    took = json.loads(report.read_text())["bill"]
    assert (took["failures"], took["commits"]) == (1, 6)
    assert 0 < took["commit_seconds"] < took["commit_every"]
    assert 0 < took["save_seconds"] < took["save_every"]
    words = r"commits: 6, [0-9.]+ m?s each; a failure every .*; saving every .* \(Young/Daly\); you saved every .*: --save-every [0-9]+"
    assert re.search(rf"hvlaunch: done after .*; {words}$", capfd.readouterr().err, re.MULTILINE)
