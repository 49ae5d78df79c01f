"""The ssh binary, asked for settings: what it runs does not outlive the question."""

import shutil
import subprocess

import psutil
import pytest

from hvlaunch.ssh.config.ask_ssh import AskSSH

from .conftest import PATIENCE, gone, in_thread, until

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs the ssh binary (openssh-client)")


@pytest.fixture
def hanging(tmp_path):
    """A question that has no end, and a file where the command that does not end tells its number."""
    told = tmp_path / "pid"
    config = tmp_path / "config"
    config.write_text(
        f'Match exec "echo $$ > {told}.new; mv {told}.new {told}; exec sleep 600"\n  User ada\n'
    )
    return ["-F", str(config), "-G", "node"], told


def test_a_command_of_the_configuration_ends_with_the_time(hanging):
    arguments, told = hanging
    with pytest.raises(subprocess.TimeoutExpired):
        AskSSH()(arguments, 1.0)
    if told.exists():
        until(lambda: not psutil.pid_exists(int(told.read_text())), "the command ends")


def test_a_command_of_the_configuration_ends_with_the_job(hanging):
    arguments, told = hanging
    ask = AskSSH()
    thread, _ = in_thread(lambda: ask(arguments, PATIENCE))
    until(told.exists, "the command runs")
    command = psutil.Process(int(told.read_text()))
    ask.close()
    thread.join(PATIENCE)
    until(lambda: gone(command), "the command ends")
    with pytest.raises(subprocess.TimeoutExpired):
        ask(["-V"], PATIENCE)
