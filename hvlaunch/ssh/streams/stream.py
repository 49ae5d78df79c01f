"""What an SSH connection runs over: a TCP socket, the stdio of a ProxyCommand, or a channel of a jump host."""

import socket
from typing import Protocol

__all__ = ["GreetingSocket", "Stream", "greeting_with"]

_GREETING_SIZE = 256


class Stream(Protocol):
    """As much of a socket as SSH needs."""

    greeting: bytes
    """The first bytes that came: they tell what the other side is."""

    @property
    def local_address(self) -> str:
        """Our own end, as the first machine on the way sees it; empty where it is not known."""

    @property
    def remote_address(self) -> str:
        """The host's end; empty where it is not known."""

    @property
    def is_near(self) -> bool:
        """See Connection."""

    def silence(self) -> float | None:
        """See Connection."""

    def recv(self, size: int, /) -> bytes: ...

    def send(self, data: bytes, /) -> int: ...

    def settimeout(self, seconds: float | None, /) -> None: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...

    def problem(self) -> str | None:
        """What went wrong on the way, in the words of those who stand there, once the stream has ended."""


def greeting_with(greeting: bytes, data: bytes) -> bytes:
    """The greeting with the bytes that came after it, as long as it is short."""
    return greeting if len(greeting) >= _GREETING_SIZE else greeting + data[:_GREETING_SIZE]


class GreetingSocket(socket.socket):
    """A socket that keeps the greeting."""

    greeting = b""

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        data = super().recv(size, flags)
        self.greeting = greeting_with(self.greeting, data)
        return data

    def problem(self) -> str | None:
        return None
