"""The command for a launcher in the plan of --dry-run."""

import os
import shlex
import subprocess

import pytest

from hvlaunch.cli.plan import launcher_plan
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.templates import templates_of
from hvlaunch.job import ConsoleOptions, Host, JobSpec, MPIOptions


@pytest.fixture
def options(tmp_path):
    program = tmp_path / "mpirun"
    program.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo "mpirun (Open MPI) 4.1.4"; else env; fi\n'
    )
    program.chmod(0o755)
    return MPIOptions(program=str(program))


def spec(*hosts, **more):
    return JobSpec(command=("train", "x y"), hosts=hosts, cwd="/w", **more)


def command(plan):
    return shlex.split(plan.splitlines()[-1])


def test_it_is_the_launchers_command_with_a_shell_for_each_rank(options):
    plan = launcher_plan(spec(Host("a", slots=2), Host("b", slots=1), env={"A": "1"}), options, {"A": "1"})
    assert plan.startswith("as a command of Open MPI 4.1.4, to paste (")
    words = command(plan)
    assert words[:3] == ["MASTER_ADDR=a", "MASTER_PORT=29500", options.program]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    assert words[3:-6] == [
        *root,
        *[
            "-np",
            "3",
            "-H",
            "a:2,b:1",
            "--tag-output",
            "--bind-to",
            "none",
            "--map-by",
            "slot",
            "--wdir",
            "/w",
        ],
        *["-x", "A", "-x", "MASTER_ADDR", "-x", "MASTER_PORT"],
    ]
    assert words[-6:-4] == ["sh", "-c"]
    assert words[-3:] == ["sh", "train", "x y"]


def test_a_command_with_places_is_nothing_to_paste(options):
    """mpirun alone would give all workers the same words."""
    places = templates_of(["train", "{rank}"], {}, {}, is_per_host=False)
    assert launcher_plan(spec(Host("a", slots=2), templates=places), options, {}) == ""


def test_variables_missing_in_this_shell_are_shown_and_secrets_masked(options):
    env = {"A": "1", "B": "b c", "API_KEY": "secret", "MASTER_ADDR": "mine"}
    plan = launcher_plan(spec(Host("localhost", slots=1), env=env), options, {"A": "1", "API_KEY": "other"})
    assert command(plan)[:4] == ["API_KEY=****", "B=b c", "MASTER_ADDR=mine", "MASTER_PORT=29500"]
    assert "secret" not in plan


def test_it_can_be_pasted(options):
    plan = launcher_plan(spec(Host("localhost", slots=1), env={"B": "it's $HOME"}), options, {})
    printed = subprocess.run(
        ["sh", "-c", plan.splitlines()[-1]], capture_output=True, text=True, check=True
    ).stdout
    assert "B=it's $HOME\n" in printed
    assert "MASTER_ADDR=127.0.0.1\n" in printed


def test_prefix_and_files(options, tmp_path):
    console = ConsoleOptions(prefix="{time} ")
    plan = launcher_plan(spec(Host("a", slots=1), console=console, output_dir=tmp_path), options, {})
    assert f"--tag-output --timestamp-output --output-filename {tmp_path}" in plan
    assert "-output" not in launcher_plan(
        spec(Host("a", slots=1), console=ConsoleOptions(prefix="")), options, {}
    )


def test_a_job_that_the_launcher_can_not_do_is_an_error(options):
    with pytest.raises(BadUsage, match="a launcher needs the number of slots"):
        launcher_plan(spec(Host("a")), options, {})
