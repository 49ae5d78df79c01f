"""Connections to hosts with paramiko: our socket, one thread of paramiko's, keys that all hosts share."""

import threading
import time
from contextlib import closing

from paramiko.ssh_exception import (
    BadAuthenticationType,
    ChannelException,
    PartialAuthentication,
    SSHException,
)

from hvlaunch.errors import ConnectFailed, HostError, HostLost, PermissionDenied, StartTimeout
from hvlaunch.job import Host, SSHOptions
from hvlaunch.ssh.connection import Channel
from hvlaunch.ssh.host_keys import HostKey, preferred_algorithms
from hvlaunch.ssh.keys import Keyring, Offers
from hvlaunch.ssh.paramiko_channel import ParamikoChannel
from hvlaunch.ssh.paramiko_transport import ClientTransport
from hvlaunch.ssh.settings import by_hand, resolve
from hvlaunch.ssh.tcp import QuickSocket, dial

__all__ = ["ParamikoConnection", "connect"]

_QUOTED = 80
"""Characters of a stranger's greeting that a message quotes."""


def connect(
    host: Host, options: SSHOptions, *, timeout: float, keyring: Keyring | None = None
) -> "ParamikoConnection":
    """Connect to `host` and authenticate with a key, within `timeout` seconds. Blocks; thread-safe.

    Share one `keyring` among the hosts of a job, or every host reads all keys anew. The host's key is
    checked as `options.host_keys` says.

    Raises a HostError: UnknownHost, ConnectFailed, StartTimeout, HostKeyUnknown, HostKeyChanged,
    HostKeyRevoked, PermissionDenied, or HostError itself for settings that can't be used.
    """
    if keyring is None:
        with closing(Keyring()) as own:
            return connect(host, options, timeout=timeout, keyring=own)
    return _Attempt(host, options, timeout, keyring).connect()


class ParamikoConnection:
    """hvlaunch.ssh.connection.Connection over an authenticated transport.

    `host` is for messages, `timeout` the seconds for a command to be taken by the host.
    """

    def __init__(self, host: str, transport: ClientTransport, sock: QuickSocket, timeout: float) -> None:
        self.local_address: str | None = sock.getsockname()[0]
        self.remote_address: str | None = sock.getpeername()[0]
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

    def close(self) -> None:
        self._transport.hang_up()


class _Attempt:
    """One host's way from its settings to an authenticated transport."""

    def __init__(self, host: Host, options: SSHOptions, timeout: float, keyring: Keyring) -> None:
        self._deadline = time.monotonic() + timeout
        self._timeout = timeout
        self._name = host.name
        self._policy = options.host_keys
        self._keyring = keyring
        self._settings = resolve(host, options, timeout=timeout)
        self._by_hand = by_hand(host, options, self._settings)
        self._where = f"{self._settings.hostname} port {self._settings.port}"

    def connect(self) -> ParamikoConnection:
        self._refuse_proxies()
        offers = self._keyring.offers(self._name, self._settings)
        sock = dial(self._name, self._settings, self._deadline)
        transport = ClientTransport(sock, name=f"ssh {self._name}")
        try:
            self._shake_hands(transport, sock)
            self._check_host_key(transport)
            self._authenticate(transport, offers)
            return ParamikoConnection(self._name, transport, sock, self._timeout)
        except (EOFError, OSError, SSHException) as error:
            transport.hang_up()
            raise self._failed(f"{self._where} closed the connection: {_why(transport, error)}") from None
        except BaseException:
            transport.hang_up()
            raise

    def _refuse_proxies(self) -> None:
        jump, command = self._settings.proxy_jump, self._settings.proxy_command
        if jump is None and command is None:
            return
        found = f"ProxyJump {jump}" if jump is not None else f"ProxyCommand {command}"
        cause = f"its ssh configuration asks for `{found}`, which hvlaunch can't do yet"
        hint = f"start hvlaunch where {self._settings.hostname} is reached directly, with --ssh-config for other settings"
        raise HostError(cause, host=self._name, hint=hint)

    def _shake_hands(self, transport: ClientTransport, sock: QuickSocket) -> None:
        known = self._keyring.known_hosts.key_types(self._name, self._settings)
        security = transport.get_security_options()
        security.key_types = preferred_algorithms(known, tuple(security.key_types))
        transport.banner_timeout = self._timeout
        done = threading.Event()
        transport.start_client(event=done)
        if not done.wait(self._remaining()):
            missed = (
                "did not finish the SSH handshake" if sock.greeting else "takes connections but says nothing"
            )
            raise self._late(missed)
        if not transport.is_active():
            raise self._no_handshake(transport, sock.greeting)

    def _no_handshake(self, transport: ClientTransport, greeting: bytes) -> ConnectFailed:
        error = transport.get_exception()
        if not greeting:
            hint = "many connections at once can be too many for its sshd (MaxStartups), or it refuses our address"
            return self._failed(f"{self._where} closed the connection before it said anything", hint)
        if b"SSH-" not in greeting:
            line = greeting.strip().split(b"\n")[0][:_QUOTED].decode("ascii", "backslashreplace").strip()
            return self._failed(f"{self._where} is no SSH server, or sends us away; it says: {line}")
        return self._failed(f"no SSH handshake with {self._where}: {_why(transport, error)}")

    def _check_host_key(self, transport: ClientTransport) -> None:
        shown = transport.get_remote_server_key()
        self._keyring.known_hosts.check(
            HostKey(shown.get_name(), shown.asbytes()),
            host=self._name,
            settings=self._settings,
            policy=self._policy,
            by_hand=self._by_hand,
        )

    def _authenticate(self, transport: ClientTransport, offers: Offers) -> None:
        tried: list[str] = []
        methods = ["publickey"]
        for offer in offers.keys:
            tried.append(offer.label)
            done = threading.Event()
            transport.auth_publickey(self._settings.user, offer.key, done)
            if not done.wait(self._remaining()):
                raise self._late(f"did not answer to the key {offer.label}")
            if transport.is_authenticated():
                return
            error = transport.get_exception()
            if isinstance(error, PartialAuthentication):
                if "publickey" in error.allowed_types:
                    continue
                wants = ", ".join(error.allowed_types)
                raise self._denied(
                    f"the key {offer.label} is accepted, but it also wants {wants}", tried, offers
                )
            if isinstance(error, BadAuthenticationType):
                methods = error.allowed_types
                break
            if not transport.is_active():
                if isinstance(error, OSError | EOFError) and transport.farewell is None:
                    raise error
                raise self._denied(_why(transport, error), tried, offers)
        raise self._denied(f"permission denied ({','.join(methods)})", tried, offers)

    def _denied(self, cause: str, tried: list[str], offers: Offers) -> PermissionDenied:
        noun = "key" if len(tried) == 1 else "keys"
        keys = f"tried {len(tried)} {noun}: {', '.join(tried)}" if tried else "there is no key to try"
        cause = f"{cause} for user {self._settings.user}; " + "; ".join((keys, *offers.skipped))
        return PermissionDenied(cause, host=self._name, hint=self._by_hand, tried=tried)

    def _remaining(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _late(self, missed: str) -> StartTimeout:
        cause = f"{self._where} {missed} within {self._timeout:g} s"
        return StartTimeout(cause, host=self._name, hint=self._by_hand)

    def _failed(self, cause: str, hint: str | None = None) -> ConnectFailed:
        return ConnectFailed(cause, host=self._name, hint=hint or self._by_hand)


def _why(transport: ClientTransport, error: Exception | None) -> str:
    return transport.farewell or str(error or "") or "no reason given"
