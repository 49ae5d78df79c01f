"""Brings the user's files to hosts, from this machine or from a host: `hvlaunch cp` and `--bring`."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from hvlaunch.driver.links.errands import ErrandFailed
from hvlaunch.errors import CopyFailed
from hvlaunch.job import BringOptions
from hvlaunch.owners import write_whole
from hvlaunch.rendezvous.serving.certificate import new_peer
from hvlaunch.sync.delivery import Delivery, addresses_of, cause_of
from hvlaunch.sync.files import NO_LIMIT, FileList, HostFiles, LocalFiles, offer_files

if TYPE_CHECKING:
    from hvlaunch.driver.links.errands import Errand
    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.engine.events import HostFacts

__all__ = ["Bringing"]

_Links = Callable[[], "Sequence[HostLink]"]
_LOOK = 1.0
_PATIENCE = 60.0
"""Seconds without a sign of the source host, from which on the others wait no longer."""


class _KeptFiles:
    """Files of a fixed list. A part comes from the source, or from any other host of the job with this part."""

    def __init__(
        self, files: LocalFiles | HostFiles | FileList, options: BringOptions, path: str, links: "_Links"
    ) -> None:
        self.hash, self.manifest, self.numbered = files.hash, files.manifest, files.numbered
        self.size_of = files.size_of
        self._files = files
        self._options = options
        self._path = path
        self._links = links
        self._lock = threading.Lock()
        self._from_hosts: dict[tuple[int, str], HostFiles | None] = {}
        """The files by the link's number and the path there; None for a host without."""

    def read(self, number: int) -> bytes:
        """Raises OSError."""
        try:
            return self._read_source(number)
        except OSError as error:
            problem = error
        with self._lock:
            for files in self._elsewhere():
                # A lost host, or one whose workers have changed the file: another one may have it.
                with suppress(OSError):
                    data = files.read(number)
                    # The receiving host would fail for another host's lie.
                    if sha256(data).hexdigest() == self.numbered[number]:
                        return data
        raise problem

    def _read_source(self, number: int) -> bytes:
        """Raises OSError."""
        if isinstance(self._files, (LocalFiles, HostFiles)):
            return self._files.read(number)
        here = self._options.host is None and self._files.read_here(self._options.source, number)
        if not here:
            raise OSError(
                f"{self._options.source} has changed since the job's start, and no host has the files"
            )
        return here

    def end_errands(self) -> None:
        """End the hosts' processes."""
        with self._lock:
            for files in self._from_hosts.values():
                if files is not None:
                    files.stop()
            self._from_hosts.clear()

    def _elsewhere(self) -> Iterator[HostFiles]:
        """Yield the files on hosts of the job."""
        for link in self._links():
            places = [self._path]
            if link.host.name == self._options.host:
                places.insert(0, self._options.source)
            for place in places:
                key = (link.number, place)
                # The errand ends with the workers of a round: it is started again.
                if key not in self._from_hosts or self._is_over(key):
                    self._from_hosts[key] = self._ask(link, place)
                if (files := self._from_hosts[key]) is not None:
                    yield files

    def _is_over(self, key: tuple[int, str]) -> bool:
        files = self._from_hosts[key]
        return files is not None and files.has_ended

    def _ask(self, link: "HostLink", place: str) -> HostFiles | None:
        try:
            errand = offer_files(link, place, kept=self._files)
            return HostFiles(errand, NO_LIMIT, host=link.host.name, kept=self._files)
        except (ErrandFailed, ValueError):
            return None


class Bringing:
    """A file or directory on its way to hosts. Raises BadUsage for unreadable files of this machine.

    The list of the files, with hashes, is in the file `record` of the job: a successor brings the same files.
    """

    def __init__(self, options: BringOptions, *, has_peers: bool, record: Path | None = None) -> None:
        self._options = options
        self._record = record
        name = PurePosixPath(options.source).name
        self._path = options.path + name if options.path.endswith("/") else options.path
        self._link: HostLink | None = None
        """The newest host's."""
        self._kept: _KeptFiles | None = None
        self._waiting = 0
        """The number of hosts in need of the files."""
        self._peer = new_peer() if has_peers or options.host is not None else None
        self._delivery: Delivery | None = None
        self._changed = threading.Condition()
        self._problem: CopyFailed | None = None
        self._signs = 0
        """Signs of progress from the source host."""
        self.files: LocalFiles | HostFiles | FileList | None = None
        kept = None if record is None else _kept_list(record)
        if kept is not None:
            self._begin(kept)
        elif options.host is None:
            self._begin(LocalFiles(options.source))

    def _begin(self, files: LocalFiles | HostFiles | FileList) -> Delivery:
        content = _KeptFiles(files, self._options, self._path, self._links)
        delivery = Delivery(
            content,
            None,
            peer=self._peer,
            errand="bring",
            arguments={"path": self._path, "is_file": files.is_file},
        )
        if self._record is not None and not self._record.exists():
            # On a full disk only a successor lacks the list, and makes its own.
            with suppress(OSError):
                write_whole(self._record, bytes([files.is_file]) + files.manifest, 0o600)
        with self._changed:
            self.files, self._kept, self._delivery = files, content, delivery
            self._changed.notify_all()
        return delivery

    def bring(self, link: "HostLink", facts: "HostFacts", ready: "Callable[[HostFacts], None]") -> None:
        """Bring the files to a host of a job, which is perhaps their source. Raises ErrandFailed, CopyFailed."""
        # A source that comes back serves its files as any other host: the list stays.
        if link.host.name == self._options.host and self._delivery is None:
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
        delivery = self._await_source(link)
        with self._changed:
            self._link = link
            self._waiting += 1
        try:
            return delivery.deliver(link, facts, ready)
        finally:
            with self._changed:
                self._waiting -= 1
                is_last = not self._waiting
            if is_last and self._kept is not None:
                self._kept.end_errands()

    def _links(self) -> "Sequence[HostLink]":
        link = self._link
        return () if link is None else [*link.neighbors(), link]

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


def _kept_list(record: Path) -> FileList | None:
    """Return the list in a job's directory; None without a list."""
    try:
        data = record.read_bytes()
        return FileList(data[1:], is_file=data[:1] == b"\1")
    except (OSError, ValueError):
        return None
