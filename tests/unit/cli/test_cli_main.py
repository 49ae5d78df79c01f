"""main(): exit codes, one line for each error, never a traceback; in this process and in one of its own."""

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import hvlaunch
from hvlaunch.cli.main import main
from hvlaunch.errors import BadUsage, ConnectFailed, HostsFailed, HvlaunchError, WorkingDirectoryMissing
from hvlaunch.job import Host, JobResult

ROOT = Path(hvlaunch.__file__).parents[1]


class FakeDriver:
    """Keeps the spec, and ends with this code, or this error."""

    def __init__(self, code=0, error=None, words=None):
        self.code = code
        self.words = words
        self.error = error
        self.specs = []

    def __call__(self, spec, *, stdout, stderr, on_detached=None, advise=str):
        self.specs.append(spec)
        if self.words is not None:
            stdout.write(self.words)
            stderr.write(self.words)
        if self.error is not None:
            raise self.error
        return JobResult(exit_code=self.code, elapsed=0.0)


def never(spec, *, stdout, stderr, on_detached=None, advise=str):
    pytest.fail("a job was started")


def hvlaunch_process(*words, **options):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "hvlaunch", *words],
        capture_output=True,
        env=environ,
        timeout=60,
        check=False,
        **options,
    )


@pytest.mark.parametrize("code", [0, 1, 7, 130, 137])
def test_the_exit_code_is_the_jobs(code):
    driver = FakeDriver(code)
    assert main(["-np", "2", "python", "train.py", "--np", "3"], run=driver) == code
    (spec,) = driver.specs
    assert spec.hosts == (Host("localhost", slots=2),)
    assert spec.command == ("python", "train.py", "--np", "3")


def test_the_driver_gets_bytes_streams(capsysbinary):
    main(["true"], run=FakeDriver(words=b"\xff"))
    assert capsysbinary.readouterr() == (b"\xff", b"\xff")


def test_the_environment_is_this_process_own(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    driver = FakeDriver()
    main(["true"], run=driver)
    assert driver.specs[0].env["NCCL_DEBUG"] == "INFO"


BAD_LINES = [
    ("", "no command to run"),
    ("-np 0 true", "-np/--num-proc"),
    ("-np x true", "-np/--num-proc"),
    ("--bogus true", "unknown option '--bogus'"),
    ("-H a -hostfile b true", "not allowed with"),
    ("-H a:0 true", "a:0"),
    ("-H gpu[1- true", "gpu[1-"),
    ("-hostfile /no/such/file true", "/no/such/file"),
    ("-hostfile {bad_hosts} true", "{bad_hosts}:2"),
    ("--env-file /no/such/file true", "/no/such/file"),
    ("--env-file {bad_env} true", "{bad_env}:2: no closing quote"),
    ("-i /no/such/file true", "/no/such/file"),
    ("-x =1 true", "the name is empty"),
    ("--lease 0 true", "--lease"),
    ("--prefix {{rnak}} true", "unknown field {{rnak}}"),
    ("--ranks 1-x true", "'1-x' is neither a rank nor a range"),
    ("--dry-run -np 3 -H localhost:2 true", "3 workers were asked for, but the hosts have only 2 slots"),
]


@pytest.mark.parametrize(("line", "part"), BAD_LINES)
def test_bad_usage_is_one_line_and_2(line, part, capsys, tmp_path):
    names = {"bad_hosts": tmp_path / "hosts", "bad_env": tmp_path / "env"}
    names["bad_hosts"].write_text("a slots=2\nb slots=many\n")
    names["bad_env"].write_text("A=1\nB='open\n")
    assert main(line.format(**names).split(), run=never) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"hvlaunch: [^\n]+\n", err)
    assert part.format(**names) in err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (BadUsage("no", hint="yes"), 2, "hvlaunch: no; try: yes\n"),
        (ConnectFailed("refused", host="a"), 69, "hvlaunch: host a: refused\n"),
        (
            WorkingDirectoryMissing("none", host="a", path="/d", hint="--cwd"),
            2,
            "hvlaunch: host a: none; try: --cwd\n",
        ),
        (HvlaunchError("odd"), 70, "hvlaunch: odd\n"),
        (
            HostsFailed(
                [ConnectFailed("refused", host="a").problem, ConnectFailed("reset", host="b").problem]
            ),
            69,
            "hvlaunch: host a: refused\nhvlaunch: host b: reset\n",
        ),
        (
            ConnectFailed("said \x1b[31mred\r\x07\udcff", host="a"),
            69,
            "hvlaunch: host a: said \\x1b[31mred\\r\\x07\\udcff\n",
        ),
    ],
)
def test_errors_of_a_job(error, code, text, capsys):
    assert main(["true"], run=FakeDriver(error=error)) == code
    assert capsys.readouterr().err == text


def test_a_defect_is_70_and_one_line(capsys):
    assert main(["true"], run=FakeDriver(error=RuntimeError("oh\nno"))) == 70
    err = capsys.readouterr().err
    assert re.fullmatch(r"hvlaunch: internal error: RuntimeError: oh no; [^\n]*--verbose[^\n]*\n", err)


def test_with_verbose_a_defect_shows_its_traceback(capsys):
    assert main(["--verbose", "true"], run=FakeDriver(error=RuntimeError("oh no"))) == 70
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "hvlaunch doctor" in err.splitlines()[-1]


@pytest.mark.parametrize("module", ["hvlaunch.cli.main", "hvlaunch.errors", "hvlaunch.gloo.controller"])
def test_an_interrupt_while_a_module_is_imported_is_130_and_quiet(module):
    program = f"""if True:
        import runpy, signal, sys
        class Interrupts:
            def find_spec(self, name, path=None, target=None):
                if name == {module!r}:
                    signal.raise_signal(signal.SIGINT)
        sys.meta_path.insert(0, Interrupts())
        sys.argv = ["hvlaunch", "-np", "1", "true"]
        runpy.run_module("hvlaunch", run_name="__main__")
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize("limit", [10, 16, 24])
def test_too_few_descriptors_are_one_message(limit):
    command = f"ulimit -n {limit}; exec {sys.executable} -m hvlaunch -np 1 true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    message = f"the limit on open files is too low for hvlaunch: {limit}; try: ulimit -n 1024"
    assert (done.returncode, done.stderr) == (2, f"hvlaunch: {message}\n")


def test_an_interrupt_while_the_line_is_read_is_130(capsys):
    assert main(["true"], run=FakeDriver(error=KeyboardInterrupt())) == 130


def test_warnings_do_not_end_the_job(capsys, monkeypatch):
    monkeypatch.delenv("GONE", raising=False)
    assert main(["-x", "GONE", "true"], run=FakeDriver()) == 0
    assert capsys.readouterr().err.startswith("hvlaunch: warning: variable GONE is not set here")


def test_quiet_is_without_warnings(capsys, monkeypatch):
    monkeypatch.delenv("GONE", raising=False)
    assert main(["--quiet", "-x", "GONE", "true"], run=FakeDriver()) == 0
    assert capsys.readouterr().err == ""


def test_variables_that_other_hosts_do_not_get_are_named(capsys, monkeypatch):
    monkeypatch.setenv("FOO_A", "hunter2")
    monkeypatch.setenv("FOO_B", "hunter2")
    assert main(["--verbose", "-H", "a:1", "true"], run=FakeDriver()) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not passed on" in line]
    assert line.startswith("hvlaunch: set here, and not passed on to the workers: ")
    assert "FOO_*" in line.replace(",", "").split()
    assert main(["--dry-run", "-v", "-H", "a:1", "true"], run=never) == 0
    section = capsys.readouterr().out.partition("set here, and not passed on")[2]
    assert "FOO_*" in section.replace(",", "").split()
    for words in (["-H", "a:1", "true"], ["--verbose", "-np", "1", "true"]):
        assert main(words, run=FakeDriver()) == 0
        assert "FOO_" not in capsys.readouterr().err


def test_a_proxy_with_a_password_stays_here_and_that_is_said(capsys, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://me:hunter2@proxy:3128")
    warning = "hvlaunch: warning: https_proxy has a user or password in it, so it is not passed on; try: -x https_proxy\n"
    for words, err in (
        (["-H", "a:1", "true"], warning),
        (["-H", "a:1", "-x", "https_proxy", "true"], ""),
        (["-np", "1", "true"], ""),
    ):
        assert main(words, run=FakeDriver()) == 0
        assert capsys.readouterr().err == err


def test_dry_run_prints_the_plan_and_starts_nothing(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    assert main(["--dry-run", "-v", "-np", "2", "-x", "A=\n", "python", "\udcff"], run=never) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\nenvironment by rank:\n  rank " in out
    assert out.startswith(
        "2 workers on 1 host:\n  host       slots  ranks  reached by\n  localhost  2      0-1    this machine, without ssh\n"
    )
    assert "HF_TOKEN=****" in out
    assert "hunter2" not in out


@pytest.mark.parametrize(
    ("words", "part"),
    [(["-cb"], "[X] gloo"), (["--version"], hvlaunch.__version__), (["--help"], "examples:")],
)
def test_questions_exit_with_0(words, part, capsys):
    assert main(words, run=never) == 0
    assert part in capsys.readouterr().out


def test_text_that_the_terminal_can_not_show_is_escaped(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["--dry-run", "-np", "1", "echo", "ü"], run=never) == 0
    assert b"echo '\\xfc'" in raw.getvalue()


@pytest.mark.parametrize(
    "line", ["", "-np 0 true", "--bogus true", "-hostfile /no/such/file true", "-H a:0 true"]
)
def test_a_real_process_ends_with_one_line_and_2(line):
    done = hvlaunch_process(*line.split())
    assert done.returncode == 2
    assert done.stdout == b""
    assert re.fullmatch(rb"hvlaunch: [^\n]+\n", done.stderr)


def test_the_words_of_a_real_process_may_be_any_bytes():
    done = hvlaunch_process(
        "--dry-run", "-v", "-np", "1", "-x", b"A=\xff", "echo", b"\xfe\n", env={"LC_ALL": "C"}
    )
    assert done.returncode == 0
    assert rb"echo $'\376\n'" in done.stdout
    assert rb"A=$'\377'" in done.stdout
    assert done.stderr == b""


@pytest.mark.parametrize("words", ["--help", "--dry-run -np 900 true", "--check-build", "--version"])
def test_a_closed_pipe_gives_no_traceback(words):
    read, write = os.pipe()
    os.close(read)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "hvlaunch", *words.split()]
    done = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, env=environ, timeout=60, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("words", ["--version", "--dry-run -np 1 true"])
def test_a_full_disk_is_reported(words):
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = f"exec {sys.executable} -m hvlaunch {words} >/dev/full"
    done = subprocess.run(
        ["/bin/sh", "-c", script], stderr=subprocess.PIPE, env=environ, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (74, b"hvlaunch: stdout: no space left on device\n")


@pytest.mark.parametrize("words", ["--version", "--dry-run -np 1 true", "--help"])
def test_a_closed_stdout_gives_no_traceback(words):
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = f"exec {sys.executable} -m hvlaunch {words} >&-"
    done = subprocess.run(["sh", "-c", script], stderr=subprocess.PIPE, env=environ, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_ctrl_c_while_a_file_is_read(tmp_path):
    fifo = tmp_path / "hosts"
    os.mkfifo(fifo)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "hvlaunch", "-hostfile", str(fifo), "true"]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, env=environ)
    with fifo.open("wb"):  # opens once the process reads
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")
