"""A connection to a host by paramiko."""

import contextlib
import threading
import time

from paramiko.channel import Channel as Session
from paramiko.ssh_exception import ChannelException, SSHException

from hvlaunch.errors import HostError, HostLost, StartTimeout
from hvlaunch.ssh import Channel
from hvlaunch.ssh.by_paramiko.transport import WINDOW, JumpStream, SSHTransport, open_jump
from hvlaunch.ssh.pipes import Tail
from hvlaunch.ssh.streams import Stream

__all__ = ["ParamikoChannel", "ParamikoConnection"]

_CHUNK = 32 * 1024
_MOST_READ = 1 << 18
"""Maximum bytes of one read(): the reader of frames copies them several times."""

_CLOSE_PATIENCE = 1.0
_STDERR_PATIENCE = 1.0


class ParamikoChannel:
    """A Channel over `session`, in which a command is running."""

    def __init__(self, transport: SSHTransport, session: Session) -> None:
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
            data = self._session.recv(_MOST_READ)
        except (EOFError, SSHException) as error:
            raise self._lost() from error
        # A host reports the end of stdout or of the command. An end without a report means a lost connection.
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
        """Tell the host, if it listens; if the connection is stuck, give up the whole connection."""
        self._given_up = True
        if self._session.closed:
            return
        polite = threading.Thread(
            target=self._close_session, name=f"{self._transport.name} close", daemon=True
        )
        polite.start()
        polite.join(_CLOSE_PATIENCE)
        # Another sender blocks the connection, and its locks: only a shutdown frees the threads.
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


class ParamikoConnection:
    """A Connection over an authenticated transport.

    `host` is for messages; `timeout` limits the start of a command.
    """

    def __init__(self, host: str, transport: SSHTransport, stream: Stream, timeout: float) -> None:
        self.local_address: str | None = stream.local_address
        self.remote_address: str | None = stream.remote_address
        self.is_near = stream.is_near
        self.silence = stream.silence
        self._host = host
        self._transport = transport
        self._timeout = timeout

    def run(self, command: str) -> Channel:
        started = time.monotonic()
        # exec_command() has no timeout, so a timer closes the connection.
        watch = threading.Timer(self._timeout, self.close)
        watch.daemon = True
        watch.start()
        try:
            session = self._transport.open_session(timeout=self._timeout)
            session.exec_command(command)
        except ChannelException as error:
            raise HostError(f"its sshd refused to open a session: {error.text}", host=self._host) from None
        except (EOFError, OSError, SSHException) as error:
            # The timer closed the connection, so the error itself says only that it was closed.
            if time.monotonic() - started >= self._timeout:
                cause = f"its sshd did not start a command within {self._timeout:g} s"
                raise StartTimeout(cause, host=self._host) from None
            if self._transport.is_active():
                raise HostError(f"its sshd refused to run a command: {error}", host=self._host) from None
            raise HostLost("the connection was lost before the command started", host=self._host) from None
        finally:
            watch.cancel()
        return ParamikoChannel(self._transport, session)

    def open_jump(self, target: tuple[str, int], *, host: str, timeout: float) -> JumpStream:
        """Open a stream through this host to the next one; see transport.open_jump."""
        local_address = self.local_address or ""
        return open_jump(self._transport, self._host, local_address, target, host=host, timeout=timeout)

    def is_open(self) -> bool:
        return self._transport.is_active()

    def close(self) -> None:
        self._transport.hang_up()
