"""Commands as processes of this machine; their three pipes are the channel. The package's own module has the interface."""

import contextlib
import os
import selectors
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO

from hvlaunch.errors import HostError
from hvlaunch.job import Host
from hvlaunch.ssh import Channel

__all__ = ["PipeChannel", "PipeConnection", "Tail", "connect_local", "start_piped"]


class Tail:
    """Keeps the last `size` bytes. Thread-safe."""

    def __init__(self, size: int = 16 * 1024) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._kept = b""

    def add(self, data: bytes) -> None:
        with self._lock:
            self._kept = (self._kept + data)[-self._size :]

    def get(self) -> bytes:
        return self._kept


_READ_SIZE = 1 << 20
_STDERR_PATIENCE = 1.0


def start_piped(
    words: Sequence[str], environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a process with three pipes, with `environment` or this process's own.

    Raises OSError, and ValueError for a word with a NUL byte.
    """
    # A separate session: Ctrl-C in the terminal goes to the driver alone, which tells the command what to do,
    # and the command finds no terminal for a question.
    return subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=environment,
        start_new_session=True,
    )


class PipeConnection:
    """A Connection whose commands are processes on this machine: `words` and then the command.

    `host` is for messages. `address` is the address of both ends: None if the process is the host itself, empty
    if the process leads to the host in its own way.
    """

    def __init__(
        self,
        words: Sequence[str],
        host: str,
        address: str | None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._words = words
        self._environment = environment
        self._host = host
        self.local_address: str | None = address
        self.remote_address: str | None = address
        self.is_near = address is None
        self._channels: list[PipeChannel] = []

    def run(self, command: str) -> Channel:
        try:
            process = start_piped([*self._words, command], self._environment)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise HostError(f"{self._words[0]} can't be started: {why.lower()}", host=self._host) from None
        channel = PipeChannel(process)
        self._channels.append(channel)
        return channel

    def silence(self) -> None:
        return None

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


class PipeChannel:
    """A Channel over the three pipes of `process`.

    The process is never killed, because its children could be left behind: it sees the end of its stdin.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._tail = Tail()
        # Closing a descriptor does not wake a thread that waits on it; the end of this pipe does.
        self._wake_read, self._wake_write = os.pipe()
        self._stdin = _Pipe(process.stdin, selectors.EVENT_WRITE, self._wake_read)
        self._stdout = _Pipe(process.stdout, selectors.EVENT_READ, self._wake_read)
        self._stderr = _Pipe(process.stderr, selectors.EVENT_READ, self._wake_read)
        self._closing = threading.Lock()
        # A full stderr pipe would block the command, so a thread reads it all the time.
        self._drain = threading.Thread(target=self._drain_stderr, name="pipe stderr", daemon=True)
        self._drain.start()

    def read(self) -> bytes:
        return self._stdout.read()

    def write(self, data: bytes) -> None:
        self._stdin.write(data)

    def stderr(self) -> bytes:
        if self._process.poll() is not None:
            self._drain.join(_STDERR_PATIENCE)
        return self._tail.get()

    def exit_status(self, timeout: float) -> int | None:
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        # subprocess reports signal n as -n; a shell reports it as 128 + n.
        return status if status >= 0 else 128 - status

    def close(self) -> None:
        with self._closing:
            if self._wake_write < 0:
                return
            # Every select() with the other end returns from now on.
            os.close(self._wake_write)
            self._wake_write = -1
            for pipe in (self._stdin, self._stdout, self._stderr):
                pipe.close()
            os.close(self._wake_read)

    def _drain_stderr(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._stderr.read():
                self._tail.add(data)
        # Reap the process here, even if no caller asks for its status.
        self._process.wait()


class _Pipe:
    """One end of a pipe, for one thread at a time. Waiting stops when `wake` becomes readable."""

    def __init__(self, file: IO[bytes] | None, event: int, wake: int) -> None:
        if file is None:
            raise ValueError("the process has no such pipe")
        self._file = file
        self._turn = threading.Lock()
        # Another thread may take the data between select() and read(), so neither may block.
        os.set_blocking(file.fileno(), False)
        self._selector = selectors.PollSelector()
        self._selector.register(file, event)
        self._selector.register(wake, selectors.EVENT_READ)
        self._wake = wake

    def read(self) -> bytes:
        with self._turn:
            while True:
                self._wait()
                with contextlib.suppress(BlockingIOError):
                    return os.read(self._file.fileno(), _READ_SIZE)

    def write(self, data: bytes) -> None:
        unwritten = memoryview(data)
        with self._turn:
            while unwritten:
                self._wait()
                with contextlib.suppress(BlockingIOError):
                    unwritten = unwritten[os.write(self._file.fileno(), unwritten) :]

    def close(self) -> None:
        with self._turn:
            self._selector.close()
            self._file.close()

    def _wait(self) -> None:
        if self._file.closed or any(key.fd == self._wake for key, _ in self._selector.select()):
            raise ConnectionAbortedError("the channel is closed")


def connect_local(host: Host, environment: Mapping[str, str] | None = None) -> PipeConnection:
    """Return the connection to `host`, which is this machine, with `environment` or this process's own."""
    return PipeConnection(("/bin/sh", "-c"), host.name, None, environment)
