"""Asking on a terminal, which is a real one."""

import os
import subprocess
import sys
import termios
import time

import pytest

from hvlaunch.ssh.keyring import Terminal
from tests.testhosts.places import wait_until

from .conftest import in_thread


@pytest.fixture
def tty():
    """Our end of a terminal, and its path."""
    near, far = os.openpty()
    os.set_blocking(near, False)
    yield near, os.ttyname(far)
    os.close(near)
    os.close(far)


def echoes(near: int) -> bool:
    return bool(termios.tcgetattr(near)[3] & termios.ECHO)


def shown(near: int) -> str:
    try:
        return os.read(near, 4096).decode()
    except BlockingIOError:
        return ""


@pytest.mark.parametrize(("term", "line"), [("xterm", "Which? \x1b[K\r\n"), ("dumb", "Which? \r\n")])
def test_a_question_has_a_line_of_its_own_and_the_answer_is_not_shown(tty, monkeypatch, term, line):
    monkeypatch.setenv("TERM", term)
    near, path = tty
    terminal, said = Terminal(path), []
    thread, ended = in_thread(lambda: said.append(terminal.ask("Which? ")))
    text = ""
    while not text.endswith("\n"):  # what is written to a terminal is not there at once
        text += shown(near)
    os.write(near, b"open sesame\n")
    thread.join()
    terminal.close()
    assert ended == [None]
    assert said == [b"open sesame"]
    assert text + shown(near) == line
    assert echoes(near)


def test_closing_ends_the_question_and_leaves_the_terminal_as_it_was(tty):
    near, path = tty
    terminal, said = Terminal(path), []
    thread, _ = in_thread(lambda: said.append(terminal.ask("Which? ")))
    wait_until(lambda: not echoes(near), "hiding what is typed")
    terminal.close()
    assert echoes(near)
    terminal.close()
    thread.join()
    assert said == [None]


def test_input_until_the_deadline_is_discarded(tty):
    near, path = tty
    terminal = Terminal(path)
    thread, ended = in_thread(lambda: terminal.ask("Which? ", time.monotonic() + 2.0))
    wait_until(lambda: not echoes(near), "hiding what is typed")
    os.write(near, b"half of")
    thread.join()
    terminal.close()
    assert isinstance(ended[0], TimeoutError)
    assert echoes(near)
    os.write(near, b" it\n")
    with open(path, "rb", buffering=0) as shell:  # noqa: PTH123 (a terminal)
        assert shell.read(100) == b" it\n"


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (b"a\x1ab\n", b"a\x1ab"),  # after `fg`, the shell would have what is typed shown
        (b"\x04", None),
    ],
    ids=["Ctrl-Z does not leave the question", "an end of file is no answer"],
)
def test_keys_that_a_terminal_gives_a_meaning(tty, typed, answer):
    near, path = tty
    terminal, said = Terminal(path), []
    thread, _ = in_thread(lambda: said.append(terminal.ask("Which? ")))
    wait_until(lambda: not echoes(near), "hiding what is typed")
    os.write(near, typed)
    thread.join()
    terminal.close()
    assert said == [answer]


@pytest.mark.parametrize("path", ["/nowhere", "/dev/null"])
def test_no_terminal(path):
    terminal = Terminal(path)
    assert not terminal.is_there()
    assert terminal.ask("Which? ") is None
    terminal.close()


def test_a_terminal_that_is_not_ours(tty):
    terminal = Terminal(tty[1])
    assert not terminal.is_there()
    terminal.close()


SEIZE = "import os,fcntl,termios;os.setsid();fcntl.ioctl(0,termios.TIOCSCTTY,0);"
ASK = "from hvlaunch.ssh.keyring import Terminal;t=Terminal();print(t.is_there());t.close()"


@pytest.mark.parametrize(
    ("before", "there"),
    [
        (SEIZE, "True"),
        ("", "False"),
        (SEIZE + "os.fork() and (os.wait(),os._exit(0));os.setpgid(0,0);", "False"),
    ],
    ids=["a terminal of its own", "a session without one", "in the background"],
)
def test_only_a_foreground_job_may_ask(tty, before, there):
    far = os.open(tty[1], os.O_RDWR | os.O_NOCTTY)
    command = [sys.executable, "-c", before + ASK]
    said = subprocess.run(
        command, check=False, stdin=far, capture_output=True, text=True, start_new_session=not before
    )
    os.close(far)
    assert said.stdout.strip() == there, said.stderr
