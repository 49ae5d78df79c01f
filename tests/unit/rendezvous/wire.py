"""A raw connection to a server, and the secrets that the tests' servers have."""

import asyncio
import socket
from typing import NamedTuple

from hvlaunch.rendezvous.serving import RendezvousServer

TOKEN = "the-jobs-token"
AUTH = f"Authorization: Bearer {TOKEN}\r\n".encode()


class Response(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    body: bytes


class Wire:
    """A raw connection to the server: sends what it is told, reads one answer at a time."""

    def __init__(self, port: int, host: str = "127.0.0.1", *, source: str = "") -> None:
        own = (source, 0) if source else None
        self.socket = socket.create_connection((host, port), timeout=20, source_address=own)
        self.file = self.socket.makefile("rb")

    def send(self, data: bytes) -> "Wire":
        self.socket.sendall(data)
        return self

    def ask(self, method: str, path: str, body: bytes | None = None, *, headers: bytes = AUTH) -> Response:
        if body is not None:
            headers += b"Content-Length: %d\r\n" % len(body)
        self.send(f"{method} {path} HTTP/1.1\r\nHost: x\r\n".encode() + headers + b"\r\n" + (body or b""))
        return self.read(no_body=method == "HEAD")

    def read(self, *, no_body: bool = False) -> Response:
        version, status, _ = self.file.readline().split(b" ", 2)
        assert version == b"HTTP/1.1"
        headers = {}
        while (line := self.file.readline()) != b"\r\n":
            name, value = line.rstrip(b"\r\n").split(b": ", 1)
            headers[name.lower()] = value
        length = int(headers[b"content-length"])  # on every answer
        return Response(int(status), headers, b"" if no_body else self.file.read(length))

    def at_end(self) -> bool:
        """Waits for the server to hang up; False if it says something more, and where it only goes silent, an error."""
        try:
            return self.file.read(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.file.close()
        self.socket.close()


def get(path: str, headers: bytes = AUTH) -> bytes:
    return f"GET {path} HTTP/1.1\r\n".encode() + headers + b"\r\n"


def put(path: str, body: bytes) -> bytes:
    return f"PUT {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n".encode() + AUTH + b"\r\n" + body


def transports(server: RendezvousServer) -> list[asyncio.Transport]:
    """The server's ends of its connections."""
    return [connection._transport for connection in list(server._traffic.open)]
