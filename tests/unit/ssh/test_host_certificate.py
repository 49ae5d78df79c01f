"""Certificates as ssh-keygen makes them, and as those who forge them would."""

import base64
import subprocess
import time
from pathlib import Path

import pytest
from paramiko.pkey import UnknownKeyType
from paramiko.ssh_exception import SSHException

from hvlaunch.ssh.trust.host_certificate import BadHostCertificate, read_certificate
from hvlaunch.ssh.trust.identity import bare_key

from .conftest import keygen

NAME = "node.example"


def blob(path: Path) -> bytes:
    return base64.b64decode(path.read_text().split()[1])


def certificate(folder: Path, *words: str, authority: str = "ed25519", kind: str = "ed25519") -> bytes:
    ca, key = keygen(folder / "ca", authority), keygen(folder / "k", kind)
    subprocess.run(["ssh-keygen", "-q", "-s", ca, "-I", "id", *words, f"{key}.pub"], check=True)
    return blob(folder / "k-cert.pub")


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
@pytest.mark.parametrize("authority", ["ed25519", "ecdsa", "rsa"])
def test_every_kind_of_key_and_authority(tmp_path, kind, authority):
    data = certificate(tmp_path, "-h", "-n", f"{NAME},other", kind=kind, authority=authority)
    found = read_certificate(data)
    assert found.problem(NAME, time.time()) is None
    assert found.authority == blob(tmp_path / "ca.pub")
    assert found.principals == (NAME, "other")
    assert bare_key(data) == blob(tmp_path / "k.pub")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("-h",), None),
        (("-h", "-n", "*.example"), None),
        (("-h", "-n", "nod?.example"), None),
        (("-h", "-n", NAME, "-V", "20200101:20990101"), None),
        (("-n", NAME), "it is not a certificate for a host"),
        (("-h", "-n", "other,*.org"), "it is for other, *.org, not for node.example"),
        (("-h", "-n", "[n]ode.example"), "it is for [n]ode.example, not for node.example"),
        (("-h", "-n", "node"), "it is for node, not for node.example"),
        (("-h", "-V", "20200101:20210101"), "it has expired"),
        (("-h", "-V", "20980101:20990101"), "it is not valid yet"),
    ],
)
def test_validity_by_name_time_and_kind(tmp_path, words, problem):
    found = read_certificate(certificate(tmp_path, *words)).problem(NAME, time.time())
    assert found == problem or (problem is not None and found is not None and problem in found)


def test_the_bounds_of_its_time(tmp_path):
    found = read_certificate(certificate(tmp_path, "-h", "-V", "20200101:20210101"))
    assert found.problem(NAME, found.valid_after) is None
    assert found.problem(NAME, found.valid_after - 1) is not None
    assert found.problem(NAME, found.valid_before - 1) is None
    assert found.problem(NAME, found.valid_before) is not None


def test_critical_options_are_refused(tmp_path):
    found = read_certificate(certificate(tmp_path, "-h", "-O", "critical:unheard-of"))
    assert (
        found.problem(NAME, time.time())
        == "it has critical options, and none is defined for host certificates"
    )


def test_no_byte_can_be_changed(tmp_path):
    """Each is covered by the signature, is part of it, or is needed to read it."""
    data = certificate(tmp_path, "-h", "-n", NAME)
    for index in range(len(data)):
        forged = data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]
        with pytest.raises(BadHostCertificate):
            read_certificate(forged)


def test_no_byte_can_be_taken_or_added(tmp_path):
    data = certificate(tmp_path, "-h", "-n", NAME)
    for size in range(len(data)):
        with pytest.raises(BadHostCertificate):
            read_certificate(data[:size])
    with pytest.raises(BadHostCertificate):
        read_certificate(data + b"\0")


def test_an_authority_that_signs_by_sha1(tmp_path):
    data = certificate(tmp_path, "-h", "-t", "ssh-rsa", authority="rsa")
    with pytest.raises(BadHostCertificate, match="signed by ssh-rsa, which is too weak"):
        read_certificate(data)


def test_another_authoritys_signature(tmp_path):
    """The authority named in the certificate is exchanged for another, of the same size."""
    data = certificate(tmp_path, "-h")
    other = blob(Path(f"{keygen(tmp_path / 'other')}.pub"))
    with pytest.raises(BadHostCertificate, match="its authority's signature is wrong"):
        read_certificate(data.replace(blob(tmp_path / "ca.pub"), other))


@pytest.mark.parametrize("data", [b"", b"\0\0\0\x0bssh-ed25519", b"\xff" * 64])
def test_no_certificate(data):
    with pytest.raises(BadHostCertificate):
        read_certificate(data)
    with pytest.raises((ValueError, SSHException, UnknownKeyType)):
        bare_key(data)
