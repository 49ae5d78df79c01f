"""The ways to the hosts of a job, and what they share."""

import threading
from typing import TYPE_CHECKING, Protocol

from hvlaunch.job import Host, SSHOptions
from hvlaunch.ssh.connection import Connection

if TYPE_CHECKING:  # a local job has no use for it
    from hvlaunch.ssh.trust.keyring import Keyring

__all__ = ["Ways"]


class _Client(Protocol):
    def connect(self, host: Host, timeout: float | None = None) -> Connection: ...

    def close(self) -> None: ...


class Ways:
    """Connects to hosts over SSH as `options` say, within `timeout` seconds each. Thread-safe.

    Keys are read once, passphrases asked once, jump hosts connected to once, and at most
    `options.connect_limit` handshakes go on with one address. Nothing is loaded before it is used.
    """

    def __init__(self, options: SSHOptions, *, timeout: float) -> None:
        self._options = options
        self._timeout = timeout
        self._lock = threading.Lock()
        self._keyring: Keyring | None = None
        self._client: _Client | None = None

    def connect(self, host: Host, timeout: float | None = None) -> Connection:
        """An open connection to the host, in `timeout` seconds if they are given. Blocks. Raises HostError."""
        with self._lock:
            if self._client is None:
                self._client = self._make_client()
        return self._client.connect(host, timeout)

    def close(self) -> None:
        """Close what the connections share, after the connections; may be repeated."""
        with self._lock:
            if self._client is not None:
                self._client.close()
            if self._keyring is not None:
                self._keyring.close()

    def _make_client(self) -> _Client:
        from hvlaunch.ssh.streams.connect_limit import ConnectLimit  # noqa: PLC0415  (see the docstring of the class)

        connect_limit = ConnectLimit(self._options.connect_limit)
        if self._options.client == "openssh":
            from hvlaunch.ssh.by_openssh import OpenSSHClient  # noqa: PLC0415

            return OpenSSHClient(self._options, timeout=self._timeout, connect_limit=connect_limit)
        from hvlaunch.ssh.by_paramiko.client import ParamikoClient  # noqa: PLC0415

        return ParamikoClient(
            self._options, timeout=self._timeout, keyring=self._keys, connect_limit=connect_limit
        )

    def _keys(self) -> "Keyring":
        from hvlaunch.ssh.trust.keyring import Keyring  # noqa: PLC0415

        with self._lock:
            self._keyring = self._keyring or Keyring()
        return self._keyring
