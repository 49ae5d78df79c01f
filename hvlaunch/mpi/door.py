"""Where the agents come in: a listening socket, and the proof on both sides that it is the same job."""

import contextlib
import hmac
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hvlaunch.agent.caller import AGENT, CHALLENGE, DRIVER, proof, receive

__all__ = ["Door", "Member"]

_PATIENCE = 20.0  # seconds for a caller to prove what it is
_MOST_CALLERS = 256  # that have proved nothing yet
_MOST_FACTS = 1 << 16


class Member(NamedTuple):
    """An agent that has come in."""

    socket: socket.socket
    hostname: str
    environ: Mapping[str, str]
    """The variables by which its launcher tells it who it is."""


class Door:
    """Listens from the start until close(); `admit` gets the members, in threads. The token never travels."""

    def __init__(self, token: str, admit: Callable[[Member], None]) -> None:
        self._token = token.encode("ascii")
        self._admit = admit
        self._places = threading.BoundedSemaphore(_MOST_CALLERS)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, name="door", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            self._places.acquire()
            threading.Thread(target=self._meet, args=(caller,), daemon=True).start()

    def _meet(self, caller: socket.socket) -> None:
        try:
            member = self._check(caller)
        except (OSError, ValueError):
            caller.close()  # a stranger, or an agent by another address that won
        else:
            self._admit(member)
        finally:
            self._places.release()

    def _check(self, caller: socket.socket) -> Member:
        """Raises OSError and ValueError."""
        caller.settimeout(_PATIENCE)
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        theirs = receive(caller, CHALLENGE)
        ours = os.urandom(CHALLENGE)
        caller.sendall(ours + proof(self._token, DRIVER, theirs, ours))
        if not hmac.compare_digest(receive(caller, CHALLENGE), proof(self._token, AGENT, ours, theirs)):
            raise ValueError("a wrong token")
        size = int.from_bytes(receive(caller, 4), "big")
        if size > _MOST_FACTS:
            raise ValueError(f"{size} bytes of facts")
        hostname, environ = json.loads(receive(caller, size))
        caller.settimeout(None)
        return Member(caller, str(hostname), {str(name): str(value) for name, value in environ.items()})
