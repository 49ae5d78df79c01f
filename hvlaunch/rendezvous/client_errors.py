"""What can go wrong at the rendezvous, in the store, on the wire and in a client."""

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
    """The base. `url` is the server's, where one is known; no message ever has the token."""

    def __init__(self, cause: str, *, url: str | None = None, hint: str | None = None) -> None:
        super().__init__(f"rendezvous {url}: {cause}" if url else cause, hint=hint)
        self.url = url


class BadCertificate(RendezvousError):
    """What is to be the server's certificate, or its fingerprint, can't be read as one."""

    exit_code = EXIT_USAGE

    def __init__(self, cause: str) -> None:
        super().__init__(cause, hint="the certificate's file in PEM, or sha256: and 64 hexadecimal digits")


class CannotListen(RendezvousError):
    """The address or the port that the server was told can't be had. `port` 0 was any."""

    exit_code = EXIT_USAGE

    def __init__(self, cause: str, *, host: str, port: int) -> None:
        where = f"{host or 'all addresses'} port {port}"
        super().__init__(f"the rendezvous can't listen on {where}: {cause}", hint="another port")
        self.listen_host = host
        self.port = port


class NoRendezvous(RendezvousError):
    """Nothing, or nothing usable, says where the rendezvous is or what its token is."""


class RendezvousUnreachable(RendezvousError):
    """No connection, one that broke, or no answer in time."""


class RendezvousClosed(RendezvousError):
    """The server has ended, or is just ending."""


class Unauthorized(RendezvousError):
    """The server does not take the token."""


class UnexpectedAnswer(RendezvousError):
    """The server answers what a rendezvous would not: `status` is its HTTP status."""

    def __init__(self, status: int, *, url: str) -> None:
        super().__init__(
            f"unexpected HTTP status {status}",
            url=url,
            hint="check that this is the address of the job's driver",
        )
        self.status = status


class WaitTimeout(RendezvousError):
    """Nobody set `key` of `scope` within `seconds`."""

    def __init__(self, scope: str, key: str, seconds: float, *, url: str | None = None) -> None:
        super().__init__(f"nobody set {scope}/{key} within {seconds:g} s", url=url)
        self.scope = scope
        self.key = key
        self.seconds = seconds


class ValueTooLarge(RendezvousError):
    """A value has more bytes than the store takes."""


class StoreFull(RendezvousError):
    """The store has all the keys, or all the bytes, that it may have."""


class NotANumber(RendezvousError):
    """What is to be added to is no decimal number of 64 bits, or the sum would be none."""


class TooManyConnections(RendezvousError):
    """The server has as many connections as it takes, from this address or from all."""
