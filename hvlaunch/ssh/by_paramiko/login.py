"""The login by paramiko: handshake, check of the host key, and authentication, in this order."""

import shlex
import threading
import time
from collections.abc import Sequence

from paramiko.pkey import PKey
from paramiko.ssh_exception import (
    AuthenticationException,
    BadAuthenticationType,
    IncompatiblePeer,
    PartialAuthentication,
    SSHException,
)

from hvlaunch.errors import ConnectFailed, HostError, PermissionDenied, SentAway, StartTimeout
from hvlaunch.job import HostKeyPolicy
from hvlaunch.ssh import stage
from hvlaunch.ssh.by_paramiko.connection import ParamikoConnection, SSHTransport
from hvlaunch.ssh.complaints import TOO_MANY_KEYS, was_sent_away
from hvlaunch.ssh.config import OPENSSH, LoginTarget, allowed
from hvlaunch.ssh.keyring import Keyring, Locked, Offers
from hvlaunch.ssh.known_hosts import HostKey, preferred_algorithms
from hvlaunch.ssh.streams import Stream

__all__ = ["Login"]

_RSA = ("rsa-sha2-512", "rsa-sha2-256")
_LAST_STEPS = 1.0
"""Seconds that remain for the host if the user enters no passphrase."""
_QUOTED = 80
"""Characters of an unknown greeting that a message quotes."""
_SENT_AWAY = ("Exceeded MaxStartups", "Not allowed at this time")
"""Texts of newer sshd's with too many connections, before they close."""
_TOO_MANY = "a smaller --connect-limit, if its sshd has a small MaxStartups; or its sshd may refuse this machine's address"
_METHODS = {
    "GSSAPIAuthentication": "gssapi",
    "HostbasedAuthentication": "hostbased",
    "PKCS11Provider": "publickey",
}
"""sshd's name of the authentication method for a setting of the ssh binary."""


class Login:
    """Turns an open stream into an authenticated connection, in `timeout` seconds and before `deadline`."""

    def __init__(
        self, target: LoginTarget, policy: HostKeyPolicy, keyring: Keyring, *, timeout: float, deadline: float
    ) -> None:
        self._timeout = timeout
        self._deadline = deadline
        self._name = target.name
        self._policy = policy
        self._keyring = keyring
        self._settings = target.settings
        self._by_hand = target.by_hand
        self._where = f"{self._settings.hostname} port {self._settings.port}"

    def over(self, stream: Stream) -> ParamikoConnection:
        """Do the handshake and authenticate; close the stream on failure. Raises as ParamikoClient.connect()."""
        stage("log in")
        try:
            transport = SSHTransport(stream, name=f"ssh {self._name}")
        except OSError as error:  # closed meanwhile
            stream.close()
            raise self._failed(f"the connection to {self._where} was closed: {error.strerror}") from None
        try:
            offers = self._keyring.offers(self._name, self._settings, self._deadline - _LAST_STEPS)
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

    def _shake_hands(self, transport: SSHTransport, stream: Stream) -> None:
        key_types = self._keyring.known_hosts.key_types(self._settings)
        certificates = self._keyring.known_hosts.has_authority(self._settings)
        self._choose_algorithms(transport, key_types, certificates=certificates)
        transport.banner_timeout = self._timeout
        done = threading.Event()
        transport.start_client(event=done)
        if not done.wait(self._remaining()):
            missed = (
                "did not finish the SSH handshake"
                if stream.greeting
                else "accepts connections but sends no data"
            )
            raise self._late(missed)
        if not transport.is_active():
            raise self._no_handshake(transport, stream)

    def _choose_algorithms(
        self, transport: SSHTransport, key_types: tuple[str, ...], *, certificates: bool
    ) -> None:
        """Offer the algorithms that the ssh configuration allows. Raises HostError if there are none."""
        listed, security = self._settings.algorithms, transport.get_security_options()

        def choose(ours: Sequence[str], keyword: str, words: str | None) -> tuple[str, ...]:
            if chosen := allowed(ours, words):
                return chosen
            cause = f"{keyword} {words} of the ssh configuration: hvlaunch supports none of these"
            raise HostError(cause, host=self._name, hint=OPENSSH)

        security.ciphers = choose(security.ciphers, "Ciphers", listed.ciphers)
        security.digests = choose(security.digests, "MACs", listed.macs)
        security.kex = choose(security.kex, "KexAlgorithms", listed.key_exchanges)
        keys = preferred_algorithms(key_types, tuple(security.key_types), certificates=certificates)
        security.key_types = choose(keys, "HostKeyAlgorithms", listed.host_keys)
        transport.sign_only_with(allowed(transport.preferred_pubkeys, listed.signatures))

    def _may_sign(self, key: PKey) -> bool:
        """Return True if PubkeyAcceptedAlgorithms allows an algorithm of this key."""
        certificate = key.public_blob
        name = certificate.key_type if certificate is not None else key.get_name()
        names = [name.replace("ssh-rsa", new) for new in _RSA] if "rsa" in name else [name]
        return bool(allowed(names, self._settings.algorithms.signatures))

    def _no_handshake(self, transport: SSHTransport, stream: Stream) -> ConnectFailed:
        error, greeting = transport.get_exception(), stream.greeting
        if not greeting:
            problem = stream.problem()
            if problem is not None and not was_sent_away(problem):
                return self._failed(f"no connection to {self._where}: {problem}")
            cause = problem or f"{self._where} closed the connection before it sent anything"
            return SentAway(cause, host=self._name, hint=_TOO_MANY)
        # Not an SSH server; its first line often tells the reason.
        if b"SSH-" not in greeting:
            line = greeting.strip().split(b"\n")[0][:_QUOTED].decode("ascii", "backslashreplace").strip()
            cause = f"{self._where} is not an SSH server, or refuses this machine; it sent: {line}"
            if line in _SENT_AWAY:
                return SentAway(cause, host=self._name, hint=_TOO_MANY)
            return self._failed(cause)
        hint = OPENSSH if isinstance(error, IncompatiblePeer) else None
        return self._failed(f"the SSH handshake with {self._where} failed: {_why(transport, error)}", hint)

    def _check_host_key(self, transport: SSHTransport) -> None:
        shown = transport.get_remote_server_key()
        certificate = shown.public_blob
        self._keyring.known_hosts.check(
            HostKey(shown.get_name(), shown.asbytes(), certificate.key_blob if certificate else None),
            host=self._name,
            settings=self._settings,
            policy=self._policy,
            by_hand=self._by_hand,
        )

    def _authenticate(self, transport: SSHTransport, offers: Offers) -> None:
        tried: list[str] = []
        methods = ["publickey"]
        for offer in offers.keys:
            try:
                key = offer.load()
            # The next key may work without a passphrase.
            except Locked as locked:
                offers = offers._replace(skipped=(*offers.skipped, str(locked)), locked=True)
                continue
            if not self._may_sign(key):
                cause = f"{offer.label}: PubkeyAcceptedAlgorithms of the ssh configuration excludes it"
                offers = offers._replace(skipped=(*offers.skipped, cause))
                continue
            tried.append(offer.label)
            done = threading.Event()
            transport.auth_publickey(self._settings.user, key, done)
            if not done.wait(self._remaining()):
                raise self._late(f"did not answer to the key {offer.label}")
            if transport.is_authenticated():
                return
            error = transport.get_exception()
            # The host accepted the key and requires more; a second key may be what it wants.
            if isinstance(error, PartialAuthentication):
                if "publickey" in error.allowed_types:
                    continue
                wants = ", ".join(error.allowed_types)
                raise self._denied(
                    f"the key {offer.label} was accepted, but the host also requires {wants}", tried, offers
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

    def _ask_methods(self, transport: SSHTransport) -> list[str]:
        """Return the methods that the host offers without a key; it may even log us in (RFC 4252, section 5.2)."""
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
        hint = self._by_hand
        if beyond := [setting for setting in self._settings.beyond if _may_help(setting, methods)]:
            hint = f"{OPENSSH}, which supports {', '.join(beyond)}"
        elif "too many authentication failures" in cause.lower():
            hint = TOO_MANY_KEYS
        elif "publickey" in methods:
            hint = self._let_in(offers, any_tried=bool(tried))
        return PermissionDenied(cause, host=self._name, hint=hint, tried=tried)

    def _let_in(self, offers: Offers, *, any_tried: bool) -> str:
        """Return advice to make the host accept a key."""
        copy = f"`{self._by_hand.replace('ssh', 'ssh-copy-id', 1)}`"
        if offers.exposed is not None:
            return f"chmod 600 {shlex.quote(offers.exposed)}"
        if any_tried:
            return f"{copy}, or use another user or key"
        if offers.locked:
            return '`eval "$(ssh-agent)" && ssh-add FILE`, where FILE is that key'
        return f"`ssh-keygen -t ed25519`, then {copy}"

    def _remaining(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _late(self, missed: str) -> StartTimeout:
        cause = f"{self._where} {missed} within {self._timeout:g} s"
        return StartTimeout(cause, host=self._name, hint=self._by_hand)

    def _failed(self, cause: str, hint: str | None = None) -> ConnectFailed:
        return ConnectFailed(cause, host=self._name, hint=hint or self._by_hand)


def _may_help(setting: str, methods: Sequence[str]) -> bool:
    """Return True if the host offers a method that only the ssh binary supports."""
    name = setting.partition(" ")[0]
    return any(method.startswith(_METHODS.get(name, "-")) for method in methods)


def _why(transport: SSHTransport, error: Exception | None) -> str:
    return transport.farewell or str(error or "") or "no reason given"
