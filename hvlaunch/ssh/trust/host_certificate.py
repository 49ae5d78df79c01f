"""Host certificates: an authority vouches for a host key, for some names and some time.

cryptography reads the format (PROTOCOL.certkeys in OpenSSH's sources) and checks the signature. The rules here
are the rules of OpenSSH's sshkey_cert_check_host().
"""

import base64
import fnmatch
import re
from typing import NamedTuple

__all__ = ["CERTIFICATE", "BadHostCertificate", "HostCertificate", "read_certificate"]

CERTIFICATE = "-cert-v01@openssh.com"
"""The end of a certificate's type; the type of its key comes before it."""

_FOREVER = (1 << 64) - 1
_STRONG_RSA = (b"rsa-sha2-256", b"rsa-sha2-512")
_LENGTH_BYTES = 4


class BadHostCertificate(Exception):
    """The certificate can't be read, or its authority's signature is wrong."""


class HostCertificate(NamedTuple):
    """A certificate with a valid signature. The caller decides whether to trust the authority."""

    authority: bytes
    """The authority's public key in wire format."""
    is_for_host: bool
    """False for a user's certificate."""
    principals: tuple[str, ...]
    """Valid host names, possibly with * and ?. An empty tuple allows any name."""
    valid_after: int
    """Seconds since 1970."""
    valid_before: int
    has_critical_options: bool
    """A reader must refuse a critical option that it does not know, and none is defined for hosts."""

    def problem(self, name: str, now: float) -> str | None:
        """Return why the certificate is not valid for the host `name` at the time `now`, or None if it is."""
        if not self.is_for_host:
            return "it is not a certificate for a host"
        if now < self.valid_after:
            return "it is not valid yet (is this machine's clock right?)"
        if self.valid_before != _FOREVER and now >= self.valid_before:
            return "it has expired"
        if self.principals and not any(_matches(name, pattern) for pattern in self.principals):
            return f"it is for {', '.join(self.principals)}, not for {name}"
        if self.has_critical_options:
            return "it has critical options, and none is defined for host certificates"
        return None


def read_certificate(blob: bytes) -> HostCertificate:
    """Parse the certificate in `blob` and verify its signature. Raises BadCertificate."""
    # cryptography takes as long to import as a local job takes to start, and only SSH to other hosts needs it.
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm  # noqa: PLC0415
    from cryptography.hazmat.primitives import serialization as ssh  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey  # noqa: PLC0415

    key_type = blob[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(blob[:_LENGTH_BYTES], "big")]
    try:
        certificate = ssh.load_ssh_public_identity(key_type + b" " + base64.b64encode(blob))
        if not isinstance(certificate, ssh.SSHCertificate):
            raise BadHostCertificate("it is a key, not a certificate")
        authority = certificate.signature_key()
        # An RSA signature is as long as the modulus, and its algorithm stands before its length. OpenSSH refuses
        # SHA-1 ("ssh-rsa"); cryptography accepts it and has no public name for the algorithm.
        if isinstance(authority, RSAPublicKey):
            signature_size = (authority.key_size + 7) // 8
            if not blob[: -(_LENGTH_BYTES + signature_size)].endswith(_STRONG_RSA):
                raise BadHostCertificate("it is signed by ssh-rsa, which is too weak")
        certificate.verify_cert_signature()
    except InvalidSignature:
        raise BadHostCertificate("its authority's signature is wrong") from None
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadHostCertificate(f"it can't be read: {error}") from None
    encoded = authority.public_bytes(ssh.Encoding.OpenSSH, ssh.PublicFormat.OpenSSH)
    return HostCertificate(
        authority=base64.b64decode(encoded.split()[1]),
        is_for_host=certificate.type is ssh.SSHCertificateType.HOST,
        principals=tuple(name.decode("utf-8", "backslashreplace") for name in certificate.valid_principals),
        valid_after=certificate.valid_after,
        valid_before=certificate.valid_before,
        has_critical_options=bool(certificate.critical_options),
    )


def _matches(name: str, pattern: str) -> bool:
    # Only * and ? are special in OpenSSH's patterns.
    literal = pattern.replace("[", "[[]")
    return re.match(fnmatch.translate(literal), name) is not None
