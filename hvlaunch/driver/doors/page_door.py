"""Where a job's page is served: opened when somebody wants it, and again by a driver that takes the job over."""

import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvlaunch.errors import HvlaunchError
from hvlaunch.rendezvous.client_errors import RendezvousClosed

if TYPE_CHECKING:
    from hvlaunch.driver.doors.page import Page
    from hvlaunch.driver.doors.page_access import Access, Place
    from hvlaunch.outside.care import Care
    from hvlaunch.rendezvous.serving.http import Answer, Head, Route

    Admit = Callable[[Head], Answer | Route]

__all__ = ["PageDoor", "PageNotServed"]

_LOOPBACK = "127.0.0.1"


class PageNotServed(HvlaunchError):
    """The page can't be served as it was asked for; `cause` says why."""


class PageDoor:
    """All methods but close() are for the server's thread, or before it serves. `serve` adds a socket to the server.

    `directory` is the job's own; `control` serves its control socket; `fingerprint` gives that of the job's certificate.
    """

    def __init__(
        self,
        directory: Path,
        job: str,
        serve: Callable[[socket.socket, "Admit"], None],
        control: "Admit",
        fingerprint: Callable[[], str],
        care: "Care",
    ) -> None:
        self._directory = directory
        self._job = job
        self._serve = serve
        self._control = control
        self._fingerprint = fingerprint
        self._care = care
        self._open: tuple[Place, Access, Page] | None = None

    def ask(self, wish: Mapping[str, Any]) -> Mapping[str, Any]:
        """Serve the page, if it is not served yet: its address, with a token for one browser. Raises PageNotServed.

        `wish` has `bind` (an address, or null for this machine alone), and `is_open`: whether other machines' browsers are let in
        without TLS.
        """
        place, access = self._opened(wish)
        return {
            "url": f"{_url(place)}/#{access.new_token()}",
            "fingerprint": self._fingerprint() if _is_tls(place) else None,
        }

    def ask_scrape(self, wish: Mapping[str, Any]) -> Mapping[str, Any]:
        """As ask(), for metrics: their address, and the token for them, which is good as long as the job. Raises PageNotServed."""
        place, access = self._opened(wish)
        return {
            "url": f"{_url(place)}/metrics",
            "token": access.scrape_token,
            "fingerprint": self._fingerprint() if _is_tls(place) else None,
        }

    def _opened(self, wish: Mapping[str, Any]) -> "tuple[Place, Access]":
        if self._open is None:
            self._open = self._begin(wish["bind"] or _LOOPBACK, is_open=wish["is_open"])
        place, access, _ = self._open
        if (wish["bind"] or place.address) != place.address or (wish["is_open"] and not place.is_open):
            raise PageNotServed(f"this job's page is served at {place.address} already")
        return place, access

    def reopen(self) -> None:
        """Serve it as the driver before us has, if it did and has left its socket: at the same port, for the same browsers.

        Where the port was free for a moment, whoever listened there may have got the secrets: these are good for nothing then.
        """
        from hvlaunch.driver.doors import page_access  # noqa: PLC0415 (few jobs are looked at with a browser)

        path, listener = self._directory / page_access.PAGE_FILE, self._care.listener
        with suppress(OSError, ValueError, PageNotServed):
            if listener is None:
                path.unlink(missing_ok=True)
            else:
                self._open = self._serve_at(listener, *page_access.load(path))

    def close(self) -> None:
        """The job has ended."""
        if self._open is not None:
            self._open[2].close()

    def _begin(self, address: str, *, is_open: bool) -> "tuple[Place, Access, Page]":
        from hvlaunch.driver.doors import page_access  # noqa: PLC0415 (few jobs are looked at with a browser)

        listener = _listen(address, 0)
        place = page_access.Place(address, listener.getsockname()[1], is_open)
        secrets = page_access.Secrets.new()
        with suppress(OSError):  # a full disk: then the page ends with this driver
            page_access.save(self._directory / page_access.PAGE_FILE, place, secrets)
        return self._serve_at(listener, place, secrets)

    def _serve_at(
        self, listener: socket.socket, place: "Place", secrets: Any
    ) -> "tuple[Place, Access, Page]":
        from hvlaunch.driver.doors.page import Page  # noqa: PLC0415 (few jobs are looked at with a browser)
        from hvlaunch.driver.doors.page_access import Access  # noqa: PLC0415 (as above)

        access = Access(self._job, place, secrets)
        page = Page(self._directory, access, self._control)
        self._care.keep(listener)
        try:
            self._serve(listener, page)
        except RendezvousClosed:
            listener.close()
            raise PageNotServed("the job is ending") from None
        return place, access, page


def _is_tls(place: "Place") -> bool:
    from hvlaunch.rendezvous.serving.wire import is_loopback  # noqa: PLC0415 (few jobs are looked at with a browser)

    return not is_loopback(place.address) and not place.is_open


def _url(place: "Place") -> str:
    name = f"[{place.address}]" if ":" in place.address else place.address
    return f"{'https' if _is_tls(place) else 'http'}://{name}:{place.port}"


def _listen(address: str, port: int) -> socket.socket:
    """Raises PageNotServed."""
    listener = None
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        if listener.getsockname()[0] in ("0.0.0.0", "::"):  # noqa: S104 (it is refused)
            listener.close()
            raise PageNotServed(f"{address} is every address: name one", hint="--bind ADDRESS")
        listener.listen()
    except OSError as error:
        if listener is not None:
            listener.close()
        cause = f"{address}: {(error.strerror or str(error)).lower()}"
        raise PageNotServed(cause, hint="--bind with an address of this machine") from None
    return listener
