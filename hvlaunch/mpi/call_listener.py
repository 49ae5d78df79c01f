"""Where agents call the driver: a listening socket, TLS, and the proof that the caller belongs to the job."""

import contextlib
import errno
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from hvlaunch.agent.wire.caller import LONGEST_ENTRY, Sealed
from hvlaunch.agent.wire.shapes import mapping, of, pair, plain, text
from hvlaunch.mpi.process_ranks import ALL_NAMES
from hvlaunch.mpi.return_calls import ReturnCalls
from hvlaunch.rendezvous.serving.certificate import Certificate, tls_context
from hvlaunch.rendezvous.serving.listeners import Listeners
from hvlaunch.rendezvous.serving.strangers import StrangerLimits, Strangers
from hvlaunch.rendezvous.serving.traffic import plain_address
from hvlaunch.ssh.tcp import persist

if TYPE_CHECKING:
    import ssl

__all__ = ["CallLimits", "CallListener", "Caller"]

_REST = 0.1  # seconds, where no file descriptor is left
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_LONGEST = 256
_FACTS = pair(text(_LONGEST, raw=True), mapping(of(*ALL_NAMES), text(_LONGEST, raw=True), len(ALL_NAMES)))


class CallLimits(NamedTuple):
    """What strangers may cost: those who have called, and not proved yet what they are."""

    strangers: StrangerLimits = StrangerLimits(all=1024, from_one_address=256)
    """How many: each has a thread. All agents of a host may call at once, from an address that is not known before."""
    patience: float = 10.0
    """Seconds for all that a stranger has to say, however slowly it does."""
    facts: int = 1 << 16
    """Bytes of what it tells about itself."""


class Caller(NamedTuple):
    """An agent that has called, and proved that it is of this job."""

    connection: Sealed
    hostname: str
    environ: Mapping[str, str]
    """The variables by which its launcher tells it who it is."""
    word: bytes | None = None
    """Its own, by which it has come again."""


class _Stranger:
    """Somebody who has proved nothing yet; `due` is when that must have changed."""

    def __init__(self, sock: socket.socket, address: str, due: float) -> None:
        self.socket = sock
        self.address = address
        self.due = due


class CallListener:
    """Listens from the start until close(); `admit` gets the callers, in threads.

    `entry` is what lets them in, once they have made sure by the `certificate` who is to be told it. Those who have been
    here before have a word of their own, and go to `returns`. `host` "" is every address.
    """

    def __init__(
        self,
        entry: str,
        certificate: Certificate,
        admit: Callable[[Caller], None],
        limits: CallLimits | None = None,
        *,
        host: str = "",
        returns: ReturnCalls | None = None,
    ) -> None:
        self._returns = returns or ReturnCalls()
        self._entry = entry.encode("ascii")
        self._certificate = certificate
        self._admit = admit
        self._limits = limits or CallLimits()
        self._lock = threading.Lock()
        self._strangers: Strangers[_Stranger] = Strangers(self._limits.strangers)
        self._is_closed = False
        listeners = Listeners(host, 0)
        listeners.close_kept()
        self._listener = listeners.sockets[host]
        self.port: int = listeners.port
        threading.Thread(target=self._listen, name="calls", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        context = tls_context(self._certificate)  # here: a launcher starts meanwhile
        while not self._is_closed:
            try:
                self._listener.settimeout(self._hang_up_on_late())
                sock, name = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # it is closed, or the caller is gone again
                if error.errno in _NO_DESCRIPTOR:
                    self._make_room()
                continue
            stranger = _Stranger(sock, plain_address(name), time.monotonic() + self._limits.patience)
            with self._lock:
                if not self._strangers.is_welcome(stranger.address):
                    sock.close()
                    continue
                self._hang_up(self._strangers.enter(stranger, stranger.address))
            threading.Thread(target=self._meet, args=(stranger, context), daemon=True).start()

    def _make_room(self) -> None:
        with self._lock:
            self._hang_up(self._strangers.oldest())
        time.sleep(_REST)

    def _hang_up_on_late(self) -> float | None:
        """Seconds until the next stranger is late; None where there is none."""
        with self._lock:
            while (first := self._strangers.first()) is not None:
                left = first.due - time.monotonic()
                if left > 0:
                    return left
                self._strangers.leave(first)
                self._hang_up(first)
        return None

    @staticmethod
    def _hang_up(stranger: _Stranger | None) -> None:
        """Its own thread finds that out, and closes the socket."""
        if stranger is not None:
            with contextlib.suppress(OSError):
                stranger.socket.shutdown(socket.SHUT_RDWR)

    def _meet(self, stranger: _Stranger, context: "ssl.SSLContext") -> None:
        try:
            caller = self._check(stranger.socket, context)
            self._trust(stranger)
        except (OSError, ValueError):
            with self._lock:  # a stranger indeed, or an agent by another address that won
                self._strangers.leave(stranger)
                stranger.socket.close()
        else:
            if caller.word is None:
                self._admit(caller)
            else:
                self._returns.add(caller.word, caller.connection)

    def _trust(self, stranger: _Stranger) -> None:
        """It is of this job, and others at its address may be, too. Raises OSError where it has been hung up on."""
        with self._lock:
            if stranger not in self._strangers:
                raise OSError("it took too long")
            self._strangers.leave(stranger)
            self._strangers.know([stranger.address])

    def _check(self, sock: socket.socket, context: "ssl.SSLContext") -> Caller:
        """Raises OSError and ValueError."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        persist(sock)
        caller = Sealed(sock, context, server_side=True)
        caller.shake_hands()
        word = _part(caller, LONGEST_ENTRY)
        is_new = hmac.compare_digest(word, self._entry)
        if not is_new and not self._returns.knows(word):
            raise ValueError("a wrong word")
        hostname, environ = _facts(_part(caller, self._limits.facts))
        return Caller(caller, hostname, environ, None if is_new else word)


def _part(caller: Sealed, most: int) -> bytes:
    """Raises OSError and ValueError."""
    size = int.from_bytes(caller.receive(4), "big")
    if size > most:
        raise ValueError(f"{size} bytes, where {most} are the most")
    return caller.receive(size)


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
