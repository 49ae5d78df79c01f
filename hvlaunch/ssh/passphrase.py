"""Asking the user for a passphrase, on the terminal and nowhere else."""

import contextlib
import os
import selectors
import termios
import threading

__all__ = ["Terminal"]

_LONGEST = 1024


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

    def ask(self, question: str) -> bytes | None:
        """The answer, which is not shown while it is typed; None where there is none."""
        with self._turn:
            try:
                fd = self._open()
            except OSError:
                return None
            try:
                return self._ask(fd, question)
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

    def _ask(self, fd: int, question: str) -> bytes | None:
        before = termios.tcgetattr(fd)
        silent = [*before]
        silent[3] = before[3] & ~termios.ECHO
        termios.tcsetattr(fd, termios.TCSAFLUSH, silent)
        try:
            os.write(fd, question.encode())
            answer = self._line(fd)
            os.write(fd, b"\n")
            return answer
        finally:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(fd, termios.TCSADRAIN, before)

    def _line(self, fd: int) -> bytes | None:
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            if any(key.fd == self._wake_read for key, _ in selector.select()):
                return None
        line = os.read(fd, _LONGEST)
        return line.rstrip(b"\r\n") if line else None
