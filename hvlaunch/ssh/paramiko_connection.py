"""A connection to a host that paramiko carries."""

import threading
import time

from paramiko.ssh_exception import ChannelException, SSHException

from hvlaunch.errors import HostError, HostLost, StartTimeout
from hvlaunch.ssh.connection import Channel
from hvlaunch.ssh.jump_stream import JumpStream, open_jump
from hvlaunch.ssh.paramiko_channel import ParamikoChannel
from hvlaunch.ssh.paramiko_transport import ClientTransport
from hvlaunch.ssh.stream import Stream

__all__ = ["ParamikoConnection"]


class ParamikoConnection:
    """hvlaunch.ssh.connection.Connection over an authenticated transport.

    `host` is for messages, `timeout` the seconds for a command to be taken by the host.
    """

    def __init__(self, host: str, transport: ClientTransport, stream: Stream, timeout: float) -> None:
        self.local_address: str | None = stream.local_address
        self.remote_address: str | None = stream.remote_address
        self.is_near = stream.is_near
        self._host = host
        self._transport = transport
        self._timeout = timeout

    def run(self, command: str) -> Channel:
        started = time.monotonic()
        watch = threading.Timer(self._timeout, self.close)  # exec_command itself waits for ever
        watch.daemon = True
        watch.start()
        try:
            session = self._transport.open_session(timeout=self._timeout)
            session.exec_command(command)
        except ChannelException as error:
            raise HostError(f"it opens no session for us: {error.text}", host=self._host) from None
        except (EOFError, OSError, SSHException) as error:
            if time.monotonic() - started >= self._timeout:
                cause = f"it did not take a command within {self._timeout:g} s"
                raise StartTimeout(cause, host=self._host) from None
            if self._transport.is_active():
                raise HostError(f"it runs no command for us: {error}", host=self._host) from None
            raise HostLost("the connection was lost before the command started", host=self._host) from None
        finally:
            watch.cancel()
        return ParamikoChannel(self._transport, session)

    def open_jump(self, target: tuple[str, int], *, host: str, timeout: float) -> JumpStream:
        """A way through this host to the next; see hvlaunch.ssh.jump_stream.open_jump."""
        own = self.local_address or ""
        return open_jump(self._transport, self._host, own, target, host=host, timeout=timeout)

    def is_open(self) -> bool:
        return self._transport.is_active()

    def close(self) -> None:
        self._transport.hang_up()
