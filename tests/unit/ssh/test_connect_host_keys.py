"""The host's key while connecting: known, unknown, changed, revoked, accepted anew."""

import shutil
import subprocess

import pytest

from hvlaunch.errors import (
    HostKeyChanged,
    HostKeyRevoked,
    HostKeyUnknown,
)

from .conftest import Sshd, answer, public, refusal


@pytest.fixture(scope="module")
def three(sshd_folder):
    """An sshd with three host keys."""
    (sshd_folder / "three").mkdir()
    sshd = Sshd(sshd_folder / "three", key_types=("ed25519", "ecdsa", "rsa"))
    sshd.start()
    yield sshd
    sshd.stop()


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_one_of_three_host_keys_is_known(three, kind):
    three.know(f"{three.name} {three.host_key(kind)}")
    assert answer(three) == "hello"


def test_an_unknown_host(three):
    three.know()
    error = refusal(HostKeyUnknown, three)
    assert type(error) is HostKeyUnknown
    fingerprint = subprocess.run(
        ["ssh-keygen", "-lf", three.folder / "host_ed25519"], check=True, capture_output=True, text=True
    ).stdout.split()[1]
    assert (error.key_type, error.fingerprint) == ("ssh-ed25519", fingerprint)
    assert fingerprint in str(error)
    assert three.known_hosts.read_text() == ""


def test_the_hint_makes_the_host_known(three):
    """ssh-keyscan, or ssh once; here with ssh, which writes the file that we read."""
    three.know()
    error = refusal(HostKeyUnknown, three)
    command = error.hint.split("`")[3].split()
    subprocess.run([*command, "-oBatchMode=yes", "-oStrictHostKeyChecking=accept-new", "true"], check=True)
    assert answer(three) == "hello"


def test_a_host_key_by_port_and_by_name(three):
    three.know(f"127.0.0.1 {three.host_key('rsa')}")
    assert answer(three) == "hello"
    three.know(f"[127.0.0.1]:{three.port + 1} {three.host_key('rsa')}")
    refusal(HostKeyUnknown, three)


def test_a_changed_host_key(three):
    three.know("# comment", f"{three.name} {public(three.key)}")
    for policy in ("strict", "accept-new"):
        error = refusal(HostKeyChanged, three, host_keys=policy)
        assert f"{three.known_hosts}:2" in str(error)
    assert answer(three, host_keys="off") == "hello"
    assert len(three.known_hosts.read_text().splitlines()) == 2


def test_accept_new(make_sshd):
    sshd = make_sshd()
    shutil.rmtree(sshd.known_hosts.parent)
    assert answer(sshd, host_keys="accept-new") == "hello"
    assert sshd.known_hosts.read_text() == f"{sshd.name} {sshd.host_key('ed25519')}\n"
    assert answer(sshd) == "hello"
    config = sshd.options().config
    ssh = ["ssh", "-F", config, "-p", str(sshd.port), "-oStrictHostKeyChecking=yes", "-oBatchMode=yes"]
    subprocess.run([*ssh, "127.0.0.1", "true"], check=True)


def test_a_revoked_host_key(three):
    three.know(f"{three.name} {three.host_key('ed25519')}", f"@revoked * {three.host_key('ed25519')}")
    for policy in ("strict", "accept-new", "off"):
        refusal(HostKeyRevoked, three, host_keys=policy)


def test_a_hashed_entry(three):
    three.know(f"{three.name} {three.host_key('ecdsa')}")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", three.known_hosts], check=True, capture_output=True)
    assert "127.0.0.1" not in three.known_hosts.read_text()
    assert answer(three) == "hello"
