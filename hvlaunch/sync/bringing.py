"""Brings the user's files to hosts, from this machine or from a host: `hvlaunch cp` and `--bring`."""

import threading
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from hvlaunch.driver.links.errands import ErrandFailed
from hvlaunch.errors import CopyFailed
from hvlaunch.job import BringOptions
from hvlaunch.sync.delivery import Delivery, addresses_of, cause_of, new_peer
from hvlaunch.sync.files import NO_LIMIT, HostFiles, LocalFiles, offer_files

if TYPE_CHECKING:
    from hvlaunch.driver.links.errands import Errand
    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.engine.events import HostFacts

__all__ = ["Bringing"]

_LOOK = 1.0
_PATIENCE = 60.0
"""Seconds without a sign of the source host, from which on the others wait no longer."""


class Bringing:
    """A file or directory on its way to hosts. Raises BadUsage for unreadable files of this machine."""

    def __init__(self, options: BringOptions, *, has_peers: bool) -> None:
        self._options = options
        self._peer = new_peer() if has_peers or options.host is not None else None
        self._delivery: Delivery | None = None
        self._changed = threading.Condition()
        self._problem: CopyFailed | None = None
        self._signs = 0
        """Signs of progress from the source host."""
        self.files: LocalFiles | HostFiles | None = None
        if options.host is None:
            self._begin(LocalFiles(options.source))

    def _begin(self, files: LocalFiles | HostFiles) -> Delivery:
        name = PurePosixPath(self._options.source).name
        path = self._options.path + name if self._options.path.endswith("/") else self._options.path
        delivery = Delivery(
            files,
            None,
            peer=self._peer,
            errand="bring",
            arguments={"path": path, "is_file": files.is_file},
        )
        with self._changed:
            self.files, self._delivery = files, delivery
            self._changed.notify_all()
        return delivery

    def bring(self, link: "HostLink", facts: "HostFacts", ready: "Callable[[HostFacts], None]") -> None:
        """Bring the files to a host of a job, which is perhaps their source. Raises ErrandFailed, CopyFailed."""
        if link.host.name == self._options.host:
            self.serve(link, facts)
        self.deliver(link, facts, ready)

    def serve(self, link: "HostLink", facts: "HostFacts") -> "Errand":
        """Let the source host list its files, and serve them from now on; return its errand. Raises CopyFailed."""
        name = link.host.name
        try:
            errand = offer_files(link, self._options.source, peer=self._peer)
            files = HostFiles(errand, NO_LIMIT, self._sign, host=name)
        except (ErrandFailed, ValueError) as error:
            detail = error.detail if isinstance(error, ErrandFailed) else str(error)
            with self._changed:
                self._problem = CopyFailed(cause_of(detail), host=name)
                self._changed.notify_all()
            raise self._problem from error
        addresses = [(address, files.port) for address in addresses_of(facts)]
        self._begin(files).add_origin(addresses, errand)
        return errand

    def give_up(self, cause: str) -> None:
        """Let no host wait for the source host."""
        with self._changed:
            if self._delivery is None and self._problem is None:
                self._problem = CopyFailed(cause, host=self._options.host or "")
                self._changed.notify_all()

    def deliver(self, link: "HostLink", facts: "HostFacts", ready: "Callable[[HostFacts], None]") -> int:
        """Bring the files to a host, as Delivery.deliver(). Raises ErrandFailed, CopyFailed."""
        return self._await_source(link).deliver(link, facts, ready)

    def _sign(self) -> None:
        with self._changed:
            self._signs += 1
            self._changed.notify_all()

    def _await_source(self, link: "HostLink") -> Delivery:
        """Wait for the list of the files. Raises CopyFailed."""
        silence, signs = 0.0, -1
        while True:
            with self._changed:
                if self._problem is not None:
                    raise self._problem
                if self._delivery is not None:
                    return self._delivery
                silence = silence + _LOOK if signs == self._signs else 0.0
                signs = self._signs
                if silence > _PATIENCE:
                    raise CopyFailed(
                        f"host {self._options.host} does not list its files", host=link.host.name
                    )
                self._changed.wait(_LOOK)
            link.tell_preparing("files from other hosts")
