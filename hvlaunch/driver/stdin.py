"""The driver's stdin, passed on to rank 0 or to all workers, no faster than they read it."""

import errno
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hvlaunch.console.printer import Printer

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink

__all__ = ["StdinFeed", "StdinPump"]

_CHUNK = 1 << 16
_WINDOW = 1 << 18


class StdinFeed:
    """Feeds the workers that read the driver's stdin, once they are being started. For the loop's thread."""

    def __init__(self, stdin: int, printer: Printer) -> None:
        self._stdin = stdin
        self._printer = printer
        self._readers: list[tuple[HostLink, int, int]] = []
        """Link, slot and rank of each worker that reads stdin."""
        self._pump: StdinPump | None = None

    @property
    def reading(self) -> list[int]:
        """The ranks with further input to come."""
        has_ended = self._pump is None or self._pump.has_ended
        return [] if has_ended else [rank for _, _, rank in self._readers]

    def add_reader(self, link: "HostLink", slot: int, rank: int) -> None:
        self._readers.append((link, slot, rank))

    def drop_readers(self) -> None:
        """Feed no worker: a killed driver's stdin cannot be continued, and its workers have got the end of it."""
        self._readers.clear()

    def begin(self, on_input: Callable[[], None]) -> None:
        """Start to read, if any worker reads stdin. `on_input` is called before each piece is passed on."""
        readers = self._readers
        if not readers or self._pump is not None:
            return
        if os.isatty(self._stdin):
            self._printer.read_by([rank for _, _, rank in readers])
        targets = [partial(_send, link, slot) for link, slot, _ in readers]
        pump = StdinPump(self._stdin, targets, self._printer.answered, on_input)
        numbers = {(link.host.name, slot): number for number, (link, slot, _) in enumerate(readers)}

        def take(host: str, slot: int, size: int) -> None:
            pump.taken(numbers[host, slot], size)

        for link, _, _ in readers:
            link.stdin_taken = partial(take, link.host.name)
        self._pump = pump
        pump.start()


def _send(link: "HostLink", slot: int, data: bytes) -> None:
    link.send({"type": "stdin", "slot": slot}, data)


class StdinPump:
    """Reads stdin and calls each of `targets` with the bytes, and with b"" at the end.

    taken() reports the bytes read by a target's worker; at most 256 KiB are on the way.
    """

    def __init__(
        self,
        stdin: int,
        targets: Sequence[Callable[[bytes], None]],
        on_echoed: Callable[[], None] | None = None,
        on_input: Callable[[], None] | None = None,
    ) -> None:
        """`on_echoed` is called for each line that the user has typed on a terminal, before the line is passed on.

        `on_input` is called before each piece of input is passed on.
        """
        self._fd = stdin
        self._on_echoed = on_echoed if os.isatty(stdin) else None
        self._targets = targets
        self._outstanding = [0] * len(targets)
        self._changed = threading.Condition()
        self._on_input = on_input
        self._has_ended = False

    def start(self) -> None:
        """Begin to read, in a thread that ends with the process."""
        # A daemon: a read of a terminal can't be interrupted, and must not keep the process alive.
        threading.Thread(target=self._run, name="stdin", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """True if stdin has ended."""
        return self._has_ended

    def taken(self, index: int, size: int) -> None:
        """Note that the worker behind targets[index] has read `size` bytes."""
        with self._changed:
            self._outstanding[index] -= size
            self._changed.notify()

    def _run(self) -> None:
        while True:
            # The slowest worker sets the pace: all get the same bytes, and none of the bytes are stored here.
            with self._changed:
                self._changed.wait_for(lambda: max(self._outstanding) < _WINDOW)
            if not self._pass_on(self._read()):
                return

    def _read(self) -> bytes | None:
        try:
            return os.read(self._fd, _CHUNK)
        except OSError as error:
            # EIO: the process is in the background of its terminal, whose input is another's and has not ended. Every
            # other error means that stdin is closed.
            return None if error.errno == errno.EIO and os.isatty(self._fd) else b""

    def _pass_on(self, data: bytes | None) -> bool:
        if data is None:
            return False
        if data and self._on_input is not None:
            self._on_input()
        if self._on_echoed is not None and data.endswith(b"\n") and _echoes(self._fd):
            self._on_echoed()
        with self._changed:
            self._outstanding = [size + len(data) for size in self._outstanding]
            self._has_ended = not data
        for target in self._targets:
            target(data)
        return bool(data)


def _echoes(fd: int) -> bool:
    """True if the terminal echoes typed characters."""
    import termios  # noqa: PLC0415 (few jobs read a terminal)

    try:
        return bool(termios.tcgetattr(fd)[3] & termios.ECHO)
    except termios.error:
        return False
