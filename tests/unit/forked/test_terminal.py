"""A forked driver at a terminal, of which it is no process: what is typed, Ctrl-C, Ctrl-Z, jobs in the background, a hangup."""

import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from hvlaunch.outside.directory import has_minder
from tests.unit.forked.place import DEADLINE, HVLAUNCH, OTHER_SETTING, ROOT, Place, new_place, wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no fork server")


class Terminal:
    """A shell with job control."""

    def __init__(self, place: Place) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.execvpe(
                "bash",
                ["bash", "--norc", "--noprofile", "-i"],
                {**place.env, "PS1": "ready> ", "TERM": "dumb"},
            )
        self.said = ""
        self.saw("ready> ")

    def type(self, text: str) -> "Terminal":
        os.write(self._fd, text.encode())
        return self

    def saw(self, pattern: str) -> str:
        """Wait until this is there, and forget what was before its end."""
        deadline = time.monotonic() + DEADLINE
        while not (found := re.search(pattern, self.said)):
            assert time.monotonic() < deadline, (pattern, self.said)
            if select.select([self._fd], [], [], 1.0)[0]:
                self.said += os.read(self._fd, 1 << 16).decode(errors="replace").replace("\r", "")
        self.said = self.said[found.end() :]
        return found[0]

    def hang_up(self) -> None:
        os.close(self._fd)
        os.waitpid(self.pid, 0)


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with new_place() as one:
        yield one


@pytest.fixture(params=["forked", "started"])
def line(request: pytest.FixtureRequest) -> str:
    other = "".join(f"{name}={value} " for name, value in OTHER_SETTING.items())
    return f"{'' if request.param == 'forked' else other}{HVLAUNCH} --quiet --pool p -np 1"


def test_what_is_typed_is_read_to_its_end(place: Place, line: str) -> None:
    terminal = Terminal(place).type(f"{line} sh -c 'echo be''gun; cat; echo en''ded'; echo code $?\n")
    terminal.saw("\nbegun\n")
    terminal.type("hello\n").saw("hello\nhello\n")
    terminal.type("more\n").saw("more\nmore\n")
    terminal.type("\x04").saw("ended\ncode 0\n")
    terminal.hang_up()


def test_ctrl_c(place: Place, line: str) -> None:
    terminal = Terminal(place).type(f"{line} sh -c 'echo be''gun; sleep 86400'; echo code $?\n")
    terminal.saw("\nbegun\n")
    terminal.type("\x03").saw("code 130\n")
    terminal.hang_up()
    wait_until(lambda: not place.drivers(), "nothing is left")


def test_ctrl_z_stops_it_until_it_goes_on(place: Place, line: str) -> None:
    is_forked = not line.startswith("PYTHON")
    terminal = Terminal(place).type(f"{line} sh -c 'echo be''gun; cat'; echo code $?\n")
    terminal.saw("\nbegun\n")
    terminal.type("\x1a").saw("Stopped")
    terminal.saw("ready> ")
    if is_forked:
        [driver] = place.drivers()
        wait_until(lambda: driver.status() == psutil.STATUS_STOPPED, "the driver has stopped")
    terminal.type("echo is the sh''ell\n").saw("\nis the shell\n")
    terminal.type("fg\n").saw("cat'\n")
    if is_forked:
        wait_until(lambda: driver.status() != psutil.STATUS_STOPPED, "the driver goes on")
    terminal.type("typed\n").saw("typed\ntyped\n")
    terminal.type("\x03").saw("ready> ")
    terminal.hang_up()


def test_a_job_in_the_background_reads_nothing_of_the_shells(place: Place, line: str) -> None:
    terminal = Terminal(place).type(f"{line} sh -c 'echo be''gun; cat' &\n")
    terminal.saw("begun\n")
    for number in range(30):
        terminal.type(f"echo word$(({number} + 100))\n").saw(f"\nword{number + 100}\n")
    terminal.type("kill %1; wait; echo en''ded\n").saw("\nended\n")
    terminal.hang_up()


def test_the_terminal_is_closed(place: Place, line: str) -> None:
    terminal = Terminal(place).type(
        f"{line} sh -c 'trap \"echo got >> {place.state}/hup\" TERM; echo be''gun; sleep 86400 & wait'\n"
    )
    terminal.saw("\nbegun\n")
    terminal.hang_up()
    wait_until((place.state / "hup").exists, "the worker was told")
    wait_until(lambda: not place.drivers(), "the driver has ended")
    (place.state / "hup").unlink()


def test_a_job_that_leaves_its_terminal_when_that_is_closed(place: Place, line: str) -> None:
    terminal = Terminal(place).type(f"{line} --detach-on-hangup sh -c 'echo be''gun; exec sleep 86411'\n")
    terminal.saw("\nbegun\n")
    terminal.hang_up()

    def minders() -> list[bool]:
        return [has_minder(each) for each in (place.state / "hvlaunch/jobs").iterdir()]

    wait_until(lambda: any(minders()), "it has left the terminal, and is watched over")
    assert place.run(f"{sys.executable} -m hvlaunch stop").returncode == 0
    wait_until(lambda: not place.drivers(), "the driver has ended")


def test_a_job_that_nobody_hangs_up(place: Place) -> None:
    terminal = Terminal(place).type(
        f"nohup {HVLAUNCH} --quiet --pool p -np 1 sh -c 'echo be''gun; sleep 86412' > {place.state}/out &\n"
    )
    wait_until(lambda: place.drivers() and "begun" in (place.state / "out").read_text(), "it runs")
    [driver] = place.drivers()
    terminal.hang_up()
    assert driver.is_running()
    driver.send_signal(signal.SIGTERM)
    wait_until(lambda: not place.drivers(), "the driver has ended")
