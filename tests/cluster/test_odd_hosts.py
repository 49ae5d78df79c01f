"""A table of odd hosts: each runs a program, by paramiko and by the ssh binary where that applies."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.jobs import PROGRAMS
from tests.cluster.ssh_sites import FLEET, USERS, Site, sign

BIG = 1 << 20
CLIENTS = ("paramiko", "openssh")

Case = Callable[[Site], list[object]]
"""Makes a host odd; returns the arguments with which hvlaunch gets there."""


@pytest.fixture
def site(whole_site: Site) -> Iterator[Site]:
    yield whole_site
    left = [str(process) for host in whole_site.hosts for process in host.user_processes()]
    whole_site.close()
    assert left == []


def another_port(site: Site) -> list[object]:
    site.sshd("n1", "Port 2222")
    site.ssh.joinpath("known_hosts").write_text(f"[n1]:2222 {site.hosts['n1'].host_key}\n")
    site.config("Host n1", "  Port 2222")
    return ["-H", "n1"]


def another_port_in_the_hostfile(site: Site) -> list[object]:
    site.sshd("n1", "Port 2222")
    site.ssh.joinpath("known_hosts").write_text(f"[n1]:2222 {site.hosts['n1'].host_key}\n")
    hostfile = site.key("hosts").with_name("hostfile")
    hostfile.write_text("n1 port=2222\n")
    return ["-hostfile", hostfile]


def another_user(site: Site) -> list[object]:
    return ["-H", "bob@n1"]


def another_user_in_the_configuration(site: Site) -> list[object]:
    site.config("Host n*", "  User bob")
    return ["-H", "n1"]


def key_only_in_the_agent(site: Site) -> list[object]:
    key = site.key()
    site.only("n1", key)
    site.agent(key)
    key.unlink()
    return ["-H", "n1"]


def encrypted_key_that_the_agent_holds(site: Site) -> list[object]:
    key = site.key()
    site.only("n1", key)
    site.agent(key)
    os.system(f"ssh-keygen -q -p -P '' -N secret -f {key}")
    return ["-H", "n1", "-i", key]


def user_certificate_beside_its_key(site: Site) -> list[object]:
    key = _certified(site)
    return ["-H", "n1", "-i", key]


def user_certificate_elsewhere(site: Site) -> list[object]:
    key = _certified(site)
    certificate = key.with_name("signed")
    key.with_name(f"{key.name}-cert.pub").rename(certificate)
    site.config(
        "Host n1", f"  IdentityFile {key}", f"  CertificateFile {certificate}", "  IdentitiesOnly yes"
    )
    return ["-H", "n1"]


def user_certificate_in_the_agent(site: Site) -> list[object]:
    key = _certified(site)
    site.agent(key)
    for file in key.parent.iterdir():
        file.unlink()
    return ["-H", "n1"]


def _certified(site: Site):
    authority, key = site.key("ca"), site.key("signed_by_ca")
    sign(authority, key, "-n", "root")
    (site.hosts["n1"].sshd / "user_ca.pub").write_text(authority.with_suffix(".pub").read_text())
    site.sshd("n1", "TrustedUserCAKeys /run/sshd/user_ca.pub", "AuthorizedKeysFile none")
    return key


def host_certificate(site: Site) -> list[object]:
    authority = site.key("host_ca")
    host = site.hosts["n1"]
    sign(authority, host.sshd / "host_key", "-h", "-n", "n1,*.example", "-V", "+1h")
    site.sshd("n1", "HostCertificate /run/sshd/host_key-cert.pub")
    public = authority.with_suffix(".pub").read_text()
    site.ssh.joinpath("known_hosts").write_text(f"@cert-authority n*,!n2 {public}")
    return ["-H", "n1"]


def jump_host(site: Site) -> list[object]:
    site.config("Host n1", "  ProxyJump gate")
    return ["-H", "n1"]


def jump_host_with_its_own_user_and_key(site: Site) -> list[object]:
    key = site.key("for_gate")
    site.only("gate", key)
    site.config(
        "Host n1", "  ProxyJump bob@gate", "Host gate", f"  IdentityFile {key}", "  IdentitiesOnly yes"
    )
    return ["-H", "n1"]


def two_jumps(site: Site) -> list[object]:
    site.config("Host n1", "  ProxyJump gate,inner")
    return ["-H", "n1"]


def jump_host_behind_a_jump_host(site: Site) -> list[object]:
    site.config("Host n1 n2", "  ProxyJump inner", "Host inner", "  ProxyJump gate")
    return ["-H", "n1,n2,inner"]


def proxy_command(site: Site) -> list[object]:
    site.config("Host one", "  HostName n1", "  ProxyCommand ssh -W %h:%p -o User=%r gate")
    return ["-H", "one"]


def jump_host_behind_a_proxy_command(site: Site) -> list[object]:
    site.config("Host n1", "  ProxyJump inner", "Host inner", "  ProxyCommand ssh -W [%h]:%p gate")
    return ["-H", "n1"]


def include_and_match(site: Site) -> list[object]:
    site.ssh.joinpath("more").write_text(
        'Match originalhost one exec "true"\n  HostName n1\n  HostKeyAlias n1\n'
    )
    site.config("Include more", "Match host n1", "  User bob", "Match final all", "  Compression no")
    return ["-H", "one"]


def busy_jump_host(site: Site) -> list[object]:
    site.sshd("gate", "MaxStartups 3:100:4")
    site.config("Host n*", "  ProxyJump gate")
    return ["-H", ",".join(FLEET)]


def one_session(site: Site) -> list[object]:
    site.sshd("n1", "MaxSessions 1")
    return ["-H", "n1:4"]


def one_session_on_the_jump_host(site: Site) -> list[object]:
    site.sshd("gate", "MaxSessions 1")
    site.config("Host n*", "  ProxyJump gate")
    return ["-H", "n1,n2,n3"]


def noisy_bashrc(site: Site) -> list[object]:
    noise = (
        f"head -c {BIG} /dev/zero | tr '\\0' x\necho; echo 'trouble in .bashrc' >&2\ntrap 'echo bye' EXIT\n"
    )
    site.home("n1", "root", ".bashrc", noise)
    return ["-H", "n1:2"]


def python_at_an_odd_path(site: Site) -> list[object]:
    odd = site.home(
        "bare", "root", "my own python", f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} "$@"\n'
    )
    odd.chmod(0o755)
    return ["-H", "bare", "--remote-python", "~/my own python"]


def python_at_an_odd_path_in_the_hostfile(site: Site) -> list[object]:
    odd = site.home("bare", "root", "python4", f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} "$@"\n')
    odd.chmod(0o755)
    hostfile = site.key("hosts").with_name("hostfile")
    hostfile.write_text("bare python=/run/home/root/python4\nn1\n")
    return ["-hostfile", hostfile]


def clock_that_is_off(site: Site) -> list[object]:
    """An interpreter whose wall clock is some thirty years late, and one that is early."""
    for host, seconds in (("n1", -(10**9)), ("n2", 10**9)):
        shift = f"import time;_real=time.time;time.time=lambda:_real()+{seconds};"
        script = f'#!/bin/sh\nset -- "$@"\nfor w; do shift; case $w in import\\ io*) w=\'{shift}\'$w;; esac; set -- "$@" "$w"; done\n'
        odd = site.home(host, "root", "late", f'{script}exec {os.path.realpath(sys.executable)} "$@"\n')
        odd.chmod(0o755)
    return ["-H", "n1,n2", "--remote-python", "~/late"]


CASES: list[tuple[Case, tuple[str, ...]]] = [
    (another_port, CLIENTS),
    (another_port_in_the_hostfile, CLIENTS),
    (another_user, CLIENTS),
    (another_user_in_the_configuration, CLIENTS),
    (key_only_in_the_agent, CLIENTS),
    (encrypted_key_that_the_agent_holds, CLIENTS),
    (user_certificate_beside_its_key, CLIENTS),
    (user_certificate_elsewhere, CLIENTS),
    (user_certificate_in_the_agent, CLIENTS),
    (host_certificate, CLIENTS),
    (jump_host, CLIENTS),
    (jump_host_with_its_own_user_and_key, CLIENTS),
    (two_jumps, CLIENTS),
    (jump_host_behind_a_jump_host, CLIENTS),
    (proxy_command, CLIENTS),
    (jump_host_behind_a_proxy_command, CLIENTS),
    (include_and_match, CLIENTS),
    (busy_jump_host, CLIENTS),
    (one_session, CLIENTS),
    (one_session_on_the_jump_host, ("paramiko",)),
    (noisy_bashrc, CLIENTS),
    (python_at_an_odd_path, CLIENTS),
    (python_at_an_odd_path_in_the_hostfile, ("paramiko",)),
    (clock_that_is_off, ("paramiko",)),
]


@pytest.mark.parametrize(
    ("case", "client"),
    [
        pytest.param(case, client, id=f"{case.__name__}, {client}")
        for case, clients in CASES
        for client in clients
    ],
)
def test_true_runs_on(site: Site, case: Case, client: str) -> None:
    job = site.run("--quiet", "--ssh-client", client, "--cwd", "/", *case(site), "true")
    assert job.code() == 0, job.stderr
    assert job.stderr == ""


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("shell", ["bash", "dash", "fish", "tcsh", "zsh"])
def test_a_login_shell(site: Site, shell: str, client: str) -> None:
    """Each reads its start-up file, which prints, and the worker finds a whole environment."""
    user = "bob" if shell == "bash" else shell
    if not any(word.startswith(user) for word in USERS):
        pytest.skip(f"needs {shell}")
    file = {"bash": ".bashrc", "fish": ".config/fish/config.fish", "tcsh": ".tcshrc", "zsh": ".zshenv"}.get(
        shell
    )
    if file is not None:
        (site.hosts["n1"].home / user / ".config").mkdir(exist_ok=True)
        site.home("n1", user, file, f"echo welcome to {shell}\n")
    dump = [sys.executable.replace(sys.executable, "/usr/bin/python3"), PROGRAMS / "dump_env.py"]
    job = site.run(
        "--ssh-client", client, "--cwd", "/", "-H", f"{user}@n1", "-x", "ODD=a 'b' \"c\" $d\n!e", *dump
    )
    assert job.code() == 0, job.stderr
    found = json.loads(re.findall(r"^\[0\]<stdout>: (\{.*\})$", job.stdout, re.MULTILINE)[0])["env"]
    assert found["ODD"] == "a 'b' \"c\" $d\n!e"
    assert (found["RANK"], found["WORLD_SIZE"], found["USER"]) == ("0", "1", user)
    assert "welcome" not in job.stdout
