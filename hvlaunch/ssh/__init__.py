"""Connections to hosts: their interface, and the ways to them: an SSH client, the user's remote agent, or processes of this machine."""

import contextlib
import os
import re
import selectors
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, Protocol

from hvlaunch.errors import ConnectFailed, HostError
from hvlaunch.job import Host, SSHOptions

if TYPE_CHECKING:
    from hvlaunch.ssh.keyring import Keyring

__all__ = [
    "Channel",
    "Connection",
    "PipeChannel",
    "PipeConnection",
    "Stage",
    "Tail",
    "Ways",
    "agent_words",
    "connect_by_agent",
    "connect_local",
    "listen",
    "stage",
    "start_piped",
]


class Channel(Protocol):
    """A command that runs on the host, with stdin and stdout as raw bytes."""

    def read(self) -> bytes:
        """Return the available bytes of stdout, or b"" at its end. Blocks.

        Raises OSError if the connection broke.
        """

    def write(self, data: bytes) -> None:
        """Send all of `data` to stdin. Blocks while the host does not take it.

        Raises OSError if the connection broke or the command has ended.
        """

    def stderr(self) -> bytes:
        """Return the last bytes of stderr, at most 16 KiB."""

    def exit_status(self, timeout: float) -> int | None:
        """Return the exit status, or 128 + n for signal n; None if unknown after `timeout` seconds."""

    def close(self) -> None:
        """Give up the command and unblock read() and write() in other threads. Never raises; may be repeated."""


class Connection(Protocol):
    """An open, authenticated connection to one host."""

    local_address: str | None
    """The local address, as the host or the first jump host sees it.

    Empty if unknown; None if the host is this machine.
    """

    remote_address: str | None
    """The host's address; empty if unknown (behind a jump host); None if the host is this machine."""

    is_near: bool
    """True if the host is known to be near: then tens of kilobytes more cost no time."""

    def run(self, command: str) -> Channel:
        """Start `command` in the login shell of the host (on this machine: /bin/sh).

        Raises HostError.
        """

    def silence(self) -> float | None:
        """Return seconds since the first machine on the way acknowledged data; None if unknown."""

    def close(self) -> None:
        """Close the connection and its channels; unblocks threads in them. Never raises; may be repeated."""


Stage = Literal["resolve", "connect", "log in", "passphrase"]

# By thread, because each connection is made in its own thread, and deep callees report stages too.
_of_thread = threading.local()


def listen(listener: Callable[[Stage], None]) -> None:
    """Report the stages of all connections made in this thread to `listener`."""
    _of_thread.listener = listener


def stage(name: Stage) -> None:
    """Report the current stage of this thread to its listener."""
    listener = getattr(_of_thread, "listener", None)
    if listener is not None:
        listener(name)


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


class _Client(Protocol):
    def prepare(self, hosts: Sequence[Host]) -> None: ...

    def connect(self, host: Host, timeout: float | None = None) -> Connection: ...

    def close(self) -> None: ...


class Ways:
    """Connects to hosts by SSH, within `timeout` seconds each. Thread-safe.

    Keys are read once, passphrases are asked for once, and connections to jump hosts are shared. At most
    `options.connect_limit` handshakes with one address run at the same time. Modules are imported on first use.
    """

    def __init__(self, options: SSHOptions, *, timeout: float) -> None:
        self._options = options
        self._timeout = timeout
        self._lock = threading.Lock()
        self._keyring: Keyring | None = None
        self._client: _Client | None = None

    def prepare(self, hosts: Sequence[Host]) -> None:
        """Begin what connections to these hosts will wait for. Does not block, and raises nothing."""
        self._shared_client().prepare(hosts)

    def connect(self, host: Host, timeout: float | None = None) -> Connection:
        """Return an open connection to the host. `timeout` replaces the common timeout. Blocks. Raises HostError."""
        return self._shared_client().connect(host, timeout)

    def close(self) -> None:
        """Close the shared resources, after the connections; may be repeated."""
        with self._lock:
            if self._client is not None:
                self._client.close()
            if self._keyring is not None:
                self._keyring.close()

    def _shared_client(self) -> _Client:
        with self._lock:
            if self._client is None:
                self._client = self._make_client()
        return self._client

    def _make_client(self) -> _Client:
        from hvlaunch.ssh.streams import ConnectLimit  # noqa: PLC0415  (see the docstring of the class)

        connect_limit = ConnectLimit(self._options.connect_limit)
        if self._options.client == "openssh":
            from hvlaunch.ssh.by_openssh import OpenSSHClient  # noqa: PLC0415

            return OpenSSHClient(self._options, timeout=self._timeout, connect_limit=connect_limit)
        from hvlaunch.ssh.by_paramiko import ParamikoClient  # noqa: PLC0415

        return ParamikoClient(
            self._options, timeout=self._timeout, keyring=self._keys, connect_limit=connect_limit
        )

    def _keys(self) -> "Keyring":
        from hvlaunch.ssh.keyring import Keyring  # noqa: PLC0415

        with self._lock:
            self._keyring = self._keyring or Keyring()
        return self._keyring


_EXEC_WITHOUT_STDIN = re.compile(r"(kubectl[^\n]*? exec )(?![^\n]*(?:-i\b|--stdin\b))")


def connect_by_agent(agent: str, host: Host, timeout: float | None = None) -> PipeConnection:  # noqa: ARG001 (as ways to hosts have it)
    """Return a connection to `host` through `agent`, a program with optional arguments. Addresses are unknown.

    Raises ConnectFailed if the program does not exist.
    """
    return PipeConnection([*agent_words(agent, host.name), host.name], host.name, "")


def agent_words(agent: str, host: str) -> list[str]:
    """Return the words before the host's name.

    kubexec.sh calls `kubectl exec` without stdin, because MPIs do not need it; here it runs with -i. Raises
    ConnectFailed.
    """
    program, *words = shlex.split(agent)
    path = shutil.which(program)
    if path is None:
        raise ConnectFailed(
            f"{program}, which the scheduler names to be used instead of ssh, was not found", host=host
        )
    if Path(path).suffix != ".sh":
        return [path, *words]
    # Only the copy that runs is changed; the scheduler's script stays as it is.
    text = Path(path).read_text(errors="replace")
    changed = _EXEC_WITHOUT_STDIN.sub(r"\1-i ", text)
    return [path, *words] if changed == text else ["/bin/sh", "-c", changed, path, *words]
