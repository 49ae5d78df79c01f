"""The HTTP key-value server of a job, its client, and progress reports of workers; the errors of the store, of the wire and of clients."""

from typing import TYPE_CHECKING, Any

from hvlaunch.errors import EXIT_USAGE, HvlaunchError

if TYPE_CHECKING:
    from hvlaunch.rendezvous.client import Client
    from hvlaunch.rendezvous.worker import progress

__all__ = [
    "BadCertificate",
    "CannotListen",
    "Client",
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
    "progress",
]


class RendezvousError(HvlaunchError):
    """Base of the errors of the rendezvous and its client. `url` is the server's, if known; no message contains the token.

    Try: the message names the next step.
    """

    def __init__(self, cause: str, *, url: str | None = None, hint: str | None = None) -> None:
        # The URL has no token: messages may be shown and logged.
        super().__init__(f"rendezvous {url}: {cause}" if url else cause, hint=hint)
        self.url = url
        """The server's address, without the token; None if it is not known."""


class BadCertificate(RendezvousError):
    """The server's certificate can't be read: neither a PEM file, nor `sha256:` with 64 hexadecimal digits.

    Try: a copy of `token.crt` from the server.
    """

    exit_code = EXIT_USAGE
    """2: wrong usage."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause, hint="the certificate's file in PEM, or sha256: and 64 hexadecimal digits")


class CannotListen(RendezvousError):
    """The server can't listen at this address or `port`: in use, below 1024, or not an address of this machine.

    Try: another port; `ss -ltnp` shows its user.
    """

    exit_code = EXIT_USAGE
    """2: wrong usage."""

    def __init__(self, cause: str, *, host: str, port: int) -> None:
        address = f"{host or 'all addresses'} port {port}"
        super().__init__(f"the rendezvous can't listen on {address}: {cause}", hint="another port")
        self.listen_host = host
        """The requested address; "" is every address of this machine."""
        self.port = port
        """The requested port."""


class NoRendezvous(RendezvousError):
    """`HVLAUNCH_RENDEZVOUS`, its token or its certificate is missing or malformed.

    Try: start the program with `hvlaunch`; `sudo` drops the variables.
    """


class RendezvousUnreachable(RendezvousError):
    """The server can't be reached, broke the connection, or did not answer in time: its driver has ended, or a firewall is between.

    Try: `--rendezvous-relay always` uses ssh instead.
    """


class RendezvousClosed(RendezvousError):
    """The server has ended or is ending, because the job is.

    Try: end the client, without a retry.
    """


class Unauthorized(RendezvousError):
    """The server refuses the token: another job's, or from an old token file.

    Try: use the token of this server.
    """


class UnexpectedAnswer(RendezvousError):
    """The answer is not a rendezvous'; `status` is its HTTP status. Another program listens at this address."""

    def __init__(self, status: int, *, url: str) -> None:
        super().__init__(
            f"unexpected HTTP status {status}",
            url=url,
            hint="check that this is the address of the job's driver",
        )
        self.status = status
        """HTTP status of the answer."""


class WaitTimeout(RendezvousError):
    """No client set `key` of `scope` within `seconds`: the other side is late, or uses another name.

    Try: compare the names on both sides; or a longer timeout.
    """

    def __init__(self, scope: str, key: str, seconds: float, *, url: str | None = None) -> None:
        super().__init__(f"nobody set {scope}/{key} within {seconds:g} s", url=url)
        self.scope = scope
        """Scope of the key."""
        self.key = key
        """The awaited key, or the first of several."""
        self.seconds = seconds
        """Seconds waited."""


class ValueTooLarge(RendezvousError):
    """A value exceeds the store's limit of 16 MiB.

    Try: write a file, and put its path.
    """


class StoreFull(RendezvousError):
    """The store has reached its limit of 100,000 keys or 512 MiB.

    Try: delete old keys.
    """


class NotANumber(RendezvousError):
    """The old value of `add()` is not a decimal number, or the sum exceeds 64 bits.

    Try: another key: another client has stored something else here.
    """


class TooManyConnections(RendezvousError):
    """The server has reached its limit of connections, from this address or in total (docs/interfaces/rendezvous-http.md#what-is-refused).

    Try: close clients; raise a low `ulimit -n`.
    """


def __getattr__(
    name: str,
) -> Any:  # imported when it is asked for: the driver, which needs no client, starts faster
    if name == "Client":
        from hvlaunch.rendezvous.client import Client  # noqa: PLC0415 (see above)

        return Client
    if name == "progress":
        from hvlaunch.rendezvous.worker import progress  # noqa: PLC0415 (see above)

        return progress
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
