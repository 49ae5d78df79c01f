"""Questions to ssh. One `ssh -G` for many hosts gives what each would give, and is asked again where it must be."""

import shutil
import subprocess
import threading

import psutil
import pytest

from hvlaunch.errors import HostError
from hvlaunch.job import Host, SSHOptions
from hvlaunch.ssh.config import AskSSH, Questions, ask_ssh, resolve
from tests.testhosts.places import wait_until

from .conftest import PATIENCE, gone, in_thread

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs the ssh binary (openssh-client)")
NAMES = ("n1", "n2", "N3", "10.0.0.4", "fd00::5")


class Counting:
    """Asks ssh, and counts."""

    def __init__(self):
        self.asked = []

    def __call__(self, arguments, timeout):
        self.asked.append(list(arguments))
        return ask_ssh(arguments, timeout)


@pytest.fixture
def counting():
    return Counting()


def config(tmp_path, *lines):
    path = tmp_path / "config"
    path.write_text("".join(f"{line}\n" for line in lines))
    return SSHOptions(config=path)


def settings(options, ask, names=NAMES):
    return [resolve(Host(name), options, ask=ask) for name in names]


@pytest.mark.parametrize(
    "lines",
    [
        (),
        ("# Host n2", "", "User ada", "Port=2222"),
        ("Host *", "  IdentityFile ~/.ssh/other", "  ProxyJump gate", "  Compression yes"),
        ("  host  *  ", "ConnectTimeout 9", "HostKeyAlias farm", "StrictHostKeyChecking no"),
    ],
)
def test_one_question_if_all_hosts_are_alike(tmp_path, counting, lines):
    options = config(tmp_path, *lines)
    assert settings(options, Questions(counting)) == settings(options, ask_ssh)
    assert len(counting.asked) == 1


@pytest.mark.parametrize(
    "lines",
    [
        ("Host n2", "  User ada"),
        ("Host * !n2", "  User ada"),
        ("Host n?", "  Port 2222"),
        ("Match host n2", "  User ada"),
        ('Match exec "test %h = n2"', "  User ada"),
        ("HostName %h.example",),
        ("HostName gate.example",),
        ("IdentityFile ~/.ssh/%h",),
        ("UserKnownHostsFile ~/.ssh/known/%k",),
        ("CanonicalizeHostname yes",),
        ('Host "n2"', "  User ada"),
        ("Include INCLUDED",),
    ],
)
def test_one_question_per_host_if_they_may_differ(tmp_path, counting, lines):
    included = tmp_path / "included"
    included.write_text("Host n2\n  User ada\n")
    options = config(tmp_path, *(line.replace("INCLUDED", str(included)) for line in lines))
    assert settings(options, Questions(counting)) == settings(options, ask_ssh)
    assert len(counting.asked) == len(NAMES)


def test_included_files_count_too(tmp_path, counting):
    (tmp_path / "included").write_text("Host *\n  User ada\n")
    options = config(tmp_path, f"Include {tmp_path}/incl*")
    found = settings(options, Questions(counting))
    assert {one.user for one in found} == {"ada"}
    assert len(counting.asked) == 1


def test_other_words_are_another_question(tmp_path, counting):
    ask = Questions(counting)
    options = config(tmp_path)
    for port in (None, 2222, None, 2222):
        assert resolve(Host("n1", port=port), options, ask=ask).port == (port or 22)
    assert len(counting.asked) == 2


def test_a_bad_configuration_is_reported_for_each_host(tmp_path, counting):
    options = config(tmp_path, "NoSuchSetting yes")
    ask = Questions(counting)
    for name in ("n1", "n2"):
        with pytest.raises(HostError) as by_us:
            resolve(Host(name), options, ask=ask)
        with pytest.raises(HostError) as by_ssh:
            resolve(Host(name), options)
        assert str(by_us.value) == str(by_ssh.value)


def test_no_ssh_is_told_to_each():
    def none(arguments, timeout):
        raise FileNotFoundError("ssh")

    ask = Questions(none)
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            ask(["-G", "n1"], 1.0)


def test_a_time_out_is_told_to_each():
    def slow(arguments, timeout):
        raise subprocess.TimeoutExpired("ssh", timeout)

    ask = Questions(slow)
    for _ in range(2):
        with pytest.raises(subprocess.TimeoutExpired):
            ask(["-G", "n1"], 1.0)


def test_waiting_for_another_question_uses_up_time():
    """Hosts begin together: where the first question takes all the time, the others are not asked one after the other."""
    asked, begun = [], threading.Event()

    def slow(arguments, timeout):
        asked.append(timeout)
        begun.set()
        done.wait()
        raise subprocess.TimeoutExpired("ssh", timeout)

    done = threading.Event()
    ask = Questions(slow)
    first, _ = in_thread(lambda: ask(["-G", "n1"], PATIENCE))
    assert begun.wait(PATIENCE)
    second, ended = in_thread(lambda: ask(["-G", "n2"], 0.0))
    done.set()
    first.join()
    second.join()
    assert isinstance(ended[0], subprocess.TimeoutExpired)
    assert len(asked) == 1


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
        wait_until(lambda: not psutil.pid_exists(int(told.read_text())), "the command ends")


def test_a_command_of_the_configuration_ends_with_the_job(hanging):
    arguments, told = hanging
    ask = AskSSH()
    thread, _ = in_thread(lambda: ask(arguments, PATIENCE))
    wait_until(told.exists, "the command runs")
    command = psutil.Process(int(told.read_text()))
    ask.close()
    thread.join(PATIENCE)
    wait_until(lambda: gone(command), "the command ends")
    with pytest.raises(subprocess.TimeoutExpired):
        ask(["-V"], PATIENCE)
