"""Identity files in every format that ssh-keygen writes."""

import base64
import subprocess
from pathlib import Path

import pytest

from hvlaunch.ssh.identity import certified, read_certificate, read_identity

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
    assert found.key is not None
    assert found.key.asbytes() == found.public == blob(path)
    assert found.key.can_sign()


@pytest.mark.parametrize("words", [(), ("-m", "PEM")])
@pytest.mark.parametrize("with_public_file", [True, False])
def test_an_encrypted_key_tells_its_public_half(tmp_path, words, with_public_file):
    path = keygen(tmp_path / "k", "rsa", *words, passphrase="secret")
    expected = blob(path) if with_public_file or not words else None  # PEM hides it
    if not with_public_file:
        Path(f"{path}.pub").unlink()
    found = read_identity(str(path))
    assert (found.key, found.public, found.encrypted) == (None, expected, True)
    assert found.problem == "it is encrypted and no ssh agent has it"


def test_a_public_key_stands_for_one_that_an_agent_may_hold(tmp_path):
    path = keygen(tmp_path / "k")
    found = read_identity(f"{path}.pub")
    assert (found.key, found.public, found.problem) == (None, blob(path), "no ssh agent has it")


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
    path.chmod(0o600)
    found = read_identity(str(path))
    assert (found.key, found.encrypted) == (None, False)
    assert found.problem == "it is not an RSA, ECDSA or Ed25519 private key"


def test_a_certificate_is_for_a_key(tmp_path):
    authority, path = keygen(tmp_path / "ca"), keygen(tmp_path / "k")
    subprocess.run(["ssh-keygen", "-q", "-s", authority, "-I", "me", "-n", "ada", f"{path}.pub"], check=True)
    found = read_certificate(f"{path}-cert.pub")
    key = read_identity(str(path)).key
    assert found is not None
    assert key is not None
    assert found.public == blob(path)
    shows = certified(key, found.blob)
    assert shows.public_blob is not None
    assert shows.public_blob.key_type == "ssh-ed25519-cert-v01@openssh.com"
    assert key.public_blob is None
    assert shows.asbytes() == key.asbytes()


@pytest.mark.parametrize("content", [None, "nonsense\n", "ssh-ed25519 AAAA\n"])
def test_no_certificate(tmp_path, content):
    path = tmp_path / "k-cert.pub"
    if content is not None:
        path.write_text(content)
    assert read_certificate(str(path)) is None


@pytest.mark.parametrize("words", [(), ("-m", "PEM"), ("-m", "PKCS8")])
def test_a_passphrase_opens_a_key(tmp_path, words):
    path = keygen(tmp_path / "k", "rsa", *words, passphrase="secret")
    key = read_identity(str(path), b"secret").key
    assert key is not None
    assert key.asbytes() == blob(path)
    wrong = read_identity(str(path), b"guess")
    assert (wrong.key, wrong.encrypted, wrong.problem) == (
        None,
        True,
        "it is encrypted with another passphrase",
    )


def test_a_fido_key_that_no_agent_holds(tmp_path):
    kind = b"sk-ssh-ed25519@openssh.com"
    body = len(kind).to_bytes(4, "big") + kind + bytes(4)
    path = tmp_path / "id_ed25519_sk"
    path.write_bytes(kind + b" " + base64.b64encode(body) + b"\n")
    found = read_identity(str(path))
    assert (found.key, found.public) == (None, body)
    assert found.problem == "it is a FIDO key that no ssh agent has; --ssh-client openssh can use it"
