"""Identity files: private keys as ssh-keygen and OpenSSL write them, and the public halves beside them."""

import base64
import binascii
import copy
import io
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from paramiko.ecdsakey import ECDSAKey
from paramiko.ed25519key import Ed25519Key
from paramiko.message import Message
from paramiko.pkey import PKey
from paramiko.rsakey import RSAKey
from paramiko.ssh_exception import SSHException

__all__ = ["Identity", "read_identity"]

_OPENSSH_MAGIC = b"openssh-key-v1\0"
_PUBLIC_KEY_TYPES = (b"ssh-", b"ecdsa-", b"sk-")


@dataclass(frozen=True, slots=True)
class Identity:
    """What an identity file holds: keys to sign with, or why there is none; and the public half, where known.

    With a certificate beside the file there are two keys, of which the first shows the certificate.
    """

    path: str
    keys: tuple[PKey, ...] = ()
    public: bytes | None = None
    problem: str | None = None
    missing: bool = False
    encrypted: bool = False


def read_identity(path: str) -> Identity:
    """Read `path` and what lies beside it. Never raises: what is wrong is the `problem`.

    The formats are OpenSSH's (PROTOCOL.key in its sources) and PEM, PKCS #8 included.
    """
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return Identity(path, problem="there is no such file", missing=True)
    except OSError as error:
        return Identity(path, problem=f"it can't be read ({error.strerror})")
    public = _public_half(path, data)
    try:
        key = _private_key(data)
    except TypeError:  # cryptography wants a password, and got none
        return Identity(path, public=public, problem="encrypted, and no agent holds it", encrypted=True)
    except (ValueError, UnsupportedAlgorithm, SSHException):
        problem = "no agent holds it" if public else "it is not an RSA, ECDSA or Ed25519 private key"
        return Identity(path, public=public, problem=problem)
    return Identity(path, keys=(*_certified(path, key), key), public=key.asbytes())


def _private_key(data: bytes) -> PKey:
    openssh = b"BEGIN OPENSSH PRIVATE KEY" in data
    load = serialization.load_ssh_private_key if openssh else serialization.load_pem_private_key
    private = load(data, password=None)
    # paramiko reads only some PEM formats; this one it reads for every kind of key.
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
    kinds: tuple[tuple[type, type[PKey]], ...] = (
        (rsa.RSAPrivateKey, RSAKey),
        (ec.EllipticCurvePrivateKey, ECDSAKey),
        (ed25519.Ed25519PrivateKey, Ed25519Key),
    )
    for kind, key_class in kinds:
        if isinstance(private, kind):
            text = private.private_bytes(encoding, form, serialization.NoEncryption()).decode("ascii")
            return key_class.from_private_key(io.StringIO(text))
    raise ValueError(type(private).__name__)


def _certified(path: str, key: PKey) -> tuple[PKey, ...]:
    certificate = path + "-cert.pub"
    if not Path(certificate).exists():
        return ()
    certified = copy.copy(key)
    try:
        certified.load_certificate(certificate)
    except (ValueError, OSError, SSHException):
        return ()
    return (certified,)


def _public_half(path: str, data: bytes) -> bytes | None:
    """The public key in the file itself (a .pub file, or OpenSSH's format, which leaves it readable), or beside it."""
    try:
        if data.startswith(_PUBLIC_KEY_TYPES):
            return base64.b64decode(data.split()[1])
        if b"BEGIN OPENSSH PRIVATE KEY" in data:
            body = b"".join(line for line in data.splitlines() if not line.startswith(b"-"))
            message = Message(base64.b64decode(body)[len(_OPENSSH_MAGIC) :])
            for _ in ("cipher", "kdf", "kdf options"):
                message.get_string()
            message.get_int()
            return message.get_string()
        return base64.b64decode(Path(path + ".pub").read_bytes().split()[1])
    except (OSError, IndexError, binascii.Error):
        return None
