"""Commands as processes of this machine, whose three pipes are the channel; see connection.py."""

import contextlib
import os
import selectors
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO

from hvlaunch.errors import HostError
from hvlaunch.job import Host
from hvlaunch.ssh.connection import Channel

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
    """Start a process with three pipes; without an environment, it gets this process's own.

    Raises OSError, and ValueError for a word that no process can have.
    """
    # A session of its own: Ctrl-C in the terminal is for the driver, which tells the command what to do,
    # and there is no terminal to ask a question at.
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
    """hvlaunch.ssh.connection.Connection where each command is a process here: `words`, and the command after them.

    `host` is for messages. `address` is what both ends have: None where the process is on the host itself,
    empty where it leads there in a way of its own. `environment` is the processes'; None: this process's own.
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
    """hvlaunch.ssh.connection.Channel over the three pipes of `process`.

    The process is never killed, since that could leave its children behind: it sees its stdin end.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._tail = Tail()
        self._wake_read, self._wake_write = os.pipe()
        self._stdin = _Pipe(process.stdin, selectors.EVENT_WRITE, self._wake_read)
        self._stdout = _Pipe(process.stdout, selectors.EVENT_READ, self._wake_read)
        self._stderr = _Pipe(process.stderr, selectors.EVENT_READ, self._wake_read)
        self._closing = threading.Lock()
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
        return status if status >= 0 else 128 - status

    def close(self) -> None:
        with self._closing:
            if self._wake_write < 0:
                return
            os.close(self._wake_write)  # every select() on the other end returns from now on
            self._wake_write = -1
            for pipe in (self._stdin, self._stdout, self._stderr):
                pipe.close()
            os.close(self._wake_read)

    def _drain_stderr(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._stderr.read():
                self._tail.add(data)
        self._process.wait()  # whoever asks for the status or not, no zombie stays


class _Pipe:
    """One end of a pipe, for one thread at a time. What waits on it gives up when `wake` is readable."""

    def __init__(self, file: IO[bytes] | None, event: int, wake: int) -> None:
        if file is None:
            raise ValueError("the process has no such pipe")
        self._file = file
        self._turn = threading.Lock()
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
        rest = memoryview(data)
        with self._turn:
            while rest:
                self._wait()
                with contextlib.suppress(BlockingIOError):
                    rest = rest[os.write(self._file.fileno(), rest) :]

    def close(self) -> None:
        with self._turn:
            self._selector.close()
            self._file.close()

    def _wait(self) -> None:
        if self._file.closed or any(key.fd == self._wake for key, _ in self._selector.select()):
            raise ConnectionAbortedError("the channel is closed")


def connect_local(host: Host, environment: Mapping[str, str] | None = None) -> PipeConnection:
    """The connection to `host`, which is this machine. Commands get the environment; None: this process's own."""
    return PipeConnection(("/bin/sh", "-c"), host.name, None, environment)
