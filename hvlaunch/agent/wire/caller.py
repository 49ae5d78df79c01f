"""What the first process that a launcher (mpirun, srun) starts on a host runs: calls the driver, and becomes the agent.

It is on the launcher's command line (agent/rank.py is before it), so nothing secret is in it. The driver's addresses, the fingerprint of its
certificate, and a word that lets callers in come with the environment, which launchers may show to the network. So the
word is good for nothing but to call, and all else comes over TLS, from whoever has the certificate's key and nobody else.
"""

from __future__ import annotations

import _thread
import os
import sys
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import ssl
    from hashlib import sha256
    from json import dumps as quoted
    from typing import Any, Callable, List, Optional, Sequence

    new_context, wrap = ssl.SSLContext, ssl.SSLContext.wrap_bio

else:
    try:  # what is below ssl and socket, without their start: 14 ms on every host
        import _socket as socket
        import _ssl as ssl
        from _hashlib import openssl_sha256 as sha256
        from _json import encode_basestring_ascii as quoted

        new_context = ssl._SSLContext  # noqa: SLF001 (see above)
        wrap = new_context._wrap_bio  # noqa: SLF001 (see above)
    except (ImportError, AttributeError):  # another Python than those that we know
        import socket
        import ssl
        from hashlib import sha256
        from json import dumps as quoted

        new_context, wrap = ssl.SSLContext, ssl.SSLContext.wrap_bio

__all__ = ["ADDRESSES", "CERTIFICATE", "ENTRY", "LONGEST_ENTRY", "WORD_SIZE", "Sealed", "main"]

ENTRY = "HVLAUNCH_ENTRY"
CERTIFICATE = "HVLAUNCH_DRIVER_CERT"
ADDRESSES = "HVLAUNCH_DRIVER"
"""Where the driver listens, the likeliest first: `ADDRESS PORT,ADDRESS PORT`."""
LONGEST_ENTRY = 256
WORD_SIZE = 64
"""Bytes of the word that is good for this agent's further calls, and for nobody else's."""

_STAGGER = 0.25  # seconds between addresses: one that leads nowhere may take minutes to say so
_PATIENCE, _PATIENCE_AGAIN = 30.0, 4.0
_PERSISTENCE = ((44, 1000), (18, 900_000))
"""TCP_RTO_MAX_MS and TCP_USER_TIMEOUT, as the driver's end has them (ssh/tcp.py): it is sent again each second after a cut."""
_TLS_1_3: Any = 0x0304
_HEAD = 5  # bytes of a TLS record, the last two of them the length of the rest (RFC 8446, 5.1)
_RECORDS = (20, 21, 22, 23)
_LONGEST = (1 << 14) + 256
_READ_SIZE = 1 << 18


class Sealed:
    """TLS 1.3 over a socket, or over whatever its descriptor becomes: what is sent is sealed, what has come is opened.

    One thread may read while another writes.
    """

    again: Optional[Callable[[], Sealed]] = None
    """Of the caller: makes another connection to the same driver. Raises SystemExit."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_side: bool) -> None:
        self.socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = wrap(context, self._incoming, self._outgoing, server_side)
        self._turn = _thread.allocate_lock()
        self._opened = b""

    def shake_hands(self) -> None:
        """Raises OSError."""
        while True:
            try:
                self._tls.do_handshake()
                is_done = True
            except ssl.SSLWantReadError:
                is_done = False
            self.socket.sendall(self._outgoing.read())
            if is_done:
                return
            self._incoming.write(self._record())

    def fingerprint(self) -> str:
        """Of the other side's certificate."""
        return "sha256:" + sha256(self._tls.getpeercert(True) or b"").hexdigest()

    def seal(self, data: bytes) -> bytes:
        with self._turn:
            self._tls.write(data)
            return self._outgoing.read()

    def open(self, data: bytes) -> bytes:
        """What is whole of it, and of what came before. Raises OSError where it was changed on its way."""
        pieces = []
        with self._turn:
            self._incoming.write(data)
            try:
                while True:
                    piece = self._tls.read(_READ_SIZE)
                    if not piece:
                        break
                    pieces.append(piece)
            except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
                pass
        return b"".join(pieces)

    def sendall(self, data: bytes) -> None:
        self.socket.sendall(self.seal(data))

    def receive(self, size: int) -> bytes:
        """So many bytes; whole records are read, and no byte behind the last of them. Raises OSError."""
        while len(self._opened) < size:
            self._opened += self.open(self._record())
        data, self._opened = self._opened[:size], self._opened[size:]
        return data

    def _record(self) -> bytes:
        head = self._exactly(_HEAD)
        size = int.from_bytes(head[3:], "big")
        if head[0] not in _RECORDS or size > _LONGEST:
            raise OSError("the other side does not speak TLS")
        return head + self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            if not part:
                raise OSError("the other side hung up")
            data += part
        return data


class _Calls:
    """Calls several addresses, one after the other; the first where the driver answers is the one that counts."""

    def __init__(self, entry: bytes, certificate: str, facts: bytes, patience: float) -> None:
        """`facts` is what the driver is told of this process, `patience` the seconds for each of its answers."""
        self._entry = entry
        self._certificate = certificate
        self._facts = facts
        self._patience = patience
        self._lock = _thread.allocate_lock()
        self._until_over = _thread.allocate_lock()
        self._until_over.acquire()
        self._driver: Optional[Sealed] = None
        self._failures: List[str] = []

    def driver(self, addresses: Sequence[str]) -> Sealed:
        """The connection to the driver. Raises SystemExit where no address leads to it."""
        for number, where in enumerate(addresses):
            address, port = where.split()
            call = (number * _STAGGER, address, int(port), len(addresses))
            _thread.start_new_thread(self._call, call)
        self._is_over(-1)
        with self._lock:
            if self._driver is None:
                causes = "; ".join(self._failures)
                sys.exit("hvlaunch: %s can't reach the driver: %s" % (os.uname().nodename, causes))
            return self._driver

    def _is_over(self, seconds: float) -> bool:
        """Whether a call has been taken, or all have failed, after at most so many seconds; -1 waits for it."""
        if not self._until_over.acquire(True, seconds):
            return False
        self._until_over.release()
        return True

    def _call(self, pause: float, address: str, port: int, count: int) -> None:
        if self._is_over(pause):
            return
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            sock.settimeout(self._patience)
            sock.connect((address, port))
            self._meet(sock)
        except OSError as error:
            with self._lock:
                self._failures.append("%s port %d: %s" % (address, port, error))
                if len(self._failures) == count:
                    self._until_over.release()

    def _meet(self, sock: socket.socket) -> None:
        """Have the driver prove itself, and if no other call was quicker, show that we belong to it. Raises OSError."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            for option, milliseconds in _PERSISTENCE:
                sock.setsockopt(socket.IPPROTO_TCP, option, milliseconds)
        except OSError:
            pass  # before Linux 6.15
        context = new_context(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = _TLS_1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # no authority is asked: the fingerprint says more than any could
        driver = Sealed(sock, context, server_side=False)
        driver.shake_hands()
        if driver.fingerprint() != self._certificate:
            raise OSError("that is not the driver")
        with self._lock:
            if self._driver is None:
                sock.settimeout(None)
                for part in (self._entry, self._facts):
                    driver.sendall(len(part).to_bytes(4, "big") + part)
                self._driver = driver
                self._until_over.release()


def main(names: Sequence[str], ranks: Optional[socket.socket] = None) -> None:
    """Run the program that the driver sends, with the connection for its stdin and stdout, and `sealed`, which encrypts it.

    `names` are the variables that the driver is told of, by which a launcher tells its processes who they are; at
    `ranks` the other processes of this host meet the agent.
    """
    known = {name: value for name, value in os.environ.items() if name in names}
    told = ",".join("%s:%s" % (quoted(name), quoted(value)) for name, value in known.items())
    facts = ("[%s,{%s}]" % (quoted(os.uname().nodename), told)).encode("ascii")
    entry, certificate, addresses = (os.environ.pop(name) for name in (ENTRY, CERTIFICATE, ADDRESSES))

    def call(word: bytes, patience: float) -> Sealed:
        driver = _Calls(word, certificate, facts, patience).driver(addresses.split(","))
        driver.again = lambda: call(own_word, _PATIENCE_AGAIN)
        return driver

    driver = call(entry.encode("ascii"), _PATIENCE)
    try:
        own_word = driver.receive(WORD_SIZE)
        program = driver.receive(int.from_bytes(driver.receive(4), "big"))
    except OSError:
        sys.exit(1)  # it has no use for us, and says why itself
    os.dup2(driver.socket.fileno(), 0)
    os.dup2(0, 1)
    driver.socket.close()
    given = {"__name__": "__main__", "sealed": driver, "ranks": ranks}
    exec(zlib.decompress(program), given)  # noqa: S102 (it is the driver's, which has proved itself)
