"""Connections to the one server that has a certificate known beforehand, by TLS 1.3."""

from __future__ import annotations

import hashlib
import http.client
import re
import ssl
from functools import cache
from hmac import compare_digest
from pathlib import Path

from hvlaunch.rendezvous.client_errors import BadCertificate

__all__ = ["PinnedConnection", "WrongCertificate", "read_pin"]

_PIN = re.compile(r"sha256:([0-9a-fA-F]{64})")
_LONGEST = 64 << 10


class WrongCertificate(OSError):
    """Somebody else answers at the server's address."""


class PinnedConnection(http.client.HTTPConnection):
    """HTTP to a server whose certificate has the fingerprint `pin`. It is told nothing before that is proved."""

    def __init__(self, host: str, port: int, pin: str, timeout: float) -> None:
        super().__init__(host, port, timeout=timeout)
        self._pin = pin

    def connect(self) -> None:
        """Raises WrongCertificate."""
        super().connect()
        try:
            self.sock = _context().wrap_socket(self.sock)
            _check(self.sock, self._pin)
        except BaseException:
            self.close()
            raise


def _check(sock: ssl.SSLSocket, pin: str) -> None:
    """Raises WrongCertificate."""
    shown = sock.getpeercert(binary_form=True) or b""
    if not compare_digest("sha256:" + hashlib.sha256(shown).hexdigest(), pin):
        raise WrongCertificate("its certificate is not the expected one")


def read_pin(text: str) -> str:
    """The fingerprint in `text`: itself (`sha256:` and 64 hexadecimal digits), or that of the file with this name.

    Raises BadCertificate.
    """
    match = _PIN.fullmatch(text)
    if match is not None:
        return "sha256:" + match[1].lower()
    try:
        with Path(text).open("rb") as reader:
            content = reader.read(_LONGEST).decode("ascii", "replace")
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadCertificate(f"certificate {text}: {cause}") from error
    try:
        der = ssl.PEM_cert_to_DER_cert(content.strip())
    except ValueError as error:
        raise BadCertificate(f"certificate {text}: not a certificate in PEM") from error
    return "sha256:" + hashlib.sha256(der).hexdigest()


@cache
def _context() -> ssl.SSLContext:
    """No authority is asked, whom we would have to trust: the fingerprint says more than any of them could.

    Whoever has the certificate must also have its key, which TLS 1.3 proves in each handshake.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
