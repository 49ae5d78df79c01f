"""The first code that runs where a launcher (mpirun, srun) starts it: calls the driver, and becomes the agent.

It is on the launcher's command line, so nothing secret is in it: the driver's addresses and the job's token
come with the environment. Caller and driver each prove that they have the token, without showing it, before
anything of the other's is used: what comes from the driver is run.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import sys
import threading
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List, Optional, Sequence

__all__ = ["ADDRESSES", "AGENT", "CHALLENGE", "DRIVER", "TOKEN", "main", "proof", "receive"]

TOKEN = "HVLAUNCH_TOKEN"  # noqa: S105 (the variable's name)
ADDRESSES = "HVLAUNCH_DRIVER"
"""Where the driver listens, the likeliest first: `ADDRESS PORT,ADDRESS PORT`."""
DRIVER, AGENT = b"hvlaunch driver", b"hvlaunch agent"
"""What each side adds to the challenges, so that its proof is no good for the other side."""
CHALLENGE = 32
"""Bytes; a proof has as many."""

_STAGGER = 0.25  # seconds between addresses: one that leads nowhere may take minutes to say so
_PATIENCE = 30.0


def proof(token: bytes, who: bytes, *challenges: bytes) -> bytes:
    """That `who` has the token: what can be made of these challenges by its means alone."""
    return hmac.new(token, who + b"".join(challenges), hashlib.sha256).digest()


def receive(sock: socket.socket, size: int) -> bytes:
    """So many bytes. Raises OSError."""
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise OSError("the other side hung up")
        data += part
    return data


class _Calls:
    """Calls several addresses, one after the other; the first where the driver answers is the one that counts."""

    def __init__(self, token: bytes, facts: bytes) -> None:
        """`facts` is what the driver is told of this process."""
        self._token = token
        self._facts = facts
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._driver: Optional[socket.socket] = None
        self._failures: List[str] = []

    def driver(self, addresses: Sequence[str]) -> socket.socket:
        """The connection to the driver. Raises SystemExit where no address leads to it."""
        for number, where in enumerate(addresses):
            address, port = where.split()
            call = (number * _STAGGER, address, int(port), len(addresses))
            threading.Thread(target=self._call, args=call, daemon=True).start()
        self._is_over.wait()
        with self._lock:
            if self._driver is None:
                causes = "; ".join(self._failures)
                sys.exit("hvlaunch: %s can't reach the driver: %s" % (socket.gethostname(), causes))
            return self._driver

    def _call(self, pause: float, address: str, port: int, count: int) -> None:
        if self._is_over.wait(pause):
            return
        try:
            sock = socket.create_connection((address, port), _PATIENCE)
            self._meet(sock)
        except OSError as error:
            with self._lock:
                self._failures.append("%s port %d: %s" % (address, port, error))
                if len(self._failures) == count:
                    self._is_over.set()

    def _meet(self, sock: socket.socket) -> None:
        """Have the driver prove itself, and if no other call was quicker, do the same. Raises OSError."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        ours = os.urandom(CHALLENGE)
        sock.sendall(ours)
        theirs = receive(sock, CHALLENGE)
        if not hmac.compare_digest(receive(sock, CHALLENGE), proof(self._token, DRIVER, ours, theirs)):
            raise OSError("that is not the driver")
        with self._lock:
            if self._driver is None:
                sock.settimeout(None)
                sock.sendall(proof(self._token, AGENT, theirs, ours))
                sock.sendall(len(self._facts).to_bytes(4, "big") + self._facts)
                self._driver = sock
                self._is_over.set()


def main(names: Sequence[str]) -> None:
    """Run the program that the driver sends, with the connection for its stdin and stdout.

    `names` are the variables that the driver is told of, by which a launcher tells its processes who they are.
    """
    known = {name: value for name, value in os.environ.items() if name in names}
    facts = json.dumps([socket.gethostname(), known]).encode("ascii")
    calls = _Calls(os.environ[TOKEN].encode("ascii"), facts)
    driver = calls.driver(os.environ.pop(ADDRESSES).split(","))
    try:
        program = receive(driver, int.from_bytes(receive(driver, 4), "big"))
    except OSError:
        sys.exit(1)  # it has no use for us, and says why itself
    os.dup2(driver.fileno(), 0)
    os.dup2(0, 1)
    driver.close()
    exec(zlib.decompress(program), {"__name__": "__main__"})  # noqa: S102 (it is the driver's, which has proved itself)
