"""The keys to log in with, from agents and files, and the user's passphrases."""

import contextlib
import os
import selectors
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from hvlaunch.errors import HostError
from hvlaunch.ssh.config.settings import HostSettings
from hvlaunch.ssh.connection import stage
from hvlaunch.ssh.trust.known_hosts import KnownHosts

if TYPE_CHECKING:
    from paramiko.pkey import PKey, PublicBlob

    from hvlaunch.ssh.paramiko_private import AgentClient
    from hvlaunch.ssh.trust.identity import Identity, UserCertificate

__all__ = ["Asker", "Keyring", "Locked", "Offer", "Offers", "Terminal"]

_LONGEST = 1024
_CLEAR_TO_END = "\x1b[K"


class Terminal:
    """The terminal at `path`, asked by one thread at a time. Closing it ends a question that is still open."""

    def __init__(self, path: str = "/dev/tty") -> None:
        self._path = path
        self._turn = threading.Lock()
        self._closing = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()

    def is_there(self) -> bool:
        """Whether there is someone to ask: a terminal, of which this job is in the foreground."""
        try:
            fd = self._open()
        except OSError:
            return False
        try:
            return os.tcgetpgrp(fd) == os.getpgrp()
        except OSError:
            return False
        finally:
            os.close(fd)

    def ask(self, question: str, deadline: float | None = None) -> bytes | None:
        """The answer, which is not shown while it is typed; None where there is none.

        Raises TimeoutError where none has come by `deadline`, as time.monotonic() counts.
        """
        with self._turn:
            try:
                fd = self._open()
            except OSError:
                return None
            try:
                return self._ask(fd, question, deadline)
            except TimeoutError:
                raise
            except (OSError, termios.error):
                return None
            finally:
                os.close(fd)

    def close(self) -> None:
        """Leave the terminal as it was. May be repeated."""
        with self._closing:
            if self._wake_write >= 0:
                os.close(self._wake_write)
                self._wake_write = -1
                with self._turn:
                    os.close(self._wake_read)

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)

    def _ask(self, fd: int, question: str, deadline: float | None) -> bytes | None:
        before = termios.tcgetattr(fd)
        silent = [*before]
        silent[3] = before[3] & ~termios.ECHO
        # Ctrl-Z would let the shell show what is typed after `fg`.
        silent[6] = [*before[6]]
        silent[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(fd, termios.TCSAFLUSH, silent)
        try:
            # A line of its own, whatever was on it: the console redraws the row that the cursor is in.
            rest = "" if os.environ.get("TERM", "dumb") == "dumb" else _CLEAR_TO_END
            os.write(fd, f"{question}{rest}\n".encode())
            return self._line(fd, deadline)
        finally:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(fd, termios.TCSADRAIN, before)

    def _line(self, fd: int, deadline: float | None) -> bytes | None:
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            ready = selector.select(patience)
        if not ready:
            termios.tcflush(fd, termios.TCIFLUSH)  # the shell must not get the half of it
            raise TimeoutError
        if any(key.fd == self._wake_read for key, _ in ready):
            return None
        line = os.read(fd, _LONGEST)
        return line.rstrip(b"\r\n") if line else None


_PASSPHRASES = 3
"""How often the user is asked for one key."""


class Asker(Protocol):
    """Who is asked for passphrases: hvlaunch.ssh.trust.keyring.Terminal."""

    def is_there(self) -> bool: ...

    def ask(self, question: str, deadline: float | None = None) -> bytes | None: ...

    def close(self) -> None: ...


class Locked(Exception):
    """An encrypted key that stays so; the text says why."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A key that we can sign with. `label` names it in messages."""

    label: str
    load: "Callable[[], PKey]"
    """Gives the key; asks the user first where it is encrypted. Raises Locked."""


@dataclass(frozen=True, slots=True)
class Offers:
    """The keys to try with a host, in order, and a few words on each that can't be tried."""

    keys: tuple[Offer, ...]
    skipped: tuple[str, ...]
    locked: bool = False
    """Whether one that can't be tried is encrypted."""
    exposed: str | None = None
    """One that is not tried because others can read its file."""


@dataclass(slots=True)
class _Sorted:
    """Offers while they are found: those to try first, those to try last, and why there are no others."""

    first: list[Offer] = field(default_factory=list)
    last: list[Offer] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    locked: bool = False
    exposed: str | None = None


class Keyring:
    """Identity files, ssh agents and known_hosts files: each is read once, however many hosts ask.

    A passphrase, too, is asked for once. Thread-safe; one is shared by all hosts of a job.
    """

    def __init__(self, asker: Asker | None = None) -> None:
        self.known_hosts = KnownHosts()
        self._asker = asker or Terminal()
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._identities: dict[str, Identity] = {}
        self._certificates: dict[str, UserCertificate | None] = {}
        self._opened: dict[str, Identity] = {}
        self._agents: dict[str, AgentClient | None] = {}

    def offers(self, host: str, settings: HostSettings, deadline: float | None = None) -> Offers:
        """Our keys: those that were asked for or that an agent holds for an identity file, then other ones.

        A key that has a certificate comes twice, with the certificate first. `host` is for messages,
        `deadline` (of time.monotonic()) for those who are asked for a passphrase.
        Raises HostError where the identity asked for is missing or can't be read.
        """
        with self._lock:
            identities = [self._identity(path) for path in settings.identity_files]
            beside = [f"{identity.path}-cert.pub" for identity in identities if not identity.missing]
            paths = dict.fromkeys((*settings.certificate_files, *beside))
            certificates = [certificate for path in paths if (certificate := self._certificate(path))]
            agent = self._agent(settings.identity_agent)
        held = {key.blob: key for key in agent.get_keys()} if agent else {}
        found = _Sorted()
        if settings.identity_agent is not None and agent is None:
            found.skipped.append(f"no ssh agent answers at {settings.identity_agent}")
        for identity in identities:
            asked_for = identity.path == settings.identity
            if identity.public is not None and identity.public in held:
                key = held.pop(identity.public)
                found.first += _ready(f"{key.comment} (agent)", key, certificates)
            elif identity.key is not None:
                offers = _ready(identity.path, identity.key, certificates)
                (found.first if asked_for else found.last).extend(offers)
            elif asked_for and not identity.encrypted:
                cause = f"the private key {identity.path} can't be used: {identity.problem}"
                private = identity.path.removesuffix(".pub")
                hint = f"ssh-keygen -y -f {private}" if private == identity.path else f"-i {private}"
                if identity.exposed:
                    hint = f"chmod 600 {identity.path}"
                raise HostError(cause, host=host, hint=hint)
            elif identity.encrypted and self._asker.is_there():
                locked = self._locked(identity, certificates, deadline)
                (found.first if asked_for else found.last).extend(locked)
            elif not identity.missing:
                no_one = ", and there is no terminal to ask for its passphrase" if identity.encrypted else ""
                found.skipped.append(f"{identity.path}: {identity.problem}{no_one}")
                found.locked = found.locked or identity.encrypted
                if identity.exposed:
                    found.exposed = identity.path
        others: list[Offer] = []
        if not settings.identities_only:
            for key in held.values():
                others += _ready(f"{key.comment} (agent)", key, certificates)
        return Offers((*found.first, *others, *found.last), tuple(found.skipped), found.locked, found.exposed)

    def close(self) -> None:
        """Hang up on the ssh agents, ask no more; may be repeated."""
        self._asker.close()
        with self._lock:
            for agent in self._agents.values():
                if agent is not None:
                    agent.close()
            self._agents.clear()

    def _locked(
        self, identity: "Identity", certificates: "Iterable[UserCertificate]", deadline: float | None
    ) -> Iterator[Offer]:
        """Offers of an encrypted key; the user is asked when a host has refused all that came before."""
        from hvlaunch.ssh.trust.identity import certified  # noqa: PLC0415  (paramiko)

        def load(blob: "PublicBlob") -> "PKey":
            return certified(self._open(identity.path, deadline), blob)

        for certificate in certificates:
            if certificate.public == identity.public:
                yield Offer(certificate.path, partial(load, certificate.blob))
        yield Offer(identity.path, lambda: self._open(identity.path, deadline))

    def _open(self, path: str, deadline: float | None) -> "PKey":
        """The key in an encrypted file, with the help of the user. Raises Locked."""
        from hvlaunch.ssh.trust.identity import read_identity  # noqa: PLC0415  (paramiko)

        with self._asking:
            if path not in self._opened:
                identity = self._identities[path]
                question = f"Enter passphrase for key '{path}': "
                for _ in range(_PASSPHRASES):
                    try:
                        stage("passphrase")
                        passphrase = self._asker.ask(question, deadline)
                        stage("log in")
                    except TimeoutError:
                        identity = replace(
                            identity, problem="it is encrypted, and no passphrase was entered in time"
                        )
                        break
                    if not passphrase:
                        break
                    identity = read_identity(path, passphrase)
                    question = f"Wrong passphrase. Enter passphrase for key '{path}': "
                    if identity.key is not None:
                        break
                self._opened[path] = identity
            opened = self._opened[path]
        if opened.key is None:
            raise Locked(f"{path}: {opened.problem}")
        return opened.key

    def _identity(self, path: str) -> "Identity":
        from hvlaunch.ssh.trust.identity import read_identity  # noqa: PLC0415  (paramiko)

        if path not in self._identities:
            self._identities[path] = read_identity(path)
        return self._identities[path]

    def _certificate(self, path: str) -> "UserCertificate | None":
        from hvlaunch.ssh.trust.identity import read_certificate  # noqa: PLC0415  (paramiko)

        if path not in self._certificates:
            self._certificates[path] = read_certificate(path)
        return self._certificates[path]

    def _agent(self, path: str | None) -> "AgentClient | None":
        from paramiko.ssh_exception import SSHException  # noqa: PLC0415  (100 ms)

        from hvlaunch.ssh.paramiko_private import AgentClient  # noqa: PLC0415  (paramiko)

        if path is not None and path not in self._agents:
            try:
                self._agents[path] = AgentClient(path)
            except (OSError, SSHException):
                self._agents[path] = None
        return None if path is None else self._agents[path]


def _ready(label: str, key: "PKey", certificates: "Iterable[UserCertificate]") -> list[Offer]:
    """Offers of a key that needs no passphrase: with each of its certificates, then bare."""
    from hvlaunch.ssh.trust.identity import certified  # noqa: PLC0415  (paramiko)

    shown = [certificate for certificate in certificates if certificate.public == key.asbytes()]
    offers = [Offer(certificate.path, partial(certified, key, certificate.blob)) for certificate in shown]
    return [*offers, Offer(label, lambda: key)]
