"""Asking the user for a passphrase, on the terminal and nowhere else."""

import contextlib
import os
import selectors
import termios
import threading
import time

__all__ = ["Terminal"]

_LONGEST = 1024
_CLEAR_TO_END = "\x1b[K"


class Terminal:
    """The terminal at `path`, asked by one thread at a time. Closing it ends a question that is still open."""

    def __init__(self, path: str = "/dev/tty") -> None:
        self._path = path
        self._turn = threading.Lock()
        self._closing = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()

    def is_there(self) -> bool:
        """Whether there is someone to ask: a terminal, of which this job is in the foreground."""
        try:
            fd = self._open()
        except OSError:
            return False
        try:
            return os.tcgetpgrp(fd) == os.getpgrp()
        except OSError:
            return False
        finally:
            os.close(fd)

    def ask(self, question: str, deadline: float | None = None) -> bytes | None:
        """The answer, which is not shown while it is typed; None where there is none.

        Raises TimeoutError where none has come by `deadline`, as time.monotonic() counts.
        """
        with self._turn:
            try:
                fd = self._open()
            except OSError:
                return None
            try:
                return self._ask(fd, question, deadline)
            except TimeoutError:
                raise
            except (OSError, termios.error):
                return None
            finally:
                os.close(fd)

    def close(self) -> None:
        """Leave the terminal as it was. May be repeated."""
        with self._closing:
            if self._wake_write >= 0:
                os.close(self._wake_write)
                self._wake_write = -1
                with self._turn:
                    os.close(self._wake_read)

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)

    def _ask(self, fd: int, question: str, deadline: float | None) -> bytes | None:
        before = termios.tcgetattr(fd)
        silent = [*before]
        silent[3] = before[3] & ~termios.ECHO
        # Ctrl-Z would let the shell show what is typed after `fg`.
        silent[6] = [*before[6]]
        silent[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(fd, termios.TCSAFLUSH, silent)
        try:
            # A line of its own, whatever was on it: the console redraws the row that the cursor is in.
            rest = "" if os.environ.get("TERM", "dumb") == "dumb" else _CLEAR_TO_END
            os.write(fd, f"{question}{rest}\n".encode())
            return self._line(fd, deadline)
        finally:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(fd, termios.TCSADRAIN, before)

    def _line(self, fd: int, deadline: float | None) -> bytes | None:
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            ready = selector.select(patience)
        if not ready:
            termios.tcflush(fd, termios.TCIFLUSH)  # the shell must not get the half of it
            raise TimeoutError
        if any(key.fd == self._wake_read for key, _ in ready):
            return None
        line = os.read(fd, _LONGEST)
        return line.rstrip(b"\r\n") if line else None
