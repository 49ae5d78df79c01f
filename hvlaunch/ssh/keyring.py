"""The keys for logins, from agents and files, and the user's passphrases."""

import contextlib
import os
import selectors
import shlex
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Protocol

from hvlaunch.errors import HostError
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.ssh import stage
from hvlaunch.ssh.config import HostSettings
from hvlaunch.ssh.known_hosts import KnownHosts

if TYPE_CHECKING:
    from paramiko.pkey import PKey, PublicBlob

    from hvlaunch.ssh.identity import Identity, UserCertificate
    from hvlaunch.ssh.paramiko_private import AgentClient

__all__ = ["Asker", "Keyring", "Locked", "Offer", "Offers", "Terminal"]


_LONGEST = 1024
_CLEAR_TO_END = "\x1b[K"


class Terminal:
    """The terminal at `path`; one thread asks at a time. close() ends an open question."""

    def __init__(self, path: str = "/dev/tty") -> None:
        self._path = path
        self._turn = threading.Lock()
        self._closing = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()

    def is_there(self) -> bool:
        """Return True if a user can answer: there is a terminal, and this job is in its foreground."""
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
        """Return the user's answer, typed without echo, or None.

        Raises TimeoutError without an answer by `deadline`, in time.monotonic().
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
        """Restore the terminal. May be repeated."""
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
        # As getpass does; canonical mode stays, so that the user can edit the line.
        silent[3] = before[3] & ~termios.ECHO
        # After Ctrl-Z and `fg` the shell would have turned the echo on.
        silent[6] = [*before[6]]
        silent[6][termios.VSUSP] = b"\0"
        # TCSAFLUSH drops what was typed before the question: it was not meant as a passphrase.
        termios.tcsetattr(fd, termios.TCSAFLUSH, silent)
        try:
            # The question ends with a newline, because the console redraws the row of the cursor.
            clear = "" if os.environ.get("TERM", "dumb") == "dumb" else _CLEAR_TO_END
            os.write(fd, f"{question}{clear}\n".encode())
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
            # The shell must not receive half a passphrase.
            termios.tcflush(fd, termios.TCIFLUSH)
            raise TimeoutError
        if any(key.fd == self._wake_read for key, _ in ready):
            return None
        line = os.read(fd, _LONGEST)
        return line.rstrip(b"\r\n") if line else None


_PASSPHRASES = 3
"""Attempts per key."""


class Asker(Protocol):
    """The interface to ask for passphrases; Terminal implements it."""

    def is_there(self) -> bool: ...

    def ask(self, question: str, deadline: float | None = None) -> bytes | None: ...

    def close(self) -> None: ...


class Locked(Exception):
    """A key that stays encrypted; the text says why."""


class Offer(NamedTuple):
    """A key for authentication. `label` names it in messages."""

    label: str
    load: "Callable[[], PKey]"
    """Returns the key; asks the user first if it is encrypted. Raises Locked."""


class Offers(NamedTuple):
    """The keys to try with a host, in order, and the reasons why others are skipped."""

    keys: tuple[Offer, ...]
    skipped: tuple[str, ...]
    locked: bool = False
    """True if a skipped key is encrypted."""
    exposed: str | None = None
    """File of a key that is skipped because other users can read it."""


class _Sorted:
    """Offers while they are collected: first and last keys, and reasons for skipped ones."""

    def __init__(self) -> None:
        self.first: list[Offer] = []
        self.last: list[Offer] = []
        self.skipped: list[str] = []
        self.locked = False
        self.exposed: str | None = None


class Keyring:
    """Identity files, ssh agents and known_hosts files; each is read once for all hosts of a job.

    Each passphrase is asked for once, too. Thread-safe.
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
        """Return the user's keys: keys asked for, keys of identity files that an agent holds, then the others.

        A key with a certificate is offered twice, with the certificate first. `host` is for messages;
        `deadline`, in time.monotonic(), limits questions. Raises HostError if the requested identity is missing
        or unreadable.
        """
        with self._lock:
            identities = [self._identity(path) for path in settings.identity_files]
            beside = [f"{identity.path}-cert.pub" for identity in identities if not identity.missing]
            paths = dict.fromkeys((*settings.certificate_files, *beside))
            certificates = [certificate for path in paths if (certificate := self._certificate(path))]
            agent = self._agent(settings.identity_agent)
        held = {key.blob: key for key in agent.get_keys()} if agent else {}
        collected = _Sorted()
        if settings.identity_agent is not None and agent is None:
            collected.skipped.append(f"no ssh agent answers at {settings.identity_agent}")
        for identity in identities:
            asked_for = identity.path == settings.identity
            if identity.public is not None and identity.public in held:
                key = held.pop(identity.public)
                collected.first += _ready(f"{key.comment} (agent)", key, certificates)
            elif identity.key is not None:
                offers = _ready(identity.path, identity.key, certificates)
                (collected.first if asked_for else collected.last).extend(offers)
            elif asked_for and not identity.encrypted:
                cause = f"the private key {identity.path} can't be used: {identity.problem}"
                private = identity.path.removesuffix(".pub")
                way = "ssh-keygen -y -f" if private == identity.path else "-i"
                hint = f"{way} {shlex.quote(private)}"
                if identity.exposed:
                    hint = f"chmod 600 {shlex.quote(identity.path)}"
                raise HostError(cause, host=host, hint=hint)
            elif identity.encrypted and self._asker.is_there():
                locked = self._locked(identity, certificates, deadline)
                (collected.first if asked_for else collected.last).extend(locked)
            elif not identity.missing:
                no_one = ", and there is no terminal to ask for its passphrase" if identity.encrypted else ""
                collected.skipped.append(f"{identity.path}: {identity.problem}{no_one}")
                collected.locked = collected.locked or identity.encrypted
                if identity.exposed:
                    collected.exposed = identity.path
        others: list[Offer] = []
        if not settings.identities_only:
            for key in held.values():
                others += _ready(f"{key.comment} (agent)", key, certificates)
        return Offers(
            (*collected.first, *others, *collected.last),
            tuple(collected.skipped),
            collected.locked,
            collected.exposed,
        )

    def close(self) -> None:
        """Disconnect from the ssh agents and ask nothing more; may be repeated."""
        self._asker.close()
        with self._lock:
            for agent in self._agents.values():
                if agent is not None:
                    agent.close()
            self._agents.clear()

    def _locked(
        self, identity: "Identity", certificates: "Iterable[UserCertificate]", deadline: float | None
    ) -> Iterator[Offer]:
        """Yield offers of an encrypted key; the user is asked only if the host refused all keys before it."""
        from hvlaunch.ssh.identity import certified  # noqa: PLC0415  (paramiko)

        def load(blob: "PublicBlob") -> "PKey":
            return certified(self._open(identity.path, deadline), blob)

        for certificate in certificates:
            if certificate.public == identity.public:
                yield Offer(certificate.path, partial(load, certificate.blob))
        yield Offer(identity.path, lambda: self._open(identity.path, deadline))

    def _open(self, path: str, deadline: float | None) -> "PKey":
        """Return the key of an encrypted file, with the user's passphrase. Raises Locked."""
        from hvlaunch.ssh.identity import read_identity  # noqa: PLC0415  (paramiko)

        with self._asking:
            # Other hosts waited here for the same key, and need no second question.
            if path not in self._opened:
                identity = self._identities[path]
                question = f"Enter passphrase for key '{path}': "
                for _ in range(_PASSPHRASES):
                    try:
                        stage("passphrase")
                        passphrase = self._asker.ask(question, deadline)
                        stage("log in")
                    except TimeoutError:
                        identity = identity._replace(
                            problem="it is encrypted, and no passphrase was entered in time"
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
        from hvlaunch.ssh.identity import read_identity  # noqa: PLC0415  (paramiko)

        if path not in self._identities:
            self._identities[path] = read_identity(path)
        return self._identities[path]

    def _certificate(self, path: str) -> "UserCertificate | None":
        from hvlaunch.ssh.identity import read_certificate  # noqa: PLC0415  (paramiko)

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
    """Return offers of a key without a passphrase: with each of its certificates, then bare."""
    from hvlaunch.ssh.identity import certified  # noqa: PLC0415  (paramiko)

    shown = [certificate for certificate in certificates if certificate.public == key.asbytes()]
    offers = [Offer(certificate.path, partial(certified, key, certificate.blob)) for certificate in shown]
    return [*offers, Offer(label, lambda: key)]
