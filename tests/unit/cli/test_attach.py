"""Looking on at jobs: attach and logs, with real jobs, in real terminals."""

import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hvlaunch.cli.jobs import run_job_command
from hvlaunch.cli.jobs.output import Viewed
from hvlaunch.console.output_store import Position
from hvlaunch.errors import BadUsage
from hvlaunch.outside import has_driver, known_jobs
from hvlaunch.outside.control import DriverGone
from tests.testhosts.places import wait_until
from tests.unit.cli.job_site import DEADLINE, Site

HVLAUNCH = [sys.executable, "-m", "hvlaunch"]
STEPPING = """\
import os, sys, time
for step in range(1000):
    while not os.path.exists(f"{sys.argv[1]}/{step // 100}"): time.sleep(0.01)
    print("step", step, flush=True)
sys.exit(int(sys.argv[2]))
"""
"""Prints 1,000 lines; a hundred for each file that there is."""


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, site: Site, *words: str) -> None:
        self.pid, self.master = pty.fork()
        if not self.pid:
            os.execve(sys.executable, [*HVLAUNCH, *words], {**site.environ, "TERM": "xterm"})
        self.seen = b""
        self.began = time.monotonic()

    def read_until(self, text: bytes) -> None:
        while text not in self.seen:
            self.seen += os.read(self.master, 1 << 16)

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def end(self) -> int:
        """All that it prints until it ends, and its exit code."""
        try:
            while data := os.read(self.master, 1 << 16):
                self.seen += data
        except OSError:  # EIO: nobody has the other side open
            pass
        os.close(self.master)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def steps(self) -> list[int]:
        return [int(number) for number in re.findall(rb"step (\d+)\r\n", self.seen)]


class Steps:
    """A detached job whose worker prints when it may."""

    def __init__(self, site: Site, go: Path, *words: str, code: int = 0, first: int = 1) -> None:
        self.site, self.go = site, go
        self.let(*range(first))
        command = [*HVLAUNCH, "--detach", *words, sys.executable, "-c", STEPPING, str(go), str(code)]
        started = subprocess.run(
            command, env=site.environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
        )
        self.id = started.stdout.strip()

    def let(self, *hundreds: int) -> None:
        for number in hundreds:
            (self.go / str(number)).touch()

    def await_step(self, number: int) -> None:
        wait_until(lambda: f"step {number}\n" in logs(self.site, self.id), f"step {number}")


def logs(site: Site, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [*HVLAUNCH, "logs", *words],
        env=site.environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE,
    )
    assert done.returncode == code, done.stderr
    return done.stdout


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "state")
    yield site
    site.close()
    site.kill_jobs()


@pytest.fixture
def go(tmp_path: Path) -> Path:
    directory = tmp_path / "go"
    directory.mkdir()
    return directory


def test_ten_viewers_in_turn_see_each_line_once(site, go):
    job = Steps(site, go)
    seen = []
    for number in range(10):
        job.let(number)
        terminal = Terminal(site, "attach", job.id)
        terminal.read_until(b"step %d\r\n" % (100 * number + 99))
        if number < 9:
            terminal.type(b"\x03")
        assert terminal.end() == 0
        assert number == 9 or b"hvlaunch stop " + job.id.encode() in terminal.seen
        seen += terminal.steps
    assert seen == list(range(1000))


STREAMING = """\
import itertools, os, sys, time
while not os.path.exists(f"{sys.argv[1]}/0"): time.sleep(0.01)
for step in itertools.count():
    os.write(1, b"step %d\\n" % step)  # whole lines: one that is cut by Ctrl-C is shown in two parts
    if os.path.exists(f"{sys.argv[1]}/1"): break
    time.sleep(0.002)
print("that was step", step, flush=True)
"""


def test_ctrl_c_at_any_moment_neither_repeats_nor_loses_a_line(site, go):
    line = [*HVLAUNCH, "--detach", sys.executable, "-c", STREAMING, str(go)]
    subprocess.run(line, env=site.environ, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    chance, seen = random.Random(1), []
    for number in range(12):
        terminal = Terminal(site, "attach")
        terminal.read_until(b"Ctrl-C leaves it running")
        (go / "0").touch()
        time.sleep(chance.random() / 4)
        os.kill(terminal.pid, signal.SIGINT)  # for a key, a terminal drops what it has not shown
        assert terminal.end() == 0, (number, terminal.seen[-600:])
        seen += terminal.steps
    terminal = Terminal(site, "attach")
    terminal.read_until(b"Ctrl-C leaves it running")
    (go / "1").touch()
    assert terminal.end() == 0
    *steps, last = [*seen, *terminal.steps]
    assert steps == list(range(last + 1))


def test_an_interrupt_while_the_position_is_saved(site, go, monkeypatch):
    job = Steps(site, go)
    [known] = [each for each in known_jobs(site.root) if each.id == job.id]
    write = os.pwrite

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return write(*args)

    monkeypatch.setattr(os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Viewed(known).note(Position(1, 77))
    assert Viewed(known).position == Position(1, 77)


def test_the_first_look_begins_with_the_last_hundred_lines(site, go):
    job = Steps(site, go, first=9)
    job.await_step(899)
    job.let(9)
    terminal = Terminal(site, "attach", job.id)
    assert terminal.end() == 0
    assert 97 <= len(terminal.steps) <= 200
    assert terminal.steps == list(range(1000 - len(terminal.steps), 1000))


def test_two_viewers_at_once_get_the_jobs_exit_code(site, go):
    job = Steps(site, go, code=7)
    terminals = [Terminal(site, "attach") for _ in range(2)]
    for terminal in terminals:
        terminal.read_until(b"running, 1 worker on localhost")
    job.let(*range(1, 10))
    for terminal in terminals:
        assert terminal.end() == 7
        assert terminal.steps[-900:] == list(range(100, 1000))
        assert b"exit code 7" in terminal.seen
    after = Terminal(site, "attach", job.id)
    assert after.end() == 7
    assert b"has ended" in after.seen


def test_a_job_in_another_terminal_is_shown_from_its_newest_lines_on(site, go):
    (go / "0").touch()
    first = Terminal(site, sys.executable, "-c", STEPPING, str(go), "0")
    first.read_until(b"step 99\r\n")
    second = Terminal(site, "attach")
    second.read_until(b"step 99\r\n")
    second.type(b"\x03")
    assert second.end() == 0
    assert second.steps[:2] == [0, 1]
    third = Terminal(site, "attach")
    third.read_until(b"running")
    for number in range(1, 10):
        (go / str(number)).touch()
    assert first.end() == 0
    assert third.end() == 0
    assert third.steps == list(range(100, 1000))
    assert first.steps == list(range(1000))


def test_bars_and_colours_are_as_in_the_jobs_terminal(site, tmp_path):
    bar = (
        "import os, sys, time\n"
        "for number in range(10**6):\n"
        "    sys.stderr.write(f'\\rbar {number}'); sys.stderr.flush(); time.sleep(0.02)\n"
    )
    subprocess.run(
        [*HVLAUNCH, "--detach", sys.executable, "-c", bar], env=site.environ, check=True, capture_output=True
    )
    terminal = Terminal(site, "attach")
    terminal.read_until(b"\x1b[0;36m[0]<stderr>: \x1b[0mbar ")
    before = terminal.seen
    terminal.seen = b""
    terminal.read_until(b"bar ")
    terminal.type(b"\x03")
    assert terminal.end() == 0
    assert b"\n" not in before[before.rindex(b"bar ") :].removesuffix(b"\r\n")


def test_output_of_a_stopped_driver_is_shown(site, go):
    job = Steps(site, go)
    job.await_step(99)
    [known] = known_jobs(site.root)
    os.kill(known.about["pid"], signal.SIGSTOP)
    try:
        terminal = Terminal(site, "attach")
        terminal.read_until(b"step 99\r\n")
        terminal.read_until(b"does not answer")
        terminal.type(b"\x03")
        assert terminal.end() == 0
    finally:
        os.kill(known.about["pid"], signal.SIGCONT)


def test_a_viewer_that_leaves_does_not_affect_the_job(site, go):
    job = Steps(site, go)
    terminal = Terminal(site, "attach")
    terminal.read_until(b"step 99\r\n")
    os.close(terminal.master)
    os.waitpid(terminal.pid, 0)
    job.let(*range(1, 10))
    assert site.do("wait", job.id) == 0


def test_logs(site, go, capfd):
    job = Steps(site, go, "-np", "2", "--prefix", "{rank}|{host}|", code=3)
    job.await_step(99)
    following = subprocess.Popen(
        [*HVLAUNCH, "logs", "-f", "--ranks", "1", job.id], env=site.environ, stdout=subprocess.PIPE, text=True
    )
    middle = time.time()
    job.let(*range(1, 10))
    assert site.do("wait", job.id) == 3
    output, _ = following.communicate(timeout=DEADLINE)
    assert following.returncode == 0
    of_one = "".join(f"1|localhost|step {number}\n" for number in range(1000))
    assert output == of_one
    assert logs(site, job.id, "--ranks", "1") == of_one
    assert logs(site, job.id, "--since", "0s") == ""
    recent = logs(site, job.id, "--ranks", "1", "--since", f"{time.time() - middle:.0f}s")
    assert of_one.endswith(recent)
    records = [json.loads(line) for line in logs(site, job.id, "--json").splitlines()]
    text = "".join(
        record["text"] for record in records if (record["rank"], record["stream"]) == (1, "stdout")
    )
    assert text == "".join(f"step {number}\n" for number in range(1000))
    assert [record["stream"] for record in records if record["rank"] is None] == ["hvlaunch", "report"]


def test_logs_of_a_job_without_a_driver_say_so(site, go, capfd, monkeypatch):
    """As after a start of the machine: what is kept is printed, and how to go on."""
    monkeypatch.setattr("hvlaunch.cli.jobs.output._DRIVER_PATIENCE", 0.2)
    job = Steps(site, go)
    job.await_step(99)
    [known] = known_jobs(site.root)
    driver = psutil.Process(known.about["pid"])
    for process in (*driver.children(), driver):  # its minder too
        process.kill()
    wait_until(lambda: not has_driver(known.directory), "the driver is gone")
    assert site.do("logs", job.id) == 0
    capfd.readouterr()
    with pytest.raises(DriverGone, match="has had no driver for") as error:
        site.do("logs", "-f", job.id)
    assert capfd.readouterr().out.splitlines()[-1] == "[0]<stdout>: step 99"
    assert error.value.exit_code == 69
    assert f"hvlaunch attach {job.id}" in str(error.value.hint)


ODD = {
    "all bytes": "sys.stdout.buffer.write(bytes(set(range(256)) - {13}) * 40)",
    "a huge line": "print('x' * 5_000_000)",
    "no end": "sys.stdout.write('one line, unfinished')",
    "a bar": "[print(f'bar {number}', end='\\r') for number in range(20_000)]; print()",
    "nothing": "pass",
}


@pytest.mark.parametrize("program", ODD.values(), ids=ODD)
def test_output_is_the_same_as_in_the_terminal_it_did_not_have(site, program):
    words = [sys.executable, "-c", f"import sys; {program}"]
    alone = subprocess.run([*HVLAUNCH, *words], env=site.environ, capture_output=True, check=True)
    detached = subprocess.run(
        [*HVLAUNCH, "--detach", *words], env=site.environ, capture_output=True, check=True
    )
    job = detached.stdout.decode().strip()
    assert site.do("wait", job) == 0
    for word in ("logs", "attach"):
        seen = subprocess.run([*HVLAUNCH, word, job], env=site.environ, capture_output=True, check=True)
        # Of a bar without a terminal some states are printed, as time goes by; the last one always.
        whole = slice(-1, None) if "bar" in program else slice(None)
        assert seen.stdout.splitlines()[whole] == alone.stdout.splitlines()[whole]


def test_logs_into_a_pipe_that_is_closed(site, go):
    job = Steps(site, go, first=9)
    job.await_step(899)
    command = f"{sys.executable} -m hvlaunch logs {job.id} | head -1"
    done = subprocess.run(
        ["bash", "-c", f"{command}; echo ${{PIPESTATUS[0]}}"],
        env=site.environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    assert done.stdout.splitlines() in (["[0]<stdout>: step 0", "141"], ["[0]<stdout>: step 0", "0"])
    assert "Traceback" not in done.stderr


def test_output_that_can_not_be_read_is_one_message(site, go):
    job = Steps(site, go)
    [known] = known_jobs(site.root)
    site.do("stop", "--kill", job.id)
    output = known.directory / "output.000001"
    output.unlink()
    output.symlink_to("/dev/null")
    for word in ("attach", "logs"):
        with pytest.raises(BadUsage, match=r"output\.000001: too many levels of symbolic links"):
            site.do(word, job.id)


@pytest.mark.parametrize(
    "words", [["logs", "--since", "soon"], ["logs", "--ranks", "x"], ["attach", "--ranks", "-"]]
)
def test_malformed_options_are_refused(site, words):
    with pytest.raises(Exception, match=r"--since|--ranks"):
        run_job_command(words, site.environ)
