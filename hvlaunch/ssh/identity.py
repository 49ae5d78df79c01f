"""Identity files: private keys in the formats of ssh-keygen and OpenSSL, and the public keys beside them."""

import base64
import binascii
import copy
import io
import os
import stat
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from paramiko.agent import AgentKey
from paramiko.ecdsakey import ECDSAKey
from paramiko.ed25519key import Ed25519Key
from paramiko.message import Message
from paramiko.pkey import PKey, PublicBlob, UnknownKeyType
from paramiko.rsakey import RSAKey
from paramiko.ssh_exception import SSHException

from hvlaunch.named_tuples import NamedTuple
from hvlaunch.owners import other_reader
from hvlaunch.ssh.config import OPENSSH
from hvlaunch.ssh.known_hosts import CERTIFICATE

__all__ = ["Identity", "UserCertificate", "bare_key", "certified", "read_certificate", "read_identity"]


_LONGEST = 1 << 20
"""Maximum size of a key file in bytes."""
_PRIVATE = b" PRIVATE KEY-----"
_OPENSSH_MAGIC = b"openssh-key-v1\0"
_PUBLIC_KEY_TYPES = (b"ssh-", b"ecdsa-", b"sk-")
_FIDO = b"sk-"


class Identity(NamedTuple):
    """The content of an identity file: a private key, or the reason for its absence; and the public key if known."""

    path: str
    key: PKey | None = None
    public: bytes | None = None
    problem: str | None = None
    missing: bool = False
    exposed: bool = False
    """True if other users can read the file: then the key is used only if an agent holds it."""
    encrypted: bool = False


class UserCertificate(NamedTuple):
    """A user's certificate; `public` is the key that its authority signed."""

    path: str
    public: bytes
    blob: PublicBlob


def read_identity(path: str, passphrase: bytes | None = None) -> Identity:
    """Read `path` and the files beside it. Never raises: `problem` describes an error.

    The formats are OpenSSH's (PROTOCOL.key in its sources) and PEM, including PKCS #8.
    """
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            # A device is not read: /dev/null is a usual name for no key, and /dev/zero never ends.
            data = b"" if stat.S_ISCHR(status.st_mode) else file.read(_LONGEST)
    except FileNotFoundError:
        return Identity(path, problem="there is no such file", missing=True)
    except OSError as error:
        return Identity(path, problem=f"it can't be read ({error.strerror})")
    public = _public_half(path, data)
    if _PRIVATE in data and (reader := other_reader(status)) is not None:
        return Identity(path, public=public, problem=reader, exposed=True)
    try:
        key = _private_key(data, passphrase)
    except TypeError:  # cryptography wants a password, and got none
        return Identity(
            path, public=public, problem="it is encrypted and no ssh agent has it", encrypted=True
        )
    except (ValueError, UnsupportedAlgorithm, SSHException):
        if passphrase is not None:
            return Identity(
                path, public=public, problem="it is encrypted with another passphrase", encrypted=True
            )
        return Identity(path, public=public, problem=_unusable(public))
    return Identity(path, key, key.asbytes())


def read_certificate(path: str) -> UserCertificate | None:
    """Read the user's certificate in `path`; return None if it can't be used."""
    try:
        blob = PublicBlob.from_file(path)
        return UserCertificate(path, bare_key(blob.key_blob), blob)
    except (OSError, ValueError, SSHException, UnknownKeyType):
        return None


def bare_key(certificate: bytes) -> bytes:
    """Return the public key of `certificate`, both in wire format. Raises ValueError, SSHException, UnknownKeyType."""
    # Not cryptography's reader, which refuses what matters only to the host: the authority may be a FIDO key.
    key_type = Message(certificate).get_text()
    if not key_type.endswith(CERTIFICATE):
        raise ValueError(key_type)
    return PKey.from_type_string(key_type.removesuffix(CERTIFICATE), certificate).asbytes()


def certified(key: PKey, blob: PublicBlob) -> PKey:
    """Return the same key with the certificate in `blob`."""
    shows = AgentKey(key.agent, key.blob, key.comment) if isinstance(key, AgentKey) else copy.copy(key)
    shows.public_blob = blob
    return shows


def _unusable(public: bytes | None) -> str:
    if not public:
        return "it is not an RSA, ECDSA or Ed25519 private key"
    # The key's type follows its length, four bytes.
    if public[4:].startswith(_FIDO):
        return f"it is a FIDO key that no ssh agent has; {OPENSSH} can use it"
    return "no ssh agent has it"


def _private_key(data: bytes, passphrase: bytes | None) -> PKey:
    openssh = b"BEGIN OPENSSH PRIVATE KEY" in data
    load = serialization.load_ssh_private_key if openssh else serialization.load_pem_private_key
    private = load(data, password=passphrase)
    # paramiko reads only some PEM formats, but OpenSSH's for every kind of key.
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


def _public_half(path: str, data: bytes) -> bytes | None:
    """Return the public key from the file itself (a .pub file, or OpenSSH's format), or from the .pub file
    beside it.
    """
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
