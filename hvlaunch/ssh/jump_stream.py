"""The way through a jump host: a channel of its connection to the next host's sshd (RFC 4254, section 7.2)."""

import contextlib
import ipaddress
import threading

from paramiko.channel import Channel
from paramiko.ssh_exception import ChannelException, SSHException

from hvlaunch.errors import ConnectFailed, StartTimeout
from hvlaunch.ssh.paramiko_transport import ClientTransport
from hvlaunch.ssh.stream import greeting_with

__all__ = ["JumpStream", "open_jump"]

_PROHIBITED = 1
_CLOSE_PATIENCE = 1.0


class JumpStream:
    """hvlaunch.ssh.stream.Stream over `channel`, which leads from the jump host `jump` to the host.

    `local_address` is ours as the jump host sees it, and `name` the host's as the jump host knows it.
    """

    greeting = b""
    is_near = False

    def __init__(self, channel: Channel, jump: str, local_address: str, name: str) -> None:
        self.local_address = local_address
        self.remote_address = _if_address(name)
        self._channel = channel
        self._jump = jump
        self._sending = threading.Lock()

    def recv(self, size: int, /) -> bytes:
        data = self._channel.recv(size)
        self.greeting = greeting_with(self.greeting, data)
        return data

    def send(self, data: bytes, /) -> int:
        # paramiko sends outside its own lock. Data that follow the channel's close make sshd end the whole
        # connection to the jump host, with all other hosts behind it ("nonexistent channel").
        with self._sending:
            return self._channel.send(data)

    def settimeout(self, seconds: float | None, /) -> None:
        self._channel.settimeout(seconds)

    def shutdown(self, how: int, /) -> None:  # noqa: ARG002  (SSH only ever ends both directions)
        self.close()

    def close(self) -> None:
        """Close it at our end at once; the jump host is told unless its connection is stuck."""
        if self._channel.closed:
            return
        polite = threading.Thread(target=self._tell, name=f"close through {self._jump}", daemon=True)
        polite.start()
        polite.join(_CLOSE_PATIENCE)

    def problem(self) -> str | None:
        transport = self._channel.get_transport()
        return None if transport.is_active() else f"the connection to its jump host {self._jump} was lost"

    def _tell(self) -> None:
        is_quiet = self._sending.acquire(timeout=_CLOSE_PATIENCE / 2)
        try:
            with contextlib.suppress(EOFError, OSError, SSHException):
                self._channel.close()
        finally:
            if is_quiet:
                self._sending.release()


def open_jump(
    transport: ClientTransport,
    jump: str,
    local_address: str,
    target: tuple[str, int],
    *,
    host: str,
    timeout: float,
) -> JumpStream:
    """Have the jump host connect to `target`, a name as it knows it and a port, within `timeout` seconds.

    `host` is for messages. Raises ConnectFailed, StartTimeout.
    """
    where = f"{target[0]} port {target[1]}"
    try:
        channel = transport.open_channel("direct-tcpip", target, ("127.0.0.1", 0), timeout=timeout)
    except ChannelException as error:
        hint = None
        if error.code == _PROHIBITED:
            hint = f"`AllowTcpForwarding yes` in the sshd_config of {jump}, which ssh -J needs too"
        cause = f"its jump host {jump} does not connect to {where}: {error.text}"
        raise ConnectFailed(cause, host=host, hint=hint) from None
    except (EOFError, OSError, SSHException) as error:
        if transport.is_active():
            cause = f"its jump host {jump} did not connect to {where} within {timeout:.0f} s"
            raise StartTimeout(cause, host=host) from None
        cause = f"the connection to its jump host {jump} was lost: {error}"
        raise ConnectFailed(cause, host=host) from None
    return JumpStream(channel, jump, local_address, target[0])


def _if_address(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return ""
