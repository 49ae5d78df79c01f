"""A stranger's connections, many at a time, to a server: `flood.py KIND [ADDRESS:]PORT COUNT SOURCE…`.

It says `there` once each of its connections has begun, and goes on until its stdin ends. What is closed is opened again.
"""

import contextlib
import os
import selectors
import socket
import sys
import time

REQUEST = b"GET /s/k HTTP/1.1\r\nHost: x\r\n\r\n"
SENT = {
    "half-open": b"",
    "half": REQUEST[:20],
    "pipeline": REQUEST * 2000,
    "drip": b"x",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "refused": REQUEST,
}
"""What a connection begins with. `pipeline` sends it again whenever it may, and reads no answer; `drip` once a second."""


class Flood:
    """`count` connections from each address."""

    def __init__(self, kind: str, target: tuple[str, int], count: int, sources: list[str]) -> None:
        self._kind = kind
        self._target = target
        self._selector = selectors.DefaultSelector()
        self._stdin = sys.stdin.fileno()
        self._selector.register(self._stdin, selectors.EVENT_READ)
        self.begun = 0
        self._count = count * len(sources)
        for source in sources * count:
            self._open(source)

    def _open(self, source: str) -> None:
        connection = socket.socket()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT: thousands from one address
        connection.bind((source, 0))
        connection.connect_ex(self._target)
        self._selector.register(connection, selectors.EVENT_WRITE, self._begin)

    def _begin(self, connection: socket.socket) -> None:
        self.begun += 1
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._kind == "pipeline" else 0)
        self._selector.modify(connection, events, self._go_on)
        with contextlib.suppress(OSError):
            connection.send(SENT[self._kind])

    def _go_on(self, connection: socket.socket) -> None:
        try:
            if self._kind == "pipeline":
                connection.send(SENT["pipeline"])
                return  # and nothing is read
            is_closed = not connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            is_closed = True
        if is_closed:
            source = connection.getsockname()[0]
            self._selector.unregister(connection)
            connection.close()
            self._open(source)

    def _drip(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data == self._go_on:
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                with contextlib.suppress(OSError):
                    connection.send(SENT["drip"])

    def run(self) -> None:
        """Until stdin ends."""
        is_told = False
        dripped_at = time.monotonic()
        while True:
            for key, _ in self._selector.select(1.0):
                if key.fileobj == self._stdin:
                    return
                key.data(key.fileobj)
            if self._kind == "drip" and time.monotonic() > dripped_at + 1.0:
                dripped_at = time.monotonic()
                self._drip()
            if not is_told and self.begun >= self._count:
                is_told = True
                os.write(1, b"there\n")


if __name__ == "__main__":
    kind, target, count, *sources = sys.argv[1:]
    address, _, port = target.rpartition(":")
    Flood(kind, (address or "127.0.0.1", int(port)), int(count), sources).run()
