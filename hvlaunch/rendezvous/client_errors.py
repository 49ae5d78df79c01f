"""Errors of the rendezvous: of the store, of the wire and of clients."""

from hvlaunch.errors import EXIT_USAGE, HvlaunchError

__all__ = [
    "BadCertificate",
    "CannotListen",
    "NoRendezvous",
    "NotANumber",
    "RendezvousClosed",
    "RendezvousError",
    "RendezvousUnreachable",
    "StoreFull",
    "TooManyConnections",
    "Unauthorized",
    "UnexpectedAnswer",
    "ValueTooLarge",
    "WaitTimeout",
]


class RendezvousError(HvlaunchError):
    """Base class. `url` is the server's, if known; no message contains the token."""

    def __init__(self, cause: str, *, url: str | None = None, hint: str | None = None) -> None:
        # The URL has no token: messages may be shown and logged.
        super().__init__(f"rendezvous {url}: {cause}" if url else cause, hint=hint)
        self.url = url


class BadCertificate(RendezvousError):
    """The server's certificate, or its fingerprint, can't be read."""

    exit_code = EXIT_USAGE

    def __init__(self, cause: str) -> None:
        super().__init__(cause, hint="the certificate's file in PEM, or sha256: and 64 hexadecimal digits")


class CannotListen(RendezvousError):
    """The server can't listen at the requested address or port; `port` 0 means any."""

    exit_code = EXIT_USAGE

    def __init__(self, cause: str, *, host: str, port: int) -> None:
        address = f"{host or 'all addresses'} port {port}"
        super().__init__(f"the rendezvous can't listen on {address}: {cause}", hint="another port")
        self.listen_host = host
        self.port = port


class NoRendezvous(RendezvousError):
    """The address or the token of the rendezvous is missing or malformed."""


class RendezvousUnreachable(RendezvousError):
    """The server can't be reached, broke the connection, or did not answer in time."""


class RendezvousClosed(RendezvousError):
    """The server has ended, or is ending."""


class Unauthorized(RendezvousError):
    """The server refuses the token."""


class UnexpectedAnswer(RendezvousError):
    """The answer is not a rendezvous'; `status` is its HTTP status."""

    def __init__(self, status: int, *, url: str) -> None:
        super().__init__(
            f"unexpected HTTP status {status}",
            url=url,
            hint="check that this is the address of the job's driver",
        )
        self.status = status


class WaitTimeout(RendezvousError):
    """No client set `key` of `scope` within `seconds`."""

    def __init__(self, scope: str, key: str, seconds: float, *, url: str | None = None) -> None:
        super().__init__(f"nobody set {scope}/{key} within {seconds:g} s", url=url)
        self.scope = scope
        self.key = key
        self.seconds = seconds


class ValueTooLarge(RendezvousError):
    """A value exceeds the store's limit."""


class StoreFull(RendezvousError):
    """The store has reached its limit of keys or bytes."""


class NotANumber(RendezvousError):
    """The old value of a sum is not a decimal number, or the sum exceeds 64 bits."""


class TooManyConnections(RendezvousError):
    """The server has reached its limit of connections, from this address or in total."""
