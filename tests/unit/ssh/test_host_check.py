"""How `hvlaunch doctor` asks hosts: by the connections of a job, all at once, for a short time."""

import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from hvlaunch.cli.hosts import doctor
from hvlaunch.gloo import visit
from hvlaunch.gloo.visit import ask_hosts
from hvlaunch.job import Host, JobSpec
from tests.unit.ssh.conftest import Sshd


def spec(sshd: Sshd, *hosts: Host, **options) -> JobSpec:
    return JobSpec(command=("true",), hosts=hosts, cwd="/", ssh=sshd.options(**options))


@pytest.mark.parametrize("client", ["paramiko", "openssh"])
def test_a_host_answers_with_its_python(sshd, client):
    (answer,) = ask_hosts(spec(sshd, sshd.host(port=sshd.port), client=client))
    assert answer.problem is None
    assert answer.python.startswith("3.")
    assert 0 < answer.seconds < visit._LIMIT
    finding = doctor._of_host(answer, spec(sshd, answer.host))
    assert finding.level == "ok"
    assert finding.text.endswith("; its key is known")


def test_a_key_that_is_not_checked_is_a_warning(sshd):
    job = spec(sshd, sshd.host(port=sshd.port), host_keys="off")
    (answer,) = ask_hosts(job)
    finding = doctor._of_host(answer, job)
    assert (finding.level, finding.hint) == ("warning", "--host-keys accept-new")
    assert finding.text.endswith("; its key is not checked")


def test_an_unknown_key_is_named_with_what_to_do(make_sshd):
    sshd = make_sshd()
    sshd.know()
    job = spec(sshd, sshd.host(port=sshd.port))
    (answer,) = ask_hosts(job)
    finding = doctor._of_host(answer, job)
    assert (finding.level, finding.exit_code) == ("error", 69)
    assert "key" in finding.text
    assert "--host-keys accept-new" in str(finding.hint)
    assert not sshd.known_hosts.read_text()


def test_a_host_without_python(sshd):
    job = replace(spec(sshd, sshd.host(port=sshd.port)), remote_python="/nosuch/python")
    (answer,) = ask_hosts(job)
    assert answer.problem is not None
    assert answer.problem.kind == "NoPython"
    assert answer.problem.hint is not None
    assert "--remote-python" in answer.problem.hint


def test_the_name_in_the_ssh_configuration_is_not_shown(make_sshd):
    sshd = make_sshd(config=["Host gpu1", "HostName nosuch.internal.invalid", "Host *"])
    job = spec(sshd, Host("gpu1"))
    (answer,) = ask_hosts(job)
    assert answer.problem is not None
    assert "internal" not in str(answer.problem)
    assert "gpu1" in answer.problem.cause


def test_hosts_are_asked_at_once_and_a_silent_one_is_given_up(sshd, serve, monkeypatch):
    monkeypatch.setattr(visit, "_LIMIT", 1.5)
    silent = [
        Host(f"127.0.0.{number}", port=serve(lambda _: None), address="127.0.0.1") for number in range(2, 6)
    ]
    start = time.monotonic()
    answers = ask_hosts(spec(sshd, sshd.host(port=sshd.port), *silent))
    assert time.monotonic() - start < 3 * 1.5
    assert [answer.problem is None for answer in answers] == [True, False, False, False, False]
    assert {answer.problem.kind for answer in answers if answer.problem is not None} == {"StartTimeout"}


def test_a_defect_in_asking_one_host_does_not_hide_the_others(sshd, monkeypatch):
    ask = visit._ask_for_python

    def fail_for_one(connection, candidates, host, *more):
        if host.name == "localhost":
            raise RuntimeError("oh")
        return ask(connection, candidates, host, *more)

    monkeypatch.setattr(visit, "_ask_for_python", fail_for_one)
    bad, good = ask_hosts(spec(sshd, Host("localhost"), sshd.host(port=sshd.port)))
    assert "internal error: RuntimeError: oh" in str(bad.problem)
    assert good.problem is None


def test_a_login_shell_that_hangs_is_given_up(make_sshd, monkeypatch):
    monkeypatch.setattr(visit, "_LIMIT", 1.0)
    sshd = make_sshd(words=("ForceCommand sleep 100",))
    start = time.monotonic()
    (answer,) = ask_hosts(spec(sshd, sshd.host(port=sshd.port)))
    assert time.monotonic() - start < 10
    assert answer.problem is not None
    assert answer.problem.kind == "AgentFailed"


def test_ctrl_c_does_not_wait_for_silent_hosts(sshd, serve):
    silent = Host("127.0.0.2", port=serve(lambda _: None), address="127.0.0.1")
    interrupt = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
    interrupt.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ask_hosts(spec(sshd, silent))
    assert time.monotonic() - start < 5
