"""Ways to a host: an SSH client, or the user's remote agent."""

import re
import shlex
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hvlaunch.errors import ConnectFailed
from hvlaunch.job import Host, SSHOptions
from hvlaunch.ssh import Connection
from hvlaunch.ssh.pipes import PipeConnection

if TYPE_CHECKING:
    from hvlaunch.ssh.keyring import Keyring

__all__ = ["Ways", "agent_words", "connect_by_agent"]


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
