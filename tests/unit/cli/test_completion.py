"""--print-completion: the scripts are tried in their shells."""

import re
import shutil
import subprocess

import pytest

from hvlaunch.cli.arguments import Answer, parse

BASH = """\
source "$1"
cd "$2"
shift 2
COMP_WORDS=("$@") COMP_CWORD=$(( $# - 1 ))
_shtab_hvlaunch 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell):
    with pytest.raises(Answer) as caught:
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


@pytest.mark.parametrize("shell", ["bash", "zsh"])
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


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_every_long_flag_is_in_it(shell):
    with pytest.raises(Answer) as caught:
        parse(["--help"])
    lines = [line for line in caught.value.text.splitlines() if line.startswith("  -")]
    flags = {word for line in lines for word in re.sub("[,.]", " ", line).split() if word.startswith("--")}
    text = script(shell)
    assert {"--prefix", "--hosts", "--lease"} <= flags
    assert [flag for flag in sorted(flags) if flag[2:] not in text] == []
