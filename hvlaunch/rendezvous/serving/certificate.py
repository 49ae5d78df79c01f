"""A job's own self-signed certificate, made by its driver or in advance by its warm pool; clients know its fingerprint."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

# A job on this machine alone needs no TLS.
if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

__all__ = ["Certificate", "new_peer", "tls_context"]

_BEGIN = b"-----BEGIN CERTIFICATE-----"
_END = b"-----END CERTIFICATE-----"
_NAME = b"hvlaunch"
_ECDSA_WITH_SHA256 = bytes.fromhex("300a06082a8648ce3d040302")
_P256_KEY = bytes.fromhex("301306072a8648ce3d020106082a8648ce3d030107")
_COMMON_NAME = bytes.fromhex("0603550403")
# Valid forever: hosts' clocks may be wrong, and the certificate is thrown away with the job (RFC 5280, 4.1.2.5).
_ALWAYS = b"\x17\x0d000101000000Z", b"\x18\x0f99991231235959Z"


class Certificate:
    """A P-256 key and its self-signed certificate, made at the first use.

    `pem` has an existing pair: the key, then the certificate.
    """

    def __init__(self, pem: bytes | None = None) -> None:
        self._lock = threading.Lock()
        self._made = None if pem is None else _read(pem)

    def _make(self) -> tuple[bytes, bytes]:
        """Return the private key as PEM and the certificate as DER."""
        # The server's thread and the driver's may need the pair at the same moment.
        with self._lock:
            if self._made is None:
                self._made = _make()
            return self._made

    def adopt(self, pem: bytes) -> None:
        """Use a pair made in advance, unless this certificate is made already. Raises ValueError."""
        with self._lock:
            # An existing pair stays: clients may have its fingerprint already.
            self._made = self._made or _read(pem)

    @property
    def key(self) -> bytes:
        """The private key, as PEM."""
        return self._make()[0]

    @property
    def pem(self) -> bytes:
        """The certificate without its key, as PEM."""
        import base64  # noqa: PLC0415 (see the top)

        return _BEGIN + b"\n" + base64.encodebytes(self._make()[1]) + _END + b"\n"

    @property
    def fingerprint(self) -> str:
        """The fingerprint for clients: `sha256:` and 64 hexadecimal digits."""
        import hashlib  # noqa: PLC0415 (see the top)

        return "sha256:" + hashlib.sha256(self._make()[1]).hexdigest()


def new_peer() -> Mapping[str, str]:
    """Return a secret and a certificate by which hosts know each other when they fetch files from one another."""
    certificate = Certificate()
    return {
        "secret": os.urandom(32).hex(),
        "fingerprint": certificate.fingerprint,
        "pem": (certificate.key + certificate.pem).decode("ascii"),
    }


def tls_context(certificate: Certificate) -> ssl.SSLContext:
    """Return a server context for TLS 1.3 with this certificate."""
    import ssl  # noqa: PLC0415 (see the top)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Handshakes are cheap with these keys; a ticket would arrive unasked.
    context.num_tickets = 0
    # OpenSSL reads keys from files only. This file is in memory: the key never touches a disk.
    file = os.memfd_create("hvlaunch-key", os.MFD_CLOEXEC)
    with os.fdopen(file, "wb", buffering=0) as writer:
        writer.write(certificate.key + certificate.pem)
        context.load_cert_chain(Path(f"/proc/self/fd/{file}"))
    return context


def _read(pem: bytes) -> tuple[bytes, bytes]:
    """Raises ValueError."""
    import base64  # noqa: PLC0415 (see the top)

    key, _, certificate = pem.partition(_BEGIN)
    text, end, _ = certificate.partition(_END)
    if not (key and end):
        raise ValueError("not a key and a certificate")
    return key, base64.b64decode(text.replace(b"\n", b""), validate=True)


def _make() -> tuple[bytes, bytes]:
    """Make a pair with cryptography's primitives: its x509 module would write the same bytes after 25 ms of imports."""
    import base64  # noqa: PLC0415 (see the top)
    import hashlib  # noqa: PLC0415 (see the top)

    from cryptography.hazmat.primitives import hashes  # noqa: PLC0415 (few jobs need a key)
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415 (as above)

    key = ec.generate_private_key(ec.SECP256R1())
    numbers = key.private_numbers()
    x, y = numbers.public_numbers.x, numbers.public_numbers.y
    secret, *point = (number.to_bytes(32, "big") for number in (numbers.private_value, x, y))
    bits = _der(0x03, b"\0\4", *point)
    public = _der(0x30, _P256_KEY, bits)  # RFC 5480, 2
    name = _der(0x30, _der(0x31, _der(0x30, _COMMON_NAME, _der(0x0C, _NAME))))
    # RFC 5280, 4.1: version 3, serial number, signature algorithm, validity, subject, key.
    # The first byte keeps the serial number positive, and free of leading zeros, as DER demands.
    serial = _der(0x02, b"\x01" + hashlib.sha256(public).digest()[:16])
    version = _der(0xA0, _der(0x02, b"\x02"))
    body = _der(0x30, version, serial, _ECDSA_WITH_SHA256, name, _der(0x30, *_ALWAYS), name, public)
    signature = key.sign(body, ec.ECDSA(hashes.SHA256()))
    inner = _der(0x30, _der(0x02, b"\1"), _der(0x04, secret), _der(0xA1, bits))  # RFC 5915, 3
    pkcs8 = base64.encodebytes(_der(0x30, _der(0x02, b"\0"), _P256_KEY, _der(0x04, inner)))  # RFC 5208, 5
    private = b"-----BEGIN PRIVATE KEY-----\n" + pkcs8 + b"-----END PRIVATE KEY-----\n"
    return private, _der(0x30, body, _ECDSA_WITH_SHA256, _der(0x03, b"\0", signature))


def _der(tag: int, *parts: bytes) -> bytes:
    """Return one ASN.1 value in DER: tag, length, content."""
    content = b"".join(parts)
    size = len(content)
    if size < 0x80:  # noqa: PLR2004 (the longest that has a length of one byte)
        return bytes((tag, size)) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes((tag, 0x80 | len(length))) + length + content
