"""Lines to paste into any shell, and a command that is no program but looks like a word of hvlaunch."""

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import hvlaunch
from hvlaunch.cli.line import whole_line, with_python, with_whole_lines
from hvlaunch.cli.main import main
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.discovery import HostScript
from hvlaunch.hosts.parse import read_hostfile
from hvlaunch.job import JobResult
from hvlaunch.rendezvous.token_file import BadTokenFile, read_token_file

ROOT = Path(hvlaunch.__file__).parents[1]


class Jobs:
    """Keeps the specs of the jobs that are started."""

    def __init__(self):
        self.specs = []

    def __call__(self, spec, *, stdout, stderr, on_detached=None, advise=str):
        self.specs.append(spec)
        return JobResult(exit_code=0, elapsed=0.0)


@pytest.fixture
def bin_directory(tmp_path, monkeypatch):
    """The only directory on PATH."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.chdir(tmp_path)
    make_program(directory / "python")
    return directory


def make_program(path):
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


ANSWERS = [
    ("run", "hvlaunch -np 2 python train.py"),
    ("run train.py", "hvlaunch train.py"),
    ("-np 2 A=b/c python train.py", "hvlaunch -np 2 -x A=b/c python train.py"),
    ("-np 2 TOKEN=f4c1 python train.py", "hvlaunch -np 2 -x 'TOKEN=****' python train.py"),
    ("-np 2 'python train.py --lr 0.1'", "hvlaunch -np 2 python train.py --lr 0.1"),
    ("'python train/it.py' x", "hvlaunch python train/it.py x"),
    ("-np 2 launch python train.py --np 3", "hvlaunch -np 2 python train.py --np 3"),
    ("status", "hvlaunch jobs"),
    ("list", "hvlaunch jobs"),
    ("jbos", "hvlaunch jobs"),
    ("tpo", "hvlaunch top"),
    ("attac 3f --ranks 0", "hvlaunch attach 3f --ranks 0"),
    ("stop2", "hvlaunch stop"),
    ("metric", "hvlaunch metrics"),
    ("-v jobs", "hvlaunch jobs"),
    ("-H a:2 jbos", "hvlaunch jobs, or hvlaunch -H a:2 -- jbos for a program of the hosts"),
    ("-H h1:2 h2:2 python train.py", "hvlaunch -H h1:2,h2:2 python train.py"),
    (
        "-H h1 -np 2 h2 python train.py",
        "hvlaunch -np 2 -H h1,h2 python train.py, or hvlaunch -H h1 -np 2 -- h2 python train.py for a program of the hosts",
    ),
]


@pytest.mark.parametrize(("line", "answer"), ANSWERS)
@pytest.mark.usefixtures("bin_directory")
def test_a_word_meant_for_hvlaunch_starts_no_job(line, answer, capsys):
    jobs = Jobs()
    assert main(shlex.split(line), run=jobs) == 2
    assert jobs.specs == []
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.endswith(f"; try: {answer}\n")


@pytest.mark.parametrize(
    "line", ["train", "-- jbos", "./status", "x", "-H h1 true", "-- A=1 true", "'my train'", "./a=b"]
)
@pytest.mark.usefixtures("bin_directory")
def test_other_words_are_commands(line):
    jobs = Jobs()
    assert main(shlex.split(line), run=jobs) == 0
    assert len(jobs.specs) == 1


def test_the_program_of_a_preset_is_not_taken_for_a_host(bin_directory, capsys):
    make_program(bin_directory / "serve")  # as Ray and npm have it
    line = "-H h1 vllm serve M"
    jobs = Jobs()
    assert main(["--for", "vllm", *line.split()], run=jobs) == 0
    assert jobs.specs[0].command == ("vllm", "serve", "M")
    assert main(line.split(), run=jobs) == 2
    assert "or hvlaunch -H h1 -- vllm serve M for a program of the hosts" in capsys.readouterr().err
    assert main(["--for", "vllm", "-H", "h1", "h2", "python", "x.py"], run=jobs) == 2
    assert "h2 is no program: hosts are separated by commas" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["run", "status", "jbos", "help", "version"])
def test_a_program_of_such_a_name_still_runs(word, bin_directory):
    make_program(bin_directory / word)
    jobs = Jobs()
    assert main([word, "x"], run=jobs) == 0
    assert jobs.specs[0].command == (word, "x")


@pytest.mark.usefixtures("bin_directory")
def test_a_file_of_such_a_name_is_a_command(tmp_path):
    (tmp_path / "status").write_text("")
    jobs = Jobs()
    assert main(["status"], run=jobs) == 0


@pytest.mark.parametrize(
    ("line", "text"),
    [("help", "usage: hvlaunch [-np N]"), ("version", "hvlaunch "), ("help stop", "usage: hvlaunch stop ")],
)
@pytest.mark.usefixtures("bin_directory")
def test_help_and_version_are_questions(line, text, capsys):
    assert main(line.split(), run=Jobs()) == 0
    assert capsys.readouterr().out.startswith(text)


def test_a_script_is_run_by_python(bin_directory, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    jobs = Jobs()
    for words in (["train.py", "-x"], ["--", "./train.py"], ["-m", "train.py"], ["lacking.py"]):
        assert main(words, run=jobs) == 0
    script.chmod(0o755)
    assert main(["./train.py"], run=jobs) == 0
    assert main(["train.py"], run=jobs) == 0
    make_program(bin_directory / "train.py")
    assert main(["train.py"], run=jobs) == 0
    assert [spec.command for spec in jobs.specs] == [
        ("python", "train.py", "-x"),
        ("python", "./train.py"),
        ("python", "-m", "train.py"),
        ("lacking.py",),
        ("./train.py",),
        ("python", "train.py"),
        ("train.py",),
    ]


def test_a_script_is_looked_for_in_the_workers_directory(tmp_path):
    (tmp_path / "train.py").write_text("")
    assert with_python(("train.py",), str(tmp_path)) == ("python", "train.py")
    assert with_python(("train.py",), str(tmp_path / "bin")) == ("train.py",)


@pytest.mark.parametrize(
    ("hint", "line", "whole"),
    [
        ("-np 4", "-v true -np 3", "hvlaunch -v -np 4 true -np 3"),
        ("-np 4", "-np 9 -x A=1 -- -odd", "hvlaunch -x A=1 -np 4 -- -odd"),
        ("-np 2, or more slots (host:N)", "-H a true", "hvlaunch -H a -np 2 true  # or more slots (host:N)"),
        ("-x A=1", "-x B=2 --grace=3 true", "hvlaunch -x B=2 --grace=3 -x A=1 true"),
        ("--output-filename DIR", "true", "--output-filename DIR"),
        ("-x PATH=…", "true", "-x PATH=…"),
        ("--cwd", "true", "--cwd"),
        ("hvlaunch jobs", "true", "hvlaunch jobs"),
        ("-np 4", "--bogus true", "-np 4"),
        ("without --min-np", "true", "without --min-np"),
        ("it's here", "true", "it's here"),
        ("-x A=1, which helps", "-np 2 true", "hvlaunch -np 2 -x A=1 true  # which helps"),
        ("-x A=1; or dmesg", "-np 2 true", "hvlaunch -np 2 -x A=1 true  # or dmesg"),
        ("-H a:1,b:1", "-H a true", "hvlaunch -H a:1,b:1 true"),
        ("-x 'A=b, c'", "true", "hvlaunch -x 'A=b, c' true"),
        ("./train", "-np 2 train -x 3", "hvlaunch -np 2 ./train -x 3"),
        ("python a.py, if it is there", "-- a.py b", "hvlaunch -- python a.py b  # if it is there"),
        ("python evil.py", "-np 2 a.py", "python evil.py"),
        ("-x A=1 evil", "-np 2 true", "-x A=1 evil"),
    ],
)
def test_advice_of_options_is_a_whole_line(hint, line, whole):
    assert whole_line(hint, line.split()) == whole


def test_advice_in_messages_and_reports_is_a_whole_line():
    text = "host a has no GPU; try: -np 4, for more\nrank 1: exit code 3\n    Try: it\n  Try: -x A=1\n"
    assert with_whole_lines(text, ["-np", "2", "true"]).splitlines() == [
        "host a has no GPU; try: hvlaunch -np 4 true  # for more",
        "rank 1: exit code 3",
        "    Try: it",
        "  Try: hvlaunch -np 2 -x A=1 true",
    ]


def test_a_running_job_has_advice_to_paste(tmp_path):
    (tmp_path / "train").write_text("#!/bin/sh\n")
    (tmp_path / "train").chmod(0o755)
    command = [sys.executable, "-m", "hvlaunch", "-np", "2", "train", "a b"]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (127, "  Try: hvlaunch -np 2 ./train 'a b'")
    done = subprocess.run([*command[:3], "true"], env=env, capture_output=True, text=True, check=True)
    cpus = len(os.sched_getaffinity(0))
    if cpus > 1 and "no GPU" in done.stderr:
        assert f"; try: hvlaunch -np {cpus} true  # for a worker on each processor" in done.stderr


def test_an_error_has_the_whole_line(capsys):
    assert main(["--dry-run", "-np", "3", "-H", "localhost:2", "true"]) == 2
    assert "try: hvlaunch --dry-run -H localhost:2 -np 2 true  # or more slots" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("--hostfile nofile true", "hostfile nofile: no such file or directory"),
        ("-i nokey true", "-i/--ssh-identity-file nokey: no such file or directory"),
        ("--env-file none.env true", "--env-file none.env: no such file or directory"),
        ("--dry-run --min-np 1 --host-discovery-script ./no.sh true", "./no.sh: no such file or directory"),
    ],
)
def test_a_missing_file_says_where_a_relative_path_starts(line, cause, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert error.endswith(f"{cause}; try: its full path; a relative one starts at {tmp_path}\n")
    assert main(line.replace("no", "/no").replace("./", "/").split()) == 2
    assert capsys.readouterr().err.endswith("check the path\n")


def test_22_slots_may_be_a_port(capsys):
    assert main(["-H", "h1:22,h2:21", "true"], run=Jobs()) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hvlaunch: warning: host h1 gets 22 workers, since ")
    assert line.endswith("if port 22 of sshd is meant: -H h1 -p 22")


@pytest.mark.parametrize(
    ("line", "warnings"), [("-H h1:2,localhost:1", 1), ("-np 2", 0), ("-H h1 -x CUDA_VISIBLE_DEVICES", 0)]
)
def test_gpus_that_are_chosen_here_only(line, warnings, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert main([*line.split(), "true"], run=Jobs()) == 0
    text = "hvlaunch: warning: CUDA_VISIBLE_DEVICES is set here, and counts for workers on this machine only"
    assert capsys.readouterr().err.count(text) == warnings


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--env A=secret true", "--env: a single variable has an option of its own; try: -x A=VALUE"),
        (
            "--local_rank 0 --standalone",
            "--local_rank is torchrun's, and not needed here: LOCAL_RANK is in the ",
        ),
        ("-r 3 --standalone true", "--redirects 3 --output-filename logs, or another directory"),
    ],
)
def test_habits_of_other_launchers(line, text, capsys):
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "secret" not in error


PACKAGE = Path(hvlaunch.__file__).parent
PAGES = [
    ROOT / "README.md",
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("hostfiles/*.md"),
    *ROOT.glob("examples/*"),
]
UNQUOTED_RANGE = re.compile(r"(?<![\w-])(?:-H|--hosts?|-w|--include|--exclude)[ =](?!['\"])\S*\w\[\d")
"""zsh takes it for a pattern, and finds no file."""
DOUBLE_QUOTES = re.compile(r"""pip install (?:-\S+ )*"|-H "[^"$]*\[""")
PATH_FOLLOWS = re.compile(r"(?:^|[`;:,] ?)(?:chmod \S+|rm|df|cat|cd|mkdir|ssh-keygen (?:-\S+ )*-f) $")


def product() -> Iterator[Path]:
    return (path for path in PACKAGE.rglob("*.py") if "torch" not in path.parts)


@cache
def texts(path: Path) -> list[ast.Constant | ast.JoinedStr]:
    """Return the texts of a module's syntax; three tests read the same modules."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr)]


def strings(path: Path) -> Iterator[str]:
    for node in texts(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def unquoted(path: Path) -> Iterator[str]:
    """Yield commands whose path stands in a message as it is."""
    for node in texts(path):
        if not isinstance(node, ast.JoinedStr):
            continue
        for text, value in zip(node.values, node.values[1:], strict=False):
            if not (isinstance(text, ast.Constant) and isinstance(value, ast.FormattedValue)):
                continue
            is_quoted = isinstance(value.value, ast.Call) and "shlex" in ast.unparse(value.value.func)
            if PATH_FOLLOWS.search(str(text.value)) and not is_quoted:
                yield f"{path.name}:{node.lineno}: {text.value!s}{{{ast.unparse(value.value)}}}"


@pytest.mark.no_cover
@pytest.mark.parametrize("wrong", [UNQUOTED_RANGE, DOUBLE_QUOTES])
def test_ranges_are_in_single_quotes(wrong: re.Pattern[str]) -> None:
    places = [(path, text) for path in product() for text in strings(path)]
    places += [(path, path.read_text()) for path in PAGES if path.is_file()]
    assert [f"{path.name}: {match[0]}" for path, text in places for match in wrong.finditer(text)] == []


@pytest.mark.no_cover
def test_paths_in_commands_are_quoted() -> None:
    assert [line for path in product() for line in unquoted(path)] == []


def test_the_sweep_sees_what_is_wrong(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        'a = f"chmod 600 {path}"\nb = f"x; rm {file}: y"\nc = f"chmod 600 {shlex.quote(path)}"\n'
    )
    assert len([*unquoted(module)]) == 2
    assert UNQUOTED_RANGE.search("hvlaunch -np 2 -H gpu[1-2]:2 true")
    assert not UNQUOTED_RANGE.search("hvlaunch -np 2 -H 'gpu[1-2]:2' true")
    assert DOUBLE_QUOTES.search('pip install "hvlaunch[top]"')


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A file that every user may change, whose name a shell takes apart."""
    path = tmp_path / "my [new] file; $HOME"
    path.write_text("a slots=1\n")
    path.chmod(0o777)
    return path


def test_the_path_of_a_hostfile_is_one_word(odd: Path) -> None:
    with pytest.raises(BadUsage) as error:
        read_hostfile(odd)
    assert shlex.split(str(error.value.hint)) == ["chmod", "o-w", str(odd)]


def test_the_path_of_a_script_is_one_word(odd: Path) -> None:
    with pytest.raises(BadUsage) as error:
        HostScript(shlex.quote(str(odd)), 1.0).read_hosts()
    assert shlex.split(str(error.value.hint)) == ["chmod", "o-w", str(odd)]


def test_the_path_of_a_token_is_one_word(odd: Path) -> None:
    with pytest.raises(BadTokenFile) as error:
        read_token_file(odd)
    assert shlex.split(str(error.value.hint)) == ["chmod", "600", str(odd)]
