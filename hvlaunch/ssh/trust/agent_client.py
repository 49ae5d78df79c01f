"""The ssh agent, asked by many threads."""

import socket
import threading
from typing import Any

from paramiko.ssh_exception import SSHException

from hvlaunch.ssh.paramiko_private import HookedAgent

__all__ = ["AgentClient"]

_PATIENCE = 30.0
"""Seconds for an answer: the agent may ask its user first; at the end of a dead forwarding it never answers."""


class AgentClient(HookedAgent):
    """The ssh agent behind the socket at `path`, and its keys as of now.

    paramiko's own would mix up the questions and answers of several threads, and wait for ever.
    Raises OSError and SSHException.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._turn = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_PATIENCE)
        try:
            self._socket.connect(path)
            self.begin(self._socket)
        except (OSError, SSHException):
            self.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def ask(self, question: Any) -> Any:
        with self._turn:
            try:
                return super().ask(question)
            except OSError:
                self.close()  # a late answer would be taken for that to the next question
                raise
