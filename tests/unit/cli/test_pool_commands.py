"""`hvlaunch pool` and `--pool`: what is wrong is said in a line, and what is left of a killed pool goes."""

import json
import os
import pty
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hvlaunch import __version__
from hvlaunch.cli.jobs import pool_commands
from hvlaunch.cli.main import main
from hvlaunch.job import Host, JobSpec
from hvlaunch.outside import JobDirectory, has_driver
from tests.testhosts.places import wait_until

HOSTS = [
    {
        "name": "a",
        "slots": 4,
        "user": "ml",
        "port": 2222,
        "identity": None,
        "python": "/opt/py",
        "address": None,
    },
    {
        "name": "b",
        "slots": None,
        "user": None,
        "port": None,
        "identity": None,
        "python": None,
        "address": "10.0.0.7",
    },
]
SSH = {
    "port": None,
    "user": "ada",
    "identity": None,
    "config": None,
    "host_keys": "accept-new",
    "client": "paramiko",
    "forward_agent": False,
    "connect_limit": 8,
    "remote_agent": None,
}


def about(**more: object) -> dict[str, object]:
    return {
        "name": "p",
        "version": __version__,
        "hosts": HOSTS,
        "ssh": SSH,
        "remote_python": None,
        "pid": 1,
        **more,
    }


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "hvlaunch/pools"


@pytest.fixture
def pool(root: Path) -> Iterator[JobDirectory]:
    """One whose process seems to live, and answers nothing."""
    with closing(JobDirectory(root, "p", about())) as directory:
        yield directory


def killed(root: Path, **more: object) -> Path:
    directory = JobDirectory(root, "p", about(**more))
    os.close(directory._lock)
    return directory.path


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[JobSpec]:
    """What the pools are that would be made."""
    specs: list[JobSpec] = []

    def hold(_root: Path, _name: str, spec: JobSpec, *_: object) -> int:
        specs.append(spec)
        return 0

    monkeypatch.setattr(pool_commands, "run_detached", lambda hold: hold(None))
    monkeypatch.setattr(pool_commands, "_hold", hold)
    return specs


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["pool"], "pool: up, down or status is missing; try: hvlaunch pool --help"),
        (["pool", "start"], "pool: 'start' is not one of up, down, status; try: hvlaunch pool --help"),
        (["pool", "up"], "pool up: the name comes first; try: hvlaunch pool up NAME -H HOSTS"),
        (
            ["pool", "up", "../x", "-H", "a"],
            "pool '../x': a name has letters, digits, dots, - and _, 64 at most",
        ),
        (
            ["pool", "up", "p", "-H", "a", "true"],
            "pool up: 'true' is not an option; try: hvlaunch pool --help",
        ),
        (
            ["pool", "up", "p", "--idle-timeout", "x"],
            "--idle-timeout: 'x' is not a time such as 90s, 10m, 8h or 2d; try: hvlaunch pool --help",
        ),
        (
            ["pool", "up", "p", "--min-np", "2", "-H", "a:4"],
            "pool up: --min-np/--min-num-proc is for jobs; try: hvlaunch pool --help",
        ),
        (
            ["pool", "up", "p", "-H", "a:4", "-np", "4", "--output-filename", "x"],
            "pool up: -np/--num-proc is for jobs; try: hvlaunch pool --help",
        ),
        (
            ["pool", "up", "p", "-H", "a:4", "--dry-run"],
            "pool up: --dry-run is for jobs; try: hvlaunch pool --help",
        ),
        (
            ["pool", "up", "p", "-H", "a:4", "--show-config"],
            "pool up: --show-config is for jobs; try: hvlaunch pool --help",
        ),
        (
            ["pool", "up", "p", "-H", "a:4", "--check-build"],
            "pool up: -cb/--check-build is for jobs; try: hvlaunch pool --help",
        ),
        (
            ["pool", "up", "p", "-H", "a:4", "--include", "a:0"],
            "pool up: numbers of GPUs and limits of hosts are for jobs; try: hvlaunch pool --help",
        ),
        (["pool", "up", "p"], "pool up: no hosts are named; try: hvlaunch pool up p -H HOSTS"),
        (["pool", "up", "p", "-H"], "-H/--hosts: expected one argument; try: hvlaunch --help"),
        (["pool", "down", "p"], "there is no pool p; try: hvlaunch pool status"),
        (["pool", "status", "p"], "there is no pool p; try: hvlaunch pool status"),
        (["--pool", "p", "true"], "there is no pool p; up: none; try: hvlaunch pool up p -H HOSTS"),
        (["--pool", "p", "--mpi", "true"], "--pool needs ssh: mpirun starts the workers here"),
    ],
)
def test_a_wrong_line_has_one_message_and_code_2(
    words: list[str], told: str, root: Path, capsys: pytest.CaptureFixture[str], held: list[JobSpec]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"hvlaunch: {told}\n"
    assert held == []


def test_a_job_has_the_hosts_of_its_pool_and_how_they_are_reached(
    pool: JobDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--pool", "p", "--slots-per-host", "2", "--dry-run", "true"]) == 0
    assert "6 workers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "workers"),
    [
        ("--include a:0,2", "2 workers on 1 host"),
        ("--exclude a", "1 worker on 1 host"),
        ("--nnodes 1", "4 workers on 1 host"),
        ("--map-by ppr:1:node", "2 workers on 2 hosts"),
        ("--nproc-per-node 3", "6 workers on 2 hosts"),
        ("-H a --map-by ppr:2:node", "2 workers on 1 host"),
    ],
)
def test_options_about_hosts_select_from_the_pool(
    pool: JobDirectory, words: str, workers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--pool", "p", "--slots-per-host", "1", *words.split(), "--dry-run", "true"]) == 0
    assert workers in capsys.readouterr().out


def test_hosts_of_weaker_sources_do_not_count_where_a_pool_is_named(
    pool: JobDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVLAUNCH_HOSTS", "a:1")
    assert main(["--pool", "p", "--slots-per-host", "1", "--dry-run", "true"]) == 0
    assert "5 workers on 2 hosts" in capsys.readouterr().out
    monkeypatch.setenv("HVLAUNCH_POOL", "p")
    assert main(["--slots-per-host", "1", "--dry-run", "true"]) == 0
    assert "1 worker on 1 host" in capsys.readouterr().out
    monkeypatch.setenv("HVLAUNCH_HOSTS", "c:1")
    assert main(["--slots-per-host", "1", "--dry-run", "true"]) == 2
    assert "pool p has no host c" in capsys.readouterr().err
    assert main(["--pool", "", "--dry-run", "true"]) == 0
    assert "c     1" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["--help", "-h", "-V", "--print-completion=bash"])
def test_questions_are_answered(
    word: str, root: Path, capsys: pytest.CaptureFixture[str], held: list[JobSpec]
) -> None:
    assert main(["pool", "up", "p", "-H", "a", word]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(("usage: hvlaunch pool up", "hvlaunch ", "# AUTOMATICALLY"))
    assert held == []


def test_options_of_jobs_do_not_count_where_they_are_not_typed(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    held: list[JobSpec],
) -> None:
    (tmp_path / "hvlaunch.toml").write_text('min-np = 2\nhosts = "a:2,b"\ncommand = "true"\nmpi = true\n')
    monkeypatch.chdir(tmp_path)
    for name, value in {"POOL": "lab", "MAX_NP": "1", "EXCLUDE": "a", "SLOTS_PER_HOST": "3"}.items():
        monkeypatch.setenv(f"HVLAUNCH_{name}", value)
    assert main(["pool", "up", "lab"]) == 0
    assert capsys.readouterr().err == "hvlaunch: options of hvlaunch.toml: hosts\n"
    (spec,) = held
    assert spec.hosts == (Host("a", 2), Host("b"))
    assert (spec.pool, spec.elastic, spec.mpi) == (None, None, None)


def test_hosts_are_named_in_all_ways(root: Path, tmp_path: Path, held: list[JobSpec]) -> None:
    path = tmp_path / "hosts"
    path.write_text("a:2\nb\nc\n")
    words = ["--slots-per-host", "3", "--exclude", "c", "--ssh-user", "ml", "--quiet"]
    assert main(["pool", "up", "p", "--hostfile", str(path), *words]) == 0
    assert held[0].hosts == (Host("a", 2), Host("b", 3))
    assert held[0].ssh.user == "ml"


@pytest.mark.parametrize("hosts", ["b:3", "b:3,a:1"])
def test_a_job_may_have_some_of_them(
    pool: JobDirectory, hosts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--pool", "p", "-H", hosts, "--dry-run", "true"]) == 0
    assert f"{3 if hosts == 'b:3' else 4} workers" in capsys.readouterr().out


def test_a_host_outside_the_pool_is_refused(pool: JobDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--pool", "p", "-H", "a,c,d", "true"]) == 2
    assert "pool p has no host c, d; try: hvlaunch pool status p" in capsys.readouterr().err


def test_a_pool_of_another_version_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(JobDirectory(root, "p", about(version="0.0.1"))):
        assert main(["--pool", "p", "true"]) == 2
    assert (
        f"pool p was made by hvlaunch 0.0.1, and this is {__version__}; try: hvlaunch pool down p, then"
        in capsys.readouterr().err
    )


def test_a_name_that_is_taken_is_refused(pool: JobDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", "up", "p", "--foreground", "-H", "a"]) == 2
    assert "pool p is up; try: hvlaunch pool status p" in capsys.readouterr().err


def test_a_pool_of_a_killed_process_is_reported_and_removed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = killed(root)
    assert main(["--pool", "p", "true"]) == 2
    assert "the process of pool p was killed; up: none; try: hvlaunch pool up p" in capsys.readouterr().err
    assert main(["pool", "status"]) == 0
    assert capsys.readouterr().out == "p: its process was killed; try: hvlaunch pool down p\n"
    assert main(["pool", "down", "p"]) == 0
    assert not path.exists()
    assert main(["pool", "status"]) == 0
    assert capsys.readouterr().out == "pool p is down\nno pools\n"


def test_a_pool_that_does_not_answer_is_reported(
    pool: JobDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pool", "status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "no answer"


def test_a_directory_writable_by_others_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed(root).chmod(0o777)
    assert main(["pool", "status"]) == 0
    assert capsys.readouterr().out == "no pools\n"


def test_a_terminal_shows_the_hosts_that_it_waits_for(root: Path, tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\n[ "$1" = -G ] && exec /usr/bin/ssh "$@"\nexec sleep 600\n')
    ssh.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TERM": "xterm"}
    line = [
        sys.executable,
        "-m",
        "hvlaunch",
        "pool",
        "up",
        "q",
        "-H",
        "gpu[1-2]:1",
        "--ssh-client",
        "openssh",
    ]
    pid, master = pty.fork()
    if not pid:
        os.execve(sys.executable, line, env)
    seen = b""
    while b"waiting for gpu[1-2]" not in seen:
        seen += os.read(master, 1 << 16)
    assert re.search(rb"hvlaunch: .*connecting 0/2, \d s", seen)
    os.write(master, b"\x03")
    assert os.waitpid(pid, 0)[1] != 0
    os.close(master)
    wait_until(lambda: not (root / "q").exists() or not has_driver(root / "q"), "the pool has ended")
