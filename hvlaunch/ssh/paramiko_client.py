"""Connections to hosts with paramiko: our socket, one thread of paramiko's, keys that all hosts share."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from paramiko.ssh_exception import (
    AuthenticationException,
    BadAuthenticationType,
    ChannelException,
    IncompatiblePeer,
    PartialAuthentication,
    SSHException,
)

from hvlaunch.errors import ConnectFailed, HostError, HostLost, PermissionDenied, SentAway, StartTimeout
from hvlaunch.job import Host, HostKeyPolicy, SSHOptions
from hvlaunch.ssh.connection import Channel
from hvlaunch.ssh.host_keys import HostKey, preferred_algorithms
from hvlaunch.ssh.jump_stream import JumpStream, open_jump
from hvlaunch.ssh.jumps import Hop, Hops, Jumps, behind
from hvlaunch.ssh.keys import Keyring, Locked, Offers
from hvlaunch.ssh.openssh_errors import was_sent_away
from hvlaunch.ssh.paramiko_channel import ParamikoChannel
from hvlaunch.ssh.paramiko_transport import ClientTransport
from hvlaunch.ssh.proxy_command import start_proxy
from hvlaunch.ssh.questions import Questions
from hvlaunch.ssh.settings import HostSettings, ask_ssh, by_hand, resolve
from hvlaunch.ssh.stream import Stream
from hvlaunch.ssh.tcp import dial
from hvlaunch.ssh.turns import Turns

__all__ = ["ParamikoClient", "ParamikoConnection", "Target"]

_QUOTED = 80
"""Characters of a stranger's greeting that a message quotes."""
_SENT_AWAY = ("Exceeded MaxStartups", "Not allowed at this time")
"""What newer sshd's say to those who are too many, before they close the connection."""
_TOO_MANY = "a smaller --connect-limit, if its sshd has a small MaxStartups; or it refuses our address"
_OPENSSH = "--ssh-client openssh"
_METHODS = {
    "GSSAPIAuthentication": "gssapi",
    "HostbasedAuthentication": "hostbased",
    "PKCS11Provider": "publickey",
}
"""What sshd calls what a setting of the ssh binary asks for."""


class ParamikoClient:
    """Connects to the hosts of a job as `options` say, within `timeout` seconds each. Thread-safe.

    What the hosts share are the keys, the turns, and the connections to jump hosts, which `close` ends.
    """

    def __init__(self, options: SSHOptions, *, timeout: float, keyring: Keyring, turns: Turns) -> None:
        self._options = options
        self._ask = Questions(ask_ssh)
        self._hops = Hops(options, timeout=timeout)
        self._timeout = timeout
        self._keyring = keyring
        self._turns = turns
        self._jumps: Jumps[ParamikoConnection] = Jumps()

    def connect(self, host: Host) -> "ParamikoConnection":
        """Connect to `host` and authenticate with a key. Blocks. The host's key is checked as the options say.

        Raises a HostError: UnknownHost, ConnectFailed, SentAway, StartTimeout, HostKeyUnknown,
        HostKeyChanged, HostKeyRevoked, PermissionDenied, or HostError itself for settings that can't be used.
        """
        deadline = time.monotonic() + self._timeout
        settings = resolve(host, self._options, timeout=self._timeout, ask=self._ask)
        target = Target(host.name, settings, by_hand(host, self._options, settings))
        via: ParamikoConnection | None = None
        for hop in self._hops.before(host.name, settings.proxy_jump):
            make = partial(self._jump, hop, via, deadline)
            try:
                via = self._jumps.get(hop.key, make, host=host.name, timeout=deadline - time.monotonic())
            except HostError as error:
                raise behind(host.name, hop.key[-1], error) from None
        return self._open(target, via, deadline)

    def close(self) -> None:
        """Close the connections to jump hosts; may be repeated."""
        self._jumps.close()

    def _jump(self, hop: Hop, via: "ParamikoConnection | None", deadline: float) -> "ParamikoConnection":
        settings = self._hops.settings(hop.host, hop.jump)
        hint = by_hand(hop.host, self._hops.options, settings)
        return self._open(Target(hop.host.name, settings, hint), via, deadline)

    def _open(
        self, target: "Target", via: "ParamikoConnection | None", deadline: float
    ) -> "ParamikoConnection":
        def attempt() -> ParamikoConnection:
            return _Attempt(target, self._options.host_keys, self._keyring, self._timeout, deadline).connect(
                via
            )

        address = f"{target.settings.hostname} port {target.settings.port}"
        return self._turns.take(address, attempt, host=target.name, deadline=deadline)


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to connect to: a name for messages, the settings, and the ssh command that does the same by hand."""

    name: str
    settings: HostSettings
    by_hand: str


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


class _Attempt:
    """One host's way from its settings to an authenticated transport."""

    def __init__(
        self, target: Target, policy: HostKeyPolicy, keyring: Keyring, timeout: float, deadline: float
    ) -> None:
        self._timeout = timeout
        self._deadline = deadline
        self._name = target.name
        self._policy = policy
        self._keyring = keyring
        self._settings = target.settings
        self._by_hand = target.by_hand
        self._where = f"{self._settings.hostname} port {self._settings.port}"

    def connect(self, via: ParamikoConnection | None) -> ParamikoConnection:
        offers = self._keyring.offers(self._name, self._settings)
        stream = self._stream(via)
        transport = ClientTransport(stream, name=f"ssh {self._name}")
        try:
            self._shake_hands(transport, stream)
            self._check_host_key(transport)
            self._authenticate(transport, offers)
            return ParamikoConnection(self._name, transport, stream, self._timeout)
        except (EOFError, OSError, SSHException) as error:
            transport.hang_up()
            raise self._failed(f"{self._where} closed the connection: {_why(transport, error)}") from None
        except BaseException:
            transport.hang_up()
            raise

    def _stream(self, via: ParamikoConnection | None) -> Stream:
        command = self._settings.proxy_command
        if via is not None:
            target = (self._settings.hostname, self._settings.port)
            return via.open_jump(target, host=self._name, timeout=self._remaining())
        if command is None:
            return dial(self._name, self._settings, self._deadline)
        if any(setting.startswith("ProxyUseFdpass") for setting in self._settings.beyond):
            raise HostError("paramiko can't do ProxyUseFdpass", host=self._name, hint=_OPENSSH)
        return start_proxy(self._name, command)

    def _shake_hands(self, transport: ClientTransport, stream: Stream) -> None:
        known = self._keyring.known_hosts.key_types(self._name, self._settings)
        certificates = self._keyring.known_hosts.has_authority(self._name, self._settings)
        security = transport.get_security_options()
        offered = tuple(security.key_types)
        security.key_types = preferred_algorithms(known, offered, certificates=certificates)
        transport.banner_timeout = self._timeout
        done = threading.Event()
        transport.start_client(event=done)
        if not done.wait(self._remaining()):
            missed = (
                "did not finish the SSH handshake"
                if stream.greeting
                else "takes connections but says nothing"
            )
            raise self._late(missed)
        if not transport.is_active():
            raise self._no_handshake(transport, stream)

    def _no_handshake(self, transport: ClientTransport, stream: Stream) -> ConnectFailed:
        error, greeting = transport.get_exception(), stream.greeting
        if not greeting:
            problem = stream.problem()
            if problem is not None and not was_sent_away(problem):
                return self._failed(f"no connection to {self._where}: {problem}")
            cause = problem or f"{self._where} closed the connection before it said anything"
            return SentAway(cause, host=self._name, hint=_TOO_MANY)
        if b"SSH-" not in greeting:
            line = greeting.strip().split(b"\n")[0][:_QUOTED].decode("ascii", "backslashreplace").strip()
            cause = f"{self._where} is no SSH server, or sends us away; it says: {line}"
            if line in _SENT_AWAY:
                return SentAway(cause, host=self._name, hint=_TOO_MANY)
            return self._failed(cause)
        hint = _OPENSSH if isinstance(error, IncompatiblePeer) else None
        return self._failed(f"no SSH handshake with {self._where}: {_why(transport, error)}", hint)

    def _check_host_key(self, transport: ClientTransport) -> None:
        shown = transport.get_remote_server_key()
        certificate = shown.public_blob
        self._keyring.known_hosts.check(
            HostKey(shown.get_name(), shown.asbytes(), certificate.key_blob if certificate else None),
            host=self._name,
            settings=self._settings,
            policy=self._policy,
            by_hand=self._by_hand,
        )

    def _authenticate(self, transport: ClientTransport, offers: Offers) -> None:
        tried: list[str] = []
        methods = ["publickey"]
        for offer in offers.keys:
            try:
                key = offer.load()
            except Locked as locked:
                offers = replace(offers, skipped=(*offers.skipped, str(locked)))
                continue
            tried.append(offer.label)
            done = threading.Event()
            transport.auth_publickey(self._settings.user, key, done)
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
        if not tried:
            methods = self._ask_methods(transport)
        if transport.is_authenticated():
            return
        raise self._denied(f"permission denied ({','.join(methods)})", tried, offers, methods)

    def _ask_methods(self, transport: ClientTransport) -> list[str]:
        """What the host takes from those who have no key; it may even let them in (RFC 4252, section 5.2)."""
        transport.auth_timeout = self._remaining()
        try:
            transport.auth_none(self._settings.user)
        except BadAuthenticationType as error:
            return list(error.allowed_types)
        except AuthenticationException:
            return []
        return []

    def _denied(
        self, cause: str, tried: list[str], offers: Offers, methods: Sequence[str] = ()
    ) -> PermissionDenied:
        noun = "key" if len(tried) == 1 else "keys"
        keys = f"tried {len(tried)} {noun}: {', '.join(tried)}" if tried else "there is no key to try"
        cause = f"{cause} for user {self._settings.user}; " + "; ".join((keys, *offers.skipped))
        beyond = [setting for setting in self._settings.beyond if _may_help(setting, methods)]
        hint = f"{_OPENSSH}, which can do {', '.join(beyond)}" if beyond else self._by_hand
        return PermissionDenied(cause, host=self._name, hint=hint, tried=tried)

    def _remaining(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _late(self, missed: str) -> StartTimeout:
        cause = f"{self._where} {missed} within {self._timeout:g} s"
        return StartTimeout(cause, host=self._name, hint=self._by_hand)

    def _failed(self, cause: str, hint: str | None = None) -> ConnectFailed:
        return ConnectFailed(cause, host=self._name, hint=hint or self._by_hand)


def _may_help(setting: str, methods: Sequence[str]) -> bool:
    """Whether a way to authenticate that only the ssh binary knows is one that the host takes."""
    name = setting.partition(" ")[0]
    return any(method.startswith(_METHODS.get(name, "-")) for method in methods)


def _why(transport: ClientTransport, error: Exception | None) -> str:
    return transport.farewell or str(error or "") or "no reason given"
