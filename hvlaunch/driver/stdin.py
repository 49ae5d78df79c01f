"""The driver's stdin, on its way to rank 0 or to all: no more than workers take."""

import errno
import os
import threading
from collections.abc import Callable, Sequence

__all__ = ["StdinPump"]

_CHUNK = 1 << 16
_WINDOW = 1 << 18


class StdinPump:
    """Reads stdin and calls each of `targets` with the bytes, b"" at the end.

    `taken` is told what a target's worker has read, so that at most 256 KiB are ever on the way.
    """

    def __init__(
        self,
        stdin: int,
        targets: Sequence[Callable[[bytes], None]],
        on_echoed: Callable[[], None] | None = None,
        on_input: Callable[[], None] | None = None,
    ) -> None:
        """`on_echoed` is called for each line that the user has typed on a terminal, before it is passed on.

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
        threading.Thread(target=self._run, name="stdin", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing more to read."""
        return self._has_ended

    def taken(self, index: int, size: int) -> None:
        """The worker behind targets[index] has read `size` bytes."""
        with self._changed:
            self._outstanding[index] -= size
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: max(self._outstanding) < _WINDOW)
            if not self._pass_on(self._read()):
                return

    def _read(self) -> bytes | None:
        try:
            return os.read(self._fd, _CHUNK)
        except OSError as error:
            # EIO: a terminal that we are in the background of. It isn't ours to read, and has not ended. Or it is closed.
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
    """Whether the terminal shows what is typed."""
    import termios  # noqa: PLC0415 (few jobs read a terminal)

    try:
        return bool(termios.tcgetattr(fd)[3] & termios.ECHO)
    except termios.error:
        return False
