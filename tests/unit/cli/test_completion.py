"""--print-completion: the scripts are tried in their shells."""

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys

import pytest

from hvlaunch.cli.arguments import Answered, parse

BASH = """\
source "$1"
cd "$2"
shift 2
COMP_WORDS=("$@") COMP_CWORD=$(( $# - 1 ))
_shtab_hvlaunch 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell):
    with pytest.raises(Answered) as caught:
        parse(["--print-completion", shell])
    return caught.value.text


@pytest.fixture
def complete(tmp_path):
    """What bash offers for the last of the words."""
    (tmp_path / "script").write_text(script("bash"))
    here = tmp_path / "here"
    (here / "folder").mkdir(parents=True)
    (here / "hosts.txt").touch()

    def offered(*words):
        line = ["bash", "-c", BASH, "bash", str(tmp_path / "script"), str(here), "hvlaunch", *words]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.split()

    return offered


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["--co"], ["--color", "--connect-limit"]),
        (["-prefix"], ["-prefix-timestamp"]),
        (["--color", ""], ["auto", "always", "never"]),
        (["-np", "2", "--stdin", "a"], ["all"]),
        (["--hostfile", "ho"], ["hosts.txt"]),
        (["--cwd", ""], ["folder"]),
        (["--output-filename", "h"], []),
        (["-np", "2", "tru"], ["true", "truncate"]),
        (["-np", "2", "cat", "host"], ["hosts.txt"]),
    ],
)
def test_bash(complete, words, offered):
    found = complete(*words)
    assert set(offered) <= set(found)
    assert bool(found) is bool(offered)
    if words[-1]:
        assert all(word.startswith(words[-1]) for word in found)


def test_environment_variables_are_offered(complete, monkeypatch):
    monkeypatch.setenv("HVLAUNCH_TEST_NAME", "1")
    assert "HVLAUNCH_TEST_NAME" in complete("-x", "HVLAUNCH_TEST")


FISH = [
    ("--co", ["--color", "--connect-limit"]),
    ("-n", ["-np"]),
    ("--color ", ["auto", "always", "never"]),
    ("-np 2 --stdin a", ["all"]),
    ("-machinefile hosts.txt --mer", ["--merge"]),
    ("--blacklist-cooldown-range 1 2 --mer", ["--merge"]),
    ("--hostfile ho", ["hosts.txt"]),
    ("--cwd ", ["folder/"]),
    ("-np 2 tru", ["true", "truncate"]),
    ("-np 2 cat host", ["hosts.txt"]),
    ("-np 2 git --no-pa", ["--no-pager"]),
    ("-- cat --col", []),
    ("-x HVLAUNCH_TEST", ["HVLAUNCH_TEST_NAME"]),
]
"""What is typed after `hvlaunch`, and what must be offered."""


@pytest.fixture
def jobs(tmp_path):
    """The environment of somebody with two jobs."""
    about = (
        {"id": "4a5fac6ebd8e", "name": "base-line.1", "command": ['"name": "no"']},
        {
            "id": "0123456789ab",
            "name": None,
            "command": ["x"],
        },
    )
    for job in about:
        directory = tmp_path / "state/hvlaunch/jobs" / str(job["id"])
        directory.mkdir(parents=True)
        (directory / "about.json").write_text(json.dumps(job))
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}


JOB_LINES = [
    ("attach ", ["--ranks", "--help", "0123456789ab", "4a5fac6ebd8e", "base-line.1"]),
    ("logs --s", ["--since"]),
    ("stop 4a", ["4a5fac6ebd8e"]),
    ("signal US", ["USR1", "USR2"]),
    ("jobs --", ["--all", "--json", "--help"]),
    ("wait base", ["base-line.1"]),
    ("forget x", []),
]


@pytest.mark.parametrize(("line", "offered"), JOB_LINES)
def test_bash_knows_jobs(complete, jobs, monkeypatch, line, offered):
    monkeypatch.setenv("XDG_STATE_HOME", jobs["XDG_STATE_HOME"])
    assert complete(*line.split(" ")) == offered


def test_fish_knows_jobs(tmp_path, jobs):
    if shutil.which("fish") is None:
        pytest.skip("no fish here")
    (tmp_path / "script").write_text(script("fish"))
    commands = "".join(f"complete -C 'hvlaunch {line}'; echo =\n" for line, _ in JOB_LINES)
    done = subprocess.run(
        ["fish", "-c", f"source script\n{commands}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=jobs,
        timeout=60,
        check=True,
    )
    offered = [{line for line in block.split("\n") if line} for block in done.stdout.split("=\n")]
    assert offered[:-1] == [set(found) for _, found in JOB_LINES]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_job_that_is_typed_with_the_tab_key(shell, tmp_path, jobs):
    assert typed(shell, tmp_path, b"hvlaunch att\t4a\t --ra\t0\n", jobs) == "attach 4a5fac6ebd8e --ranks 0\n"


def test_fish(tmp_path):
    if shutil.which("fish") is None:
        pytest.skip("no fish here")
    (tmp_path / "script").write_text(script("fish"))
    here = tmp_path / "here"
    (here / "folder").mkdir(parents=True)
    (here / "hosts.txt").touch()
    commands = "".join(f"complete -C 'hvlaunch {line}'; echo =\n" for line, _ in FISH)
    done = subprocess.run(
        ["fish", "-c", f"source ../script\n{commands}"],
        capture_output=True,
        text=True,
        cwd=here,
        env={**os.environ, "HOME": str(tmp_path), "HVLAUNCH_TEST_NAME": "1"},
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    offered = [{line.partition("\t")[0] for line in block.split("\n")} for block in done.stdout.split("=\n")]
    for (line, wanted), found in zip(FISH, offered, strict=False):
        assert set(wanted) <= found, line
        assert all(each.startswith(line.split(" ")[-1]) for each in found if each), line


SHELLS = {
    "bash": ("bash --norc --noprofile", "source ../_hvlaunch"),
    "zsh": ("zsh -f", "fpath=(.. $fpath); autoload -Uz compinit; compinit -u -D"),
    "tcsh": ("tcsh -f", "source ../_hvlaunch"),
    "fish": ("fish", "source ../_hvlaunch"),
}
"""How they are started, and where their users put the script."""
IN_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_line_that_is_typed_with_the_tab_key(shell, tmp_path):
    line = b"hvlaunch -np 2 --colo\tal\t-hostf\thos\tcat hosts\t\n"
    assert typed(shell, tmp_path, line, {}) == "-np 2 --color always -hostfile hosts.txt cat hosts.txt\n"


def typed(shell, tmp_path, keys, more):
    """What a program of the name gets, when these keys are typed."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    (tmp_path / "_hvlaunch").write_text(script(shell))
    here = tmp_path / "here"
    here.mkdir()
    (here / "hosts.txt").touch()
    program = tmp_path / "bin" / "hvlaunch"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$*" > typed.part\nmv typed.part typed\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    environ = {**more, "HOME": str(tmp_path), "TERM": "vt100", "PATH": path}
    start, setup = SHELLS[shell]
    master, slave = pty.openpty()
    words = [sys.executable, "-c", IN_TERMINAL, *start.split()]
    process = subprocess.Popen(
        words, stdin=slave, stdout=slave, stderr=slave, cwd=here, env=environ, start_new_session=True
    )
    os.close(slave)
    try:
        os.write(master, f"{setup}; echo re''ady\n".encode())
        screen = b""
        while b"ready" not in screen:
            screen += on_screen(master)
        os.write(master, keys)
        while not (here / "typed").exists():
            screen += on_screen(master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
    return (here / "typed").read_text()


def on_screen(terminal):
    assert select.select([terminal], [], [], 30)[0], "the shell says nothing"
    return os.read(terminal, 65_536)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_can_read_it(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    path = tmp_path / "script"
    path.write_text(script(shell))
    done = subprocess.run([shell, "-n", str(path)], capture_output=True, timeout=60, check=True)
    assert done.stderr == b""


def test_tcsh():
    text = script("tcsh")
    assert "'n/--hostfile/f/'" in text
    assert "'n/--color/(auto always never)/'" in text
    assert "'p/*/f/'" in text
    if shutil.which("tcsh") is not None:
        done = subprocess.run(
            ["tcsh", "-f"], input=text.encode(), capture_output=True, timeout=60, check=True
        )
        assert done.stderr == b""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_every_long_flag_is_in_it(shell):
    with pytest.raises(Answered) as caught:
        parse(["--help"])
    lines = [line for line in caught.value.text.splitlines() if line.startswith("  -")]
    flags = {word for line in lines for word in re.sub("[,.]", " ", line).split() if word.startswith("--")}
    text = script(shell)
    assert {"--prefix", "--hosts", "--lease"} <= flags
    assert [flag for flag in sorted(flags) if flag[2:] not in text] == []
