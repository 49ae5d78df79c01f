"""The first process that a launcher (mpirun, srun) starts on a host calls the driver here, and becomes the agent.

This program is on the launcher's command line, behind agent/launched.py, so it has no secrets. The driver's addresses, the
fingerprint of its certificate and the entry word come by the environment, which launchers may show to the network.
Therefore the word only permits a call, and the rest comes over TLS from the owner of the certificate's key.
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
    try:  # the C modules below ssl and socket, whose imports take 14 ms on each host
        import _socket as socket
        import _ssl as ssl
        from _hashlib import openssl_sha256 as sha256
        from _json import encode_basestring_ascii as quoted

        new_context = ssl._SSLContext  # noqa: SLF001 (see above)
        wrap = new_context._wrap_bio  # noqa: SLF001 (see above)
    except (ImportError, AttributeError):  # a Python with other private names
        import socket
        import ssl
        from hashlib import sha256
        from json import dumps as quoted

        new_context, wrap = ssl.SSLContext, ssl.SSLContext.wrap_bio

__all__ = ["ADDRESSES", "CERTIFICATE", "ENTRY", "LONGEST_ENTRY", "WORD_SIZE", "Sealed", "main"]

ENTRY = "HVLAUNCH_ENTRY"
CERTIFICATE = "HVLAUNCH_DRIVER_CERT"
ADDRESSES = "HVLAUNCH_DRIVER"
"""The driver's addresses, the likeliest first: `ADDRESS PORT,ADDRESS PORT`."""
LONGEST_ENTRY = 256
WORD_SIZE = 64
"""Bytes of the word for further calls of this agent."""

_STAGGER = 0.25  # seconds between addresses: a dead address may take minutes to fail
_PATIENCE, _PATIENCE_AGAIN = 30.0, 4.0
_PERSISTENCE = ((44, 1000), (18, 900_000))
"""TCP_RTO_MAX_MS and TCP_USER_TIMEOUT, as at the driver's end (ssh/streams.py): after a cut, data is sent again each second."""
_TLS_1_3: Any = 0x0304
_HEAD = 5  # bytes at the start of a TLS record; the last two are the length of its content (RFC 8446, 5.1)
_RECORDS = (20, 21, 22, 23)
_LONGEST = (1 << 14) + 256
_READ_SIZE = 1 << 18


class Sealed:
    """TLS 1.3 over a socket: seal() encrypts, open() decrypts. Reading and writing threads may work at the same time."""

    # It works on bytes and not on the socket, because the descriptor becomes the agent's stdin and stdout.

    again: Optional[Callable[[], Sealed]] = None
    """Makes another connection to the same driver; set by the caller. Raises SystemExit."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_side: bool) -> None:
        self.socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = wrap(context, self._incoming, self._outgoing, server_side)
        self._turn = _thread.allocate_lock()
        self._opened = b""

    def shake_hands(self) -> None:
        """Complete the TLS handshake. Raises OSError."""
        while True:
            try:
                self._tls.do_handshake()
                is_done = True
            except ssl.SSLWantReadError:
                is_done = False
            # Sent even after the last step: the client's final message is in the buffer by then.
            self.socket.sendall(self._outgoing.read())
            if is_done:
                return
            self._incoming.write(self._record())

    def fingerprint(self) -> str:
        """Return the fingerprint of the other side's certificate."""
        return "sha256:" + sha256(self._tls.getpeercert(True) or b"").hexdigest()

    def seal(self, data: bytes) -> bytes:
        with self._turn:
            self._tls.write(data)
            return self._outgoing.read()

    def open(self, data: bytes) -> bytes:
        """Return the content of the records that are complete with `data`. Raises OSError if they were changed on their way."""
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
        """Return so many bytes, reading only whole records. Raises OSError."""
        # Not a byte of the next record: its bytes belong to whichever program reads the descriptor next.
        while len(self._opened) < size:
            self._opened += self.open(self._record())
        data, self._opened = self._opened[:size], self._opened[size:]
        return data

    def _record(self) -> bytes:
        head = self._exactly(_HEAD)
        size = int.from_bytes(head[3:], "big")
        # A server of another kind may answer with a length of up to 64 KiB, and then wait for ever.
        if head[0] not in _RECORDS or size > _LONGEST:
            raise OSError("the other side does not speak TLS")
        return head + self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            if not part:
                raise OSError("the other side closed the connection")
            data += part
        return data


class _Calls:
    """Calls several addresses, one after the other; the first proven driver wins."""

    def __init__(self, entry: bytes, certificate: str, facts: bytes, patience: float) -> None:
        """`facts` describe this process to the driver; each of its answers has `patience` seconds."""
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
        """Return the connection to the driver. Raises SystemExit if no address leads to it."""
        for number, target in enumerate(addresses):
            address, port = target.split()
            call = (number * _STAGGER, address, int(port), len(addresses))
            _thread.start_new_thread(self._call, call)
        self._is_over(-1)
        with self._lock:
            if self._driver is None:
                causes = "; ".join(self._failures)
                sys.exit("hvlaunch: %s can't reach the driver: %s" % (os.uname().nodename, causes))
            return self._driver

    def _is_over(self, seconds: float) -> bool:
        """True once a call has succeeded or every call has failed; waits at most so many seconds, -1 for ever."""
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
        """Check the driver's proof; send the entry word if no other call was quicker. Raises OSError."""
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
        # No authority signs this certificate: its fingerprint is known, which is a stronger check.
        context.verify_mode = ssl.CERT_NONE
        driver = Sealed(sock, context, server_side=False)
        driver.shake_hands()
        if driver.fingerprint() != self._certificate:
            raise OSError("the program there is not the driver")
        with self._lock:
            # Only the winner sends the word, so the driver counts this process once.
            if self._driver is None:
                sock.settimeout(None)
                for part in (self._entry, self._facts):
                    driver.sendall(len(part).to_bytes(4, "big") + part)
                self._driver = driver
                self._until_over.release()


def main(names: Sequence[str], ranks: Optional[socket.socket] = None) -> None:
    """Call the driver, and run the program that it sends; the connection is the program's stdin and stdout.

    `names` are the launcher's variables for ranks, whose values the driver gets. At `ranks` the other processes of this
    host meet the agent.
    """
    environ = {name: value for name, value in os.environ.items() if name in names}
    pairs = ",".join("%s:%s" % (quoted(name), quoted(value)) for name, value in environ.items())
    facts = ("[%s,{%s}]" % (quoted(os.uname().nodename), pairs)).encode("ascii")
    # Taken out of the environment, so that workers do not inherit the word.
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
        sys.exit(1)  # the driver does not need this process, and reports the reason itself
    os.dup2(driver.socket.fileno(), 0)
    os.dup2(0, 1)
    driver.socket.close()
    unpacking = zlib.decompressobj()
    names_for_boot = {"__name__": "__main__", "pack": unpacking, "sealed": driver, "ranks": ranks}
    exec(unpacking.decompress(program), names_for_boot)  # noqa: S102 (the driver, which has proved itself, sent it)
