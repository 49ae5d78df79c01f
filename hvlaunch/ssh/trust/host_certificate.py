"""Host certificates: a host key that an authority vouches for, for some names and some time.

The format is OpenSSH's (PROTOCOL.certkeys in its sources), the rules those of its
sshkey_cert_check_host().
"""

import fnmatch
import re
from dataclasses import dataclass

from hvlaunch.errors import HvlaunchError

__all__ = ["CERTIFICATE", "BadCertificate", "HostCertificate", "bare_key", "read_certificate"]

CERTIFICATE = "-cert-v01@openssh.com"
"""What the type of a certificate ends with; before it is the type of its key."""

_HOST = 2
_KEY_FIELDS = {"ssh-ed25519": 1, "ssh-rsa": 2}
_ECDSA_FIELDS = 2
_FOREVER = (1 << 64) - 1
_TOO_LONG = "it has bytes after its end"
_SIGNATURES = frozenset(
    (
        "ssh-ed25519",
        "rsa-sha2-256",
        "rsa-sha2-512",
        "ecdsa-sha2-nistp256",
        "ecdsa-sha2-nistp384",
        "ecdsa-sha2-nistp521",
    )
)
"""What authorities may sign with; SHA-1 is not among it."""


class BadCertificate(HvlaunchError):
    """It can't be read, or its authority's signature is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCertificate:
    """A certificate that its authority did sign. Whether the authority is to be trusted is another matter."""

    authority: bytes
    """The authority's public key, as it goes over the wire."""
    kind: int
    """1 is a user's, 2 a host's."""
    principals: tuple[str, ...]
    """The names that it holds for, which may have * and ? in them; none means any."""
    valid_after: int
    """Seconds since 1970."""
    valid_before: int
    critical: bytes
    """Options that who does not know them must refuse; none is defined for hosts."""

    def problem(self, name: str, now: float) -> str | None:
        """Why it does not hold for the host of that name at that time; None where it does."""
        if self.kind != _HOST:
            return "it is not a certificate for a host"
        if now < self.valid_after:
            return "it is not valid yet (is this machine's clock right?)"
        if self.valid_before != _FOREVER and now >= self.valid_before:
            return "it has expired"
        if self.principals and not any(_matches(name, pattern) for pattern in self.principals):
            return f"it is for {', '.join(self.principals)}, not for {name}"
        if self.critical:
            return "it has critical options, and none is defined for host certificates"
        return None


def bare_key(certificate: bytes) -> bytes:
    """The public key that a certificate is for, as it goes over the wire. Raises BadCertificate."""
    fields = _FieldReader(certificate)
    key_type = fields.text()
    if not key_type.endswith(CERTIFICATE):
        raise BadCertificate(f"{key_type} is not a type of certificate")
    fields.data()  # nonce
    start = len(fields.so_far())
    fields.skip_key(key_type)
    name = key_type.removesuffix(CERTIFICATE).encode()
    return len(name).to_bytes(4, "big") + name + fields.so_far()[start:]


def read_certificate(blob: bytes) -> HostCertificate:
    """The certificate in `blob`, its signature being verified. Raises BadCertificate."""
    fields = _FieldReader(blob)
    key_type = fields.text()
    fields.data()  # nonce
    fields.skip_key(key_type)
    fields.number(8)  # serial
    kind = fields.number(4)
    fields.text()  # key id
    principals = _FieldReader(fields.data()).texts()
    valid_after, valid_before = fields.number(8), fields.number(8)
    critical = fields.data()
    fields.data()  # extensions
    fields.data()  # reserved
    authority = fields.data()
    signed = fields.so_far()
    signature = fields.data()
    if not fields.at_end():
        raise BadCertificate(_TOO_LONG)
    _check_signature(authority, signed, signature)
    return HostCertificate(
        authority=authority,
        kind=kind,
        principals=principals,
        valid_after=valid_after,
        valid_before=valid_before,
        critical=critical,
    )


def _check_signature(authority: bytes, signed: bytes, signature: bytes) -> None:
    from paramiko.message import Message  # noqa: PLC0415  (100 ms, and only SSH to other hosts needs it)
    from paramiko.pkey import PKey, UnknownKeyType  # noqa: PLC0415
    from paramiko.ssh_exception import SSHException  # noqa: PLC0415

    authority_type = _FieldReader(authority).text()
    seal = _FieldReader(signature)
    algorithm, _ = seal.text(), seal.data()
    if not seal.at_end():
        raise BadCertificate(_TOO_LONG)
    if algorithm not in _SIGNATURES:
        raise BadCertificate(f"it is signed by {algorithm}, which is too weak or not known")
    try:
        key = PKey.from_type_string(authority_type, authority)
        right = key.verify_ssh_sig(signed, Message(signature))
    except (SSHException, ValueError, UnknownKeyType) as error:
        raise BadCertificate(f"its authority's key can't be used: {error}") from None
    if not right or authority_type.endswith(CERTIFICATE):
        raise BadCertificate("its authority's signature is wrong")


def _matches(name: str, pattern: str) -> bool:
    literal = pattern.replace("[", "[[]")  # only * and ? are special in OpenSSH's patterns
    return re.match(fnmatch.translate(literal), name) is not None


class _FieldReader:
    """Reads what SSH writes: numbers, and bytes after their length."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big")

    def data(self) -> bytes:
        return self._take(self.number(4))

    def text(self) -> str:
        return self.data().decode("utf-8", "backslashreplace")

    def skip_key(self, key_type: str) -> None:
        for _ in range(_KEY_FIELDS.get(key_type.removesuffix(CERTIFICATE), _ECDSA_FIELDS)):
            self.data()

    def texts(self) -> tuple[str, ...]:
        found: list[str] = []
        while not self.at_end():
            found.append(self.text())
        return tuple(found)

    def so_far(self) -> bytes:
        return self._data[: self._at]

    def at_end(self) -> bool:
        return self._at == len(self._data)

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise BadCertificate("it is incomplete")
        self._at += size
        return self._data[self._at - size : self._at]
