"""ProxyCommand: a local command whose stdin and stdout lead to the host's sshd; see ssh_config(5)."""

import contextlib
import os
import signal
import socket
import subprocess
import threading

from hvlaunch.errors import ConnectFailed
from hvlaunch.ssh.pipes import Tail
from hvlaunch.ssh.streams.stream import GreetingSocket

__all__ = ["ProxySocket", "start_proxy"]

_END_PATIENCE = 1.0
_STDERR_PATIENCE = 1.0
_READ_SIZE = 16 * 1024


class ProxySocket(GreetingSocket):
    """The near end of the two-way pipe to `process`, which is ended with it."""

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
        self._drain.join(_STDERR_PATIENCE)
        complaint = self._tail.get().decode("utf-8", "replace").strip().rpartition("\n")[2]
        status = self._process.poll()
        if status == 0 and not complaint:
            return None  # it did its work, and the host's sshd ended the connection
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
        self._process.wait()  # no zombie stays, whoever closes or not


def start_proxy(host: str, command: str) -> ProxySocket:
    """Start `command` by /bin/sh. `host` is for messages. Raises ConnectFailed."""
    near, far = socket.socketpair()
    try:
        # A session of its own: Ctrl-C in the terminal is for the driver, and all of it can be ended at once.
        process = subprocess.Popen(
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
