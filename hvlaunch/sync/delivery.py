"""Brings the snapshot of a job's tree to its hosts, as an errand on each, before workers start there."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from hvlaunch.driver.links.errands import Errand, ErrandFailed, Limits
from hvlaunch.errors import CopyFailed, HostError

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.sync.snapshot import TreeSnapshot

__all__ = ["Delivery"]

_LIMITS = Limits(seconds=None, memory=1 << 30, output=1 << 24)
_LONGEST_LINE = 1 << 22
_AHEAD = 1 << 20
"""Bytes that may wait for the errand's credit."""
_LOOK = 1.0
"""Seconds between looks at an errand."""


class Delivery:
    """Brings `snapshot` to hosts. `below` is where workers start, from the root of the tree on."""

    def __init__(self, snapshot: "TreeSnapshot", below: str) -> None:
        self._snapshot = snapshot
        self._below = below

    def prepare(
        self, link: "HostLink", ready: Callable[[str], None], failed: Callable[[HostError], None]
    ) -> None:
        """Begin to copy the tree to a host. Call `ready` with the workers' directory there, or `failed`; in another thread."""

        def run() -> None:
            try:
                directory = self._deliver(link)
            except HostError as error:
                failed(error)
            except (OSError, KeyError, ValueError) as error:
                failed(CopyFailed(f"{type(error).__name__}: {error}", host=link.host.name))
            else:
                ready(directory)

        threading.Thread(target=run, name=f"files {link.host.name}", daemon=True).start()

    def _deliver(self, link: "HostLink") -> str:
        """Raises ErrandFailed, CopyFailed, OSError."""
        snapshot = self._snapshot
        arguments = {"project": snapshot.name, "hash": snapshot.hash}
        errand = link.errands.start("sync", arguments, _LIMITS)
        try:
            while line := _read_line(errand):
                word, _, numbers = line.partition(b" ")
                if word == b"manifest":
                    errand.write(len(snapshot.manifest).to_bytes(4, "big") + snapshot.manifest)
                elif word == b"parts":
                    self._send_parts(link, errand, numbers.decode("ascii"))
            while not errand.wait(_LOOK):
                pass  # the host is given up when it is silent, and the errand with it
            directory: str = errand.result()["directory"]
        except ErrandFailed as error:
            raise CopyFailed(error.detail, host=link.host.name) from error
        finally:
            errand.stop()
        return f"{directory}/{self._below}" if self._below else directory

    def _send_parts(self, link: "HostLink", errand: Errand, ranges: str) -> None:
        snapshot = self._snapshot
        ranges_of_parts = [_numbers(words, len(snapshot.numbered)) for words in ranges.split(",") if words]
        size = sum(snapshot.size_of(number) for numbers in ranges_of_parts for number in numbers)
        sent = unsent = 0
        for numbers in ranges_of_parts:
            for number in numbers:
                data = snapshot.read(number)
                errand.write(len(data).to_bytes(4, "big") + data)
                sent += len(data)
                unsent += len(data)
                if unsent >= _AHEAD:
                    unsent = 0
                    link.tell_preparing(f"files {10 * sent // size}0%")
                    while not errand.drain(_LOOK):
                        pass
                if errand.has_ended:
                    return


def _numbers(words: str, count: int) -> range:
    """Read `FIRST-LAST`. Raises ValueError for what is no range of parts."""
    first, _, last = words.partition("-")
    numbers = range(int(first), int(last) + 1)
    if not numbers or numbers[0] < 0 or numbers[-1] >= count:
        raise ValueError("it asked for parts of files that are not there")
    return numbers


def _read_line(errand: Errand) -> bytes:
    """Return the next line of the errand, empty at the end. Raises ValueError."""
    line = b""
    while not line.endswith(b"\n"):
        data = errand.read(_LOOK)
        if data == b"":
            return b""
        line += data or b""
        if len(line) > _LONGEST_LINE:
            raise ValueError("a line without an end")
    return line.rstrip(b"\n")
