"""Byte streams below an SSH connection, other than TCP: a ProxyCommand's stdio, and a borrowed descriptor."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Protocol

from hvlaunch.errors import ConnectFailed
from hvlaunch.ssh.pipes import Tail

__all__ = ["GreetingSocket", "ProxySocket", "Stream", "borrow", "greeting_with", "start_proxy"]

_GREETING_SIZE = 256


class Stream(Protocol):
    """The part of a socket's interface that SSH needs."""

    greeting: bytes
    """The first received bytes: they identify the other side."""

    @property
    def local_address(self) -> str:
        """The local address, as the first machine on the way sees it; empty if unknown."""

    @property
    def remote_address(self) -> str:
        """The host's address; empty if unknown."""

    @property
    def is_near(self) -> bool:
        """See Connection."""

    def silence(self) -> float | None:
        """See Connection."""

    def recv(self, size: int, /) -> bytes: ...

    def send(self, data: bytes, /) -> int: ...

    def settimeout(self, seconds: float | None, /) -> None: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...

    def problem(self) -> str | None:
        """Return the error of the transport, as reported there, after the stream has ended."""


def greeting_with(greeting: bytes, data: bytes) -> bytes:
    """Append data to the greeting while it is short."""
    return greeting if len(greeting) >= _GREETING_SIZE else greeting + data[:_GREETING_SIZE]


class GreetingSocket(socket.socket):
    """A socket that keeps the greeting."""

    greeting = b""

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        data = super().recv(size, flags)
        self.greeting = greeting_with(self.greeting, data)
        return data

    def problem(self) -> str | None:
        return None


_END_PATIENCE = 1.0
_STDERR_PATIENCE = 1.0
_READ_SIZE = 16 * 1024


class ProxySocket(GreetingSocket):
    """The near end of the pipe to the ProxyCommand `process`; close() ends the process."""

    local_address = remote_address = ""
    is_near = False

    def __init__(self, near: socket.socket, process: "subprocess.Popen[bytes]", command: str) -> None:
        super().__init__(fileno=near.detach())
        self._process = process
        self._command = command
        self._tail = Tail()
        self._drain = threading.Thread(target=self._drain_stderr, name="ProxyCommand stderr", daemon=True)
        self._drain.start()

    def silence(self) -> None:
        return None

    def problem(self) -> str | None:
        # The message may still be on its way through the pipe.
        self._drain.join(_STDERR_PATIENCE)
        complaint = self._tail.get().decode("utf-8", "replace").strip().rpartition("\n")[2]
        status = self._process.poll()
        if status == 0 and not complaint:
            # The command succeeded: the host's sshd ended the connection.
            return None
        ended = "" if status is None else f" ended with status {status}"
        return f"its ProxyCommand `{self._command}`{ended}" + (f": {complaint}" if complaint else "")

    def close(self) -> None:
        super().close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                with contextlib.suppress(OSError):
                    os.killpg(self._process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_PATIENCE)

    def _drain_stderr(self) -> None:
        stderr = self._process.stderr
        if stderr is None:
            return
        with stderr:
            while data := os.read(stderr.fileno(), _READ_SIZE):
                self._tail.add(data)
        # Reap the process here, even if close() is never called.
        self._process.wait()


def start_proxy(host: str, command: str) -> ProxySocket:
    """Start `command` by /bin/sh. `host` is for messages. Raises ConnectFailed."""
    # A socket pair instead of two pipes: paramiko needs one object that can time out and be shut down.
    near, far = socket.socketpair()
    try:
        # A separate session: Ctrl-C in the terminal goes to the driver alone, and killpg() ends the whole command.
        process = subprocess.Popen(
            # exec: the process that is killed later is the command itself, not a shell above it.
            ["/bin/sh", "-c", f"exec {command}"],
            stdin=far.fileno(),
            stdout=far.fileno(),
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        near.close()
        hint = f"`ssh -G {host}` shows it"
        raise ConnectFailed(f"its ProxyCommand can't be started: {error}", host=host, hint=hint) from None
    finally:
        far.close()
    return ProxySocket(near, process, command)


_PIDFD_GETFD = 438


def borrow(pid: int) -> socket.socket | None:
    """Duplicate the TCP socket of another process. The caller must close it, or the connection outlives the process.

    Returns None if the process has no TCP socket (with a ProxyCommand), if the kernel lacks the call (before
    Linux 5.6), or if it forbids the call (kernel.yama.ptrace_scope above 1).
    """
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                if str(entry.readlink()).startswith("socket:"):
                    duplicate = socket.socket(fileno=_get(process, int(entry.name)))
                    if duplicate.proto == socket.IPPROTO_TCP:
                        return duplicate
                    duplicate.close()
        finally:
            os.close(process)
    return None


def _get(process: int, number: int) -> int:
    import ctypes  # noqa: PLC0415 (1 ms before any connection; paramiko needs none of it)

    fd = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, number, 0))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return fd
