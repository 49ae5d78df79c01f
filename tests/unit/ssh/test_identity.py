"""Identity files in every format that ssh-keygen writes."""

import base64
import subprocess
from pathlib import Path

import pytest

from hvlaunch.ssh.identity import read_identity

from .conftest import keygen


def blob(path: Path) -> bytes:
    return base64.b64decode(Path(f"{path}.pub").read_text().split()[1])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("ed25519", ()),
        ("ecdsa", ()),
        ("ecdsa", ("-b", "521")),
        ("rsa", ()),
        ("rsa", ("-m", "PEM")),
        ("rsa", ("-m", "PKCS8")),
        ("ecdsa", ("-m", "PEM")),
        ("ecdsa", ("-m", "PKCS8")),
    ],
)
def test_a_key_to_sign_with(tmp_path, kind, words):
    path = keygen(tmp_path / "k", kind, *words)
    found = read_identity(str(path))
    assert found.problem is None
    assert [key.asbytes() for key in found.keys] == [blob(path)]
    assert found.public == blob(path)
    assert found.keys[0].can_sign()


@pytest.mark.parametrize("words", [(), ("-m", "PEM")])
@pytest.mark.parametrize("with_public_file", [True, False])
def test_an_encrypted_key_tells_its_public_half(tmp_path, words, with_public_file):
    path = keygen(tmp_path / "k", "rsa", *words, passphrase="secret")
    expected = blob(path) if with_public_file or not words else None  # PEM hides it
    if not with_public_file:
        Path(f"{path}.pub").unlink()
    found = read_identity(str(path))
    assert (found.keys, found.public, found.encrypted) == ((), expected, True)
    assert found.problem == "encrypted, and no agent holds it"


def test_a_public_key_stands_for_one_that_an_agent_may_hold(tmp_path):
    path = keygen(tmp_path / "k")
    found = read_identity(f"{path}.pub")
    assert (found.keys, found.public, found.problem) == ((), blob(path), "no agent holds it")


def test_no_file(tmp_path):
    found = read_identity(str(tmp_path / "nowhere"))
    assert found.missing
    assert found.problem == "there is no such file"


def test_a_folder(tmp_path):
    found = read_identity(str(tmp_path))
    assert not found.missing
    assert found.problem == "it can't be read (Is a directory)"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"\xff\xfe",
        b"ssh-ed25519",
        b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n",
        b"-----BEGIN RSA PRIVATE KEY-----\nAAAA\n-----END RSA PRIVATE KEY-----\n",
    ],
)
def test_no_key(tmp_path, content):
    path = tmp_path / "k"
    path.write_bytes(content)
    found = read_identity(str(path))
    assert (found.keys, found.encrypted) == ((), False)
    assert found.problem == "it is not an RSA, ECDSA or Ed25519 private key"


def test_a_key_with_a_certificate_is_two(tmp_path):
    authority, path = keygen(tmp_path / "ca"), keygen(tmp_path / "k")
    subprocess.run(["ssh-keygen", "-q", "-s", authority, "-I", "me", "-n", "ada", f"{path}.pub"], check=True)
    certified, plain = read_identity(str(path)).keys
    assert certified.public_blob.key_type == "ssh-ed25519-cert-v01@openssh.com"
    assert plain.public_blob is None
    assert plain.asbytes() == certified.asbytes() == blob(path)


def test_a_broken_certificate_does_not_spoil_the_key(tmp_path):
    path = keygen(tmp_path / "k")
    Path(f"{path}-cert.pub").write_text("nonsense\n")
    assert [key.public_blob for key in read_identity(str(path)).keys] == [None]
