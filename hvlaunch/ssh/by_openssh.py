"""Connections by the ssh binary, for features that paramiko lacks: GSSAPI, FIDO keys, PKCS#11, ControlMaster."""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from hvlaunch.children import Sweeper
from hvlaunch.errors import HostError, StartTimeout
from hvlaunch.job import Host, HostKeyPolicy, SSHOptions
from hvlaunch.ssh import Channel, PipeChannel, stage, start_piped
from hvlaunch.ssh.complaints import FAILED, explain, lost
from hvlaunch.ssh.config import AskSSH, Hops, HostSettings, Questions, by_hand, resolve, ssh_words
from hvlaunch.ssh.streams import ConnectLimit, EarlyStarts, addresses_toward, borrow, persist, silence

__all__ = ["OpenSSHChannel", "OpenSSHClient", "OpenSSHConnection"]

_MARK = b"hvlaunch: connected\n"
"""LocalCommand prints this once ssh is logged in, before any output of the host."""
_POLICIES: dict[HostKeyPolicy, tuple[str, ...]] = {
    "strict": ("StrictHostKeyChecking=yes",),
    "accept-new": ("StrictHostKeyChecking=accept-new",),
    "off": ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "GlobalKnownHostsFile=/dev/null"),
}
_ALWAYS = (
    "BatchMode=yes",
    # Use an open master connection, but never leave one behind.
    "ControlMaster=no",
    "ForwardX11=no",
    # Hosts must not reach this machine, even if the configuration forwards ports.
    "ClearAllForwardings=yes",
    "Tunnel=no",
    # With QUIET, stderr would not tell why ssh failed.
    "LogLevel=INFO",
    "RequestTTY=no",
    "RemoteCommand=none",
    "PermitLocalCommand=yes",
    f"LocalCommand=echo {_MARK.decode().strip()}",
)
_ENVIRONMENT = {"SHELL": "/bin/sh", "SSH_ASKPASS_REQUIRE": "never", "LC_ALL": "C"}
_END_PATIENCE = 1.0


class _RunLimited(Protocol):
    def __call__(
        self, attempt: "Callable[[], OpenSSHChannel]", /, *, host: str, deadline: float
    ) -> "OpenSSHChannel": ...


class OpenSSHClient:
    """Runs ssh for the hosts of a job, with `timeout` seconds for each. Thread-safe.

    ssh reads its configuration itself. BatchMode turns every question into an error.
    """

    def __init__(self, options: SSHOptions, *, timeout: float, connect_limit: ConnectLimit) -> None:
        self._options = options
        self._timeout = timeout
        self._connect_limit = connect_limit
        self._asker = AskSSH()
        # ssh processes must not outlive a driver that is killed: each could hold a host's session open.
        self._sweeper = Sweeper()
        self._ask = Questions(self._asker)
        self._early = EarlyStarts(
            partial(resolve, options=options, timeout=timeout, ask=self._ask), self._ask.is_same_for_all
        )
        self._hops = Hops(options, timeout=timeout, ask=self._asker)

    def prepare(self, hosts: Sequence[Host]) -> None:
        """Ask ssh about the hosts in another thread."""
        self._early.begin(hosts)

    def connect(self, host: Host, timeout: float | None = None) -> "OpenSSHConnection":
        """Return a connection. Each of its commands is an ssh process, and so the first command connects.

        `timeout` replaces the common timeout. Raises HostError for unusable settings.
        """
        limit = self._timeout if timeout is None else timeout
        early = self._early.hand_over(host)
        settings = (
            resolve(host, self._options, timeout=limit, ask=self._ask) if early is None else early.settings
        )
        # Also checks for loops: in a loop of jump hosts, ssh would start ssh for ever.
        hops = self._hops.before(host.name, settings.proxy_jump)
        first = self._hops.settings(hops[0].host) if hops else settings
        words = ["ssh", "-T", *ssh_words(host, self._options)]
        forward = f"ForwardAgent={'yes' if self._options.forward_agent else 'no'}"
        for option in (*_ALWAYS, forward, *_POLICIES[self._options.host_keys]):
            words += ["-o", option]
        hint = by_hand(host, self._options, settings)
        address = hops[0].key[0] if hops else f"{settings.hostname} port {settings.port}"
        # sshd's MaxStartups counts connections to the first machine on the way.
        run_limited = partial(self._connect_limit.run, address)
        # `--` first: a host name can never be read as an option.
        words += ["--", host.name]
        return OpenSSHConnection(
            host.name,
            words,
            settings,
            run_limited,
            limit,
            hint,
            self._sweeper,
            is_ssh_alone=first.proxy_command is None,
        )

    def close(self) -> None:
        """Stop running questions and all ssh processes; may be repeated."""
        self._asker.close()
        self._sweeper.close()


class OpenSSHConnection:
    """A Connection by `words`, a command line of ssh without the host's command.

    `host` is for messages, `run_limited` is ConnectLimit.run for the address, and `by_hand` is the command for
    hints. `is_ssh_alone` is False if a ProxyCommand writes to ssh's stderr too.
    """

    def __init__(
        self,
        host: str,
        words: list[str],
        settings: HostSettings,
        run_limited: _RunLimited,
        timeout: float,
        by_hand: str,
        sweeper: Sweeper,
        *,
        is_ssh_alone: bool,
    ) -> None:
        self._host = host
        self._words = words
        self._run_limited = run_limited
        self._timeout = timeout
        self._by_hand = by_hand
        self._sweeper = sweeper
        self._is_ssh_alone = is_ssh_alone
        is_direct = settings.proxy_jump is None and settings.proxy_command is None
        ours, theirs = addresses_toward(settings) if is_direct else ("", "")
        self.local_address: str | None = ours
        self.remote_address: str | None = theirs
        self.is_near = False
        path = settings.control_path
        self._is_shared = path is not None and Path(path).is_socket()
        self._channels: list[OpenSSHChannel] = []
        self._closed = False

    def run(self, command: str) -> Channel:
        """Start a command as Connection.run does; also raises the errors of connecting."""
        deadline = time.monotonic() + self._timeout
        return self._run_limited(partial(self._start, command, deadline), host=self._host, deadline=deadline)

    def silence(self) -> float | None:
        return next((channel.silence() for channel in self._channels), None)

    def close(self) -> None:
        self._closed = True
        for channel in self._channels:
            channel.close()

    def _start(self, command: str, deadline: float) -> "OpenSSHChannel":
        stage("connect")
        try:
            process = start_piped([*self._words, command], {**os.environ, **_ENVIRONMENT})
        except (OSError, ValueError) as error:
            hint = "ulimit -a on this machine: a limit may be too low"
            if isinstance(error, FileNotFoundError):
                hint = "install OpenSSH's client (Debian: apt-get install openssh-client), or --ssh-client paramiko"
            raise HostError(f"ssh can't be started: {error}", host=self._host, hint=hint) from None
        channel = OpenSSHChannel(process, self._sweeper)
        # Registered before the wait: close() in another thread must be able to end this ssh.
        self._channels.append(channel)
        if self._closed:
            channel.close()
        # An ssh that shares a master's connection runs no LocalCommand, and prints no mark.
        if self._is_shared:
            return channel
        # ssh's own ConnectTimeout does not cover the login, so a timer bounds all of it.
        watch = threading.Timer(max(0.0, deadline - time.monotonic()), channel.close)
        watch.daemon = True
        watch.start()
        try:
            if channel.wait_for_mark():
                return channel
        finally:
            watch.cancel()
        # ssh writes its last message after it has closed stdout.
        channel.exit_status(_END_PATIENCE)
        stderr = channel.stderr().decode("utf-8", "replace")
        channel.close()
        self._channels.remove(channel)
        if time.monotonic() >= deadline:
            cause = f"ssh did not connect within {self._timeout:g} s"
            raise StartTimeout(cause, host=self._host, hint=self._by_hand)
        raise explain(stderr, host=self._host, by_hand=self._by_hand, is_ssh_alone=self._is_ssh_alone)


class OpenSSHChannel:
    """A Channel over the ssh `process`.

    The exit status of a command that a signal ended is 255, because ssh does not tell the signal.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", sweeper: Sweeper) -> None:
        self._process = process
        self._sweeper = sweeper
        sweeper.add(process.pid)
        self._socket: socket.socket | None = None
        """A borrowed descriptor of ssh's TCP socket, for silence() and keepalive options."""
        self._pipes = PipeChannel(process)
        self._early = b""

    def wait_for_mark(self) -> bool:
        """Wait until ssh is logged in; return False if it ended before."""
        output = b""
        try:
            while _MARK not in output:
                if not (data := self._pipes.read()):
                    return False
                output += data
        except OSError:  # closed meanwhile
            return False
        # The first packet may hold output of the host right after the mark.
        self._early = output.replace(_MARK, b"", 1)
        self._socket = borrow(self._process.pid)
        if self._socket is not None:
            persist(self._socket)
        return True

    def silence(self) -> float | None:
        return None if self._socket is None else silence(self._socket)

    def read(self) -> bytes:
        if self._early:
            data, self._early = self._early, b""
            return data
        if data := self._pipes.read():
            return data
        # stdout also ends when ssh loses the connection; only its exit status and stderr tell the difference.
        status = self._pipes.exit_status(_END_PATIENCE)
        why = lost(self.stderr().decode("utf-8", "replace")) if status == FAILED else None
        if (killed := self._process.returncode) is not None and killed < 0:
            why = f"the ssh process on this machine was killed by signal {-killed}"
        if why is not None:
            raise ConnectionResetError(f"the connection was lost: {why}")
        return b""

    def write(self, data: bytes) -> None:
        self._pipes.write(data)

    def stderr(self) -> bytes:
        return self._pipes.stderr()

    def exit_status(self, timeout: float) -> int | None:
        return self._pipes.exit_status(timeout)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._pipes.close()
        # SIGTERM first: ssh then closes the session, and sshd ends the command on the host.
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                with contextlib.suppress(OSError):
                    os.killpg(self._process.pid, number)
                self._pipes.exit_status(_END_PATIENCE)
        self._sweeper.forget(self._process.pid)
