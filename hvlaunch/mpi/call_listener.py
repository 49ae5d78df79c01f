"""Where agents call the driver: a listening socket, and the proof on both sides that it is the same job."""

import contextlib
import hmac
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hvlaunch.agent.caller import AGENT, CHALLENGE, DRIVER, proof, receive
from hvlaunch.agent.shapes import mapping, of, pair, plain, text
from hvlaunch.mpi.process_ranks import ALL_NAMES

__all__ = ["CallListener", "Caller"]

_PATIENCE = 20.0  # seconds for a caller to prove what it is
_MOST_CALLERS = 256  # that have proved nothing yet
_MOST_FACTS = 1 << 16
_LONGEST = 256
_FACTS = pair(text(_LONGEST, raw=True), mapping(of(*ALL_NAMES), text(_LONGEST, raw=True), len(ALL_NAMES)))


class Caller(NamedTuple):
    """An agent that has called, and proved that it is of this job."""

    socket: socket.socket
    hostname: str
    environ: Mapping[str, str]
    """The variables by which its launcher tells it who it is."""


class CallListener:
    """Listens from the start until close(); `admit` gets the callers, in threads. The token never travels."""

    def __init__(self, token: str, admit: Callable[[Caller], None]) -> None:
        self._token = token.encode("ascii")
        self._admit = admit
        self._places = threading.BoundedSemaphore(_MOST_CALLERS)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, name="calls", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._places.acquire()
            threading.Thread(target=self._meet, args=(sock,), daemon=True).start()

    def _meet(self, sock: socket.socket) -> None:
        try:
            caller = self._check(sock)
        except (OSError, ValueError):
            sock.close()  # a stranger, or an agent by another address that won
        else:
            self._admit(caller)
        finally:
            self._places.release()

    def _check(self, sock: socket.socket) -> Caller:
        """Raises OSError and ValueError."""
        sock.settimeout(_PATIENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        theirs = receive(sock, CHALLENGE)
        ours = os.urandom(CHALLENGE)
        sock.sendall(ours + proof(self._token, DRIVER, theirs, ours))
        if not hmac.compare_digest(receive(sock, CHALLENGE), proof(self._token, AGENT, ours, theirs)):
            raise ValueError("a wrong token")
        size = int.from_bytes(receive(sock, 4), "big")
        if size > _MOST_FACTS:
            raise ValueError(f"{size} bytes of facts")
        hostname, environ = _facts(receive(sock, size))
        sock.settimeout(None)
        return Caller(sock, hostname, environ)


def _facts(data: bytes) -> tuple[str, dict[str, str]]:
    """Hostname and environment of a caller. Raises ValueError."""
    try:
        facts = json.loads(data)
    except RecursionError:
        facts = None
    if not _FACTS(facts):
        raise ValueError("facts that no agent tells")
    hostname, environ = facts
    return plain(hostname, _LONGEST), {name: plain(value, _LONGEST) for name, value in environ.items()}
