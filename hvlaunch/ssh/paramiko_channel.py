"""A command on a host, over one of paramiko's channels."""

import contextlib
import threading

from paramiko.channel import Channel as Session
from paramiko.ssh_exception import SSHException

from hvlaunch.ssh.paramiko_transport import WINDOW, ClientTransport
from hvlaunch.ssh.tail import Tail

__all__ = ["ParamikoChannel"]

_CHUNK = 32 * 1024
_CLOSE_PATIENCE = 1.0
_STDERR_PATIENCE = 1.0


class ParamikoChannel:
    """hvlaunch.ssh.connection.Channel over `session`, in which a command runs already."""

    def __init__(self, transport: ClientTransport, session: Session) -> None:
        self._transport = transport
        self._session = session
        self._tail = Tail()
        self._given_up = False
        self._drain = threading.Thread(
            target=self._drain_stderr, name=f"{transport.name} stderr", daemon=True
        )
        self._drain.start()

    def read(self) -> bytes:
        try:
            data = self._session.recv(WINDOW)
        except (EOFError, SSHException) as error:
            raise self._lost() from error
        # The host says that stdout ended, or that the command did; silence means that the host is gone.
        ended = self._session.eof_received or self._session.exit_status >= 0
        if data or (ended and not self._given_up):
            return data
        raise self._lost()

    def write(self, data: bytes) -> None:
        start = 0
        try:
            while start < len(data):
                sent = self._session.send(data[start : start + _CHUNK])
                if sent == 0:
                    raise BrokenPipeError("the command is gone")
                start += sent
        except (EOFError, SSHException) as error:
            raise self._lost() from error

    def stderr(self) -> bytes:
        if self._session.eof_received or self._session.closed:
            self._drain.join(_STDERR_PATIENCE)
        return self._tail.get()

    def exit_status(self, timeout: float) -> int | None:
        self._session.status_event.wait(timeout)
        status = self._session.exit_status
        return status if status >= 0 else None

    def close(self) -> None:
        """Tell the host if it listens; with a connection that is stuck, give up all of the connection."""
        self._given_up = True
        if self._session.closed:
            return
        polite = threading.Thread(
            target=self._close_session, name=f"{self._transport.name} close", daemon=True
        )
        polite.start()
        polite.join(_CLOSE_PATIENCE)
        if polite.is_alive():
            self._transport.hang_up()

    def _close_session(self) -> None:
        with contextlib.suppress(EOFError, OSError, SSHException):
            self._session.close()

    def _drain_stderr(self) -> None:
        with contextlib.suppress(EOFError, OSError, SSHException):
            while data := self._session.recv_stderr(WINDOW):
                self._tail.add(data)

    def _lost(self) -> ConnectionError:
        if self._transport.is_active():
            return ConnectionAbortedError("the channel is closed")
        return ConnectionResetError(f"the connection was lost{_because(self._transport.farewell)}")


def _because(farewell: str | None) -> str:
    return f": {farewell}" if farewell else ""
