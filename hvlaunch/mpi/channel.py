"""A crew's connections as one connection to one host, such as ssh would make."""

import contextlib
import selectors
import socket
import threading
import zlib
from collections.abc import Callable, Sequence

from hvlaunch.agent.frames import Decoder, encode
from hvlaunch.agent.pieces import Cutter, Sieve
from hvlaunch.mpi.crew import Crew
from hvlaunch.mpi.launcher_errors import EndedByLauncher
from hvlaunch.ssh.connection import Channel
from hvlaunch.ssh.streams.tcp import is_near

__all__ = ["CrewChannel", "CrewConnection"]

_READ_SIZE = 1 << 16
_PATIENCE = 5.0  # seconds for a launcher that ends its processes to end as well


class CrewConnection:
    """hvlaunch.ssh.connection.Connection over the sockets of a host's agents, in the order of their slots."""

    def __init__(
        self, host: str, sockets: Sequence[socket.socket], launcher_end: Callable[[float], int | None]
    ) -> None:
        """`launcher_end` waits for the launcher's end, some seconds: its exit status, None where it runs on."""
        self._host = host
        self._launcher_end = launcher_end
        self._sockets = sockets
        self.local_address: str | None = plain(sockets[0].getsockname()[0])
        self.remote_address: str | None = plain(sockets[0].getpeername()[0])
        self.is_near = is_near(sockets[0])

    def run(self, command: str) -> Channel:  # noqa: ARG002 (the launcher has started what is to run)
        return CrewChannel(self._host, self._sockets, self._launcher_end)

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class CrewChannel:
    """hvlaunch.ssh.connection.Channel: the program first, then frames; one thread reads, another writes."""

    def __init__(
        self, host: str, sockets: Sequence[socket.socket], launcher_end: Callable[[float], int | None]
    ) -> None:
        self._host = host
        self._launcher_end = launcher_end
        self._sockets = list(sockets)
        self._crew = Crew(len(sockets))
        self._turn = threading.Lock()
        self._outgoing: Decoder | None = None
        self._incoming = [Decoder() for _ in sockets]
        self._cutter = Cutter()
        self._sieves = [Sieve(lambda _: None) for _ in sockets]
        self._cause = b""
        self._selector = selectors.DefaultSelector()
        for slot, sock in enumerate(sockets):
            self._selector.register(sock, selectors.EVENT_READ, slot)

    def read(self) -> bytes:
        """Frames for the driver, as if of one agent; b"" when one has gone without a word, or all have ended.

        Raises EndedByLauncher.
        """
        while not self._crew.is_ended:
            data = b""
            for key, _ in self._selector.select():
                received = self._sockets[key.data].recv(_READ_SIZE)
                if not received and not self._crew.has_ended(key.data):
                    self._cause = b"its agent of slot %d is gone" % key.data
                    return b""
                if not received:
                    self._selector.unregister(key.fileobj)
                data += self._for_the_driver(key.data, received)
            if data:
                return data
            if not self._selector.get_map():
                return b""
        raise self._ended()

    def _ended(self) -> EndedByLauncher:
        status = self._launcher_end(_PATIENCE)
        how = "" if status is None else f", and then ended with exit code {status}"
        return EndedByLauncher(f"the launcher ended its processes{how}", host=self._host, status=status)

    def _for_the_driver(self, slot: int, data: bytes) -> bytes:
        frames = []
        with self._turn:
            for header, body in self._incoming[slot].feed(self._sieves[slot].feed(data)):
                told = self._crew.to_driver(slot, header, body)
                frames += [encode(*frame) for frame in told]
        return b"".join(self._cutter.cut(b"".join(frames)))

    def write(self, data: bytes) -> None:
        if self._outgoing is None:
            data = self._send_program(data)
            self._outgoing = Decoder()
        for header, body in self._outgoing.feed(data):
            with self._turn:
                orders = list(self._crew.to_agents(header, body))
            for slot, (told, content) in orders:
                self._send(slot, encode(told, content))

    def _send_program(self, data: bytes) -> bytes:
        """The program is one zlib stream; what is behind it, which is returned, are frames."""
        unpacking = zlib.decompressobj()
        unpacking.decompress(data)
        program = data[: len(data) - len(unpacking.unused_data)]
        for slot in range(len(self._sockets)):
            self._send(slot, len(program).to_bytes(4, "big") + program)
        return unpacking.unused_data

    def _send(self, slot: int, data: bytes) -> None:
        """An agent that has ended needs to hear no more."""
        try:
            self._sockets[slot].sendall(data)
        except OSError:
            with self._turn:
                if not self._crew.has_ended(slot):
                    raise

    def stderr(self) -> bytes:
        return self._cause

    def exit_status(self, timeout: float) -> int | None:  # noqa: ARG002 (it is the launcher that is told)
        return None

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def plain(address: str) -> str:
    """An IPv4 address that a socket for both families shows as ::ffff:1.2.3.4."""
    return address.removeprefix("::ffff:") if "." in address else address
