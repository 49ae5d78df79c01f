"""known_hosts files: is the host the one that it was?

The format and the rules are OpenSSH's: sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT", and ssh(1).
"""

import base64
import binascii
import fcntl
import hashlib
import hmac
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hvlaunch.errors import HostError, HostKeyChanged, HostKeyRevoked, HostKeyUnknown
from hvlaunch.job import HostKeyPolicy
from hvlaunch.ssh.settings import HostSettings

__all__ = ["HostKey", "KnownHosts", "preferred_algorithms"]

_RSA_ALGORITHMS = ("rsa-sha2-512", "rsa-sha2-256")


@dataclass(frozen=True, slots=True)
class HostKey:
    """A public key: its type as in `ssh-ed25519`, and its bytes as they go over the wire."""

    type: str
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """`SHA256:…`, as ssh-keygen -l prints it."""
        digest = hashlib.sha256(self.blob).digest()
        return "SHA256:" + base64.b64encode(digest).decode("ascii").rstrip("=")


@dataclass(frozen=True, slots=True)
class _Entry:
    key: HostKey
    revoked: bool
    path: str
    line: int


@dataclass(slots=True)
class _File:
    lines: int = 0
    exact: dict[str, list[_Entry]] = field(default_factory=dict)
    hashed: list[tuple[bytes, bytes, _Entry]] = field(default_factory=list)
    """Salt, HMAC of the name, entry."""
    patterns: list[tuple[list[re.Pattern[str]], list[re.Pattern[str]], _Entry]] = field(default_factory=list)
    """Patterns of which one must match, patterns of which none may match, entry."""

    def add(self, names: str, entry: _Entry) -> None:
        if names.startswith("|1|"):
            try:
                salt, digest = (base64.b64decode(part) for part in names[3:].split("|"))
            except (ValueError, binascii.Error):
                return
            self.hashed.append((salt, digest, entry))
            return
        words = [word for word in names.lower().split(",") if word]
        if not any(c in names for c in "*?!"):
            for word in words:
                self.exact.setdefault(word, []).append(entry)
            return
        wanted = [_pattern(word) for word in words if not word.startswith("!")]
        unwanted = [_pattern(word[1:]) for word in words if word.startswith("!")]
        self.patterns.append((wanted, unwanted, entry))

    def find(self, name: str) -> Iterator[_Entry]:
        yield from self.exact.get(name, ())
        for salt, digest, entry in self.hashed:
            if hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest):
                yield entry
        for wanted, unwanted, entry in self.patterns:
            if any(p.fullmatch(name) for p in wanted) and not any(p.fullmatch(name) for p in unwanted):
                yield entry


def preferred_algorithms(known: tuple[str, ...], offered: tuple[str, ...]) -> tuple[str, ...]:
    """Put the signature algorithms for host keys of the `known` types first, as OpenSSH does.

    So a host that has several keys, of which we know one, shows that one.
    """
    first = {
        name for key_type in known for name in (_RSA_ALGORITHMS if key_type == "ssh-rsa" else (key_type,))
    }
    return tuple(sorted(offered, key=lambda name: name not in first))


class KnownHosts:
    """The known_hosts files of a job: each is read once, whichever and however many hosts ask. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}

    def key_types(self, host: str, settings: HostSettings) -> tuple[str, ...]:
        """The types of the keys that are known for the host. `host` is for messages; raises HostError as `check`."""
        with self._lock:
            named, plain = self._find(host, settings)
        return tuple(dict.fromkeys(entry.key.type for entry in named or plain if not entry.revoked))

    def check(
        self, key: HostKey, *, host: str, settings: HostSettings, policy: HostKeyPolicy, by_hand: str
    ) -> None:
        """Accept `key` as the host's, or not; a new one is recorded where `policy` is accept-new.

        `host` is for messages, `by_hand` is the ssh command that would ask the user.
        Raises HostKeyUnknown, HostKeyChanged, HostKeyRevoked, and HostError where a file can't be read or written.
        """
        with self._lock:
            named, plain = self._find(host, settings)
            same = [entry for entry in (*named, *plain) if entry.key == key]
            revoked = next((entry for entry in same if entry.revoked), None)
            if revoked is not None:
                raise _revoked(key, host, revoked)
            if policy == "off" or same:
                return
            known = next((entry for entry in named if not entry.revoked), None)
            if known is not None:
                raise _changed(key, host, settings, known)
            if policy == "strict":
                raise _unknown(key, host, settings, by_hand)
            if settings.user_known_hosts_files:
                self._record(key, host, settings)

    def _find(self, host: str, settings: HostSettings) -> tuple[list[_Entry], list[_Entry]]:
        """Entries for the host's name with its port, and for the bare name where that is another.

        As in OpenSSH, a key that is known for the bare name will do, but a different one proves nothing.
        """
        files = [self._file(path, host) for path in settings.known_hosts_files]
        name = settings.host_key_name.lower()
        bare = (settings.host_key_alias or settings.hostname).lower()
        named = [entry for file in files for entry in file.find(name)]
        return named, [] if bare == name else [entry for file in files for entry in file.find(bare)]

    def _file(self, path: str, host: str) -> _File:
        if path not in self._files:
            try:
                self._files[path] = _read(path)
            except OSError as error:
                raise HostError(f"{path} can't be read: {error.strerror}", host=host) from None
        return self._files[path]

    def _record(self, key: HostKey, host: str, settings: HostSettings) -> None:
        path = settings.user_known_hosts_files[0]
        name = settings.host_key_name.lower()
        shown = _hashed(name) if settings.hash_known_hosts else name
        try:
            _append(path, f"{shown} {key.type} {base64.b64encode(key.blob).decode('ascii')}\n")
        except OSError as error:
            cause = f"its host key can't be recorded in {path}: {error.strerror}"
            raise HostError(
                cause, host=host, hint="another UserKnownHostsFile in the ssh configuration"
            ) from None
        file = self._file(path, host)
        file.lines += 1
        file.add(shown, _Entry(key, revoked=False, path=path, line=file.lines))


def _pattern(word: str) -> re.Pattern[str]:
    return re.compile(re.escape(word).replace(r"\*", ".*").replace(r"\?", "."))


def _read(path: str) -> _File:
    file = _File()
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return file
    for line in text.split("\n"):
        file.lines += 1
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else None
        if len(words) < 3 or words[0].startswith("#") or marker not in (None, "@revoked"):  # noqa: PLR2004  (names, type, key)
            continue
        try:
            key = HostKey(words[1], base64.b64decode(words[2], validate=True))
        except binascii.Error:
            continue
        file.add(words[0], _Entry(key, marker is not None, path, file.lines))
    return file


def _append(path: str, line: str) -> None:
    """Add a line; a lock keeps other processes' lines whole, and an unfinished last line is finished first."""
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with open(fd, "r+b", buffering=0) as file:  # noqa: PTH123  (a descriptor, no path)
        fcntl.flock(file, fcntl.LOCK_EX)
        size = os.fstat(fd).st_size
        unfinished = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        file.write((b"\n" if unfinished else b"") + line.encode())


def _hashed(name: str) -> str:
    salt = os.urandom(hashlib.sha1(usedforsecurity=False).digest_size)
    digest = hmac.digest(salt, name.encode(), "sha1")
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def _unknown(key: HostKey, host: str, settings: HostSettings, by_hand: str) -> HostKeyUnknown:
    files = ", ".join(settings.known_hosts_files) or "no file"
    cause = (
        f"its host key is not known: {key.type} {key.fingerprint}"
        f" (looked for {settings.host_key_name} in {files})"
    )
    kind = key.type.removeprefix("ssh-").partition("-")[0]
    hint = (
        f"`ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub` on the host to compare,"
        f" then `{by_hand}` once here; or --host-keys accept-new"
    )
    return HostKeyUnknown(cause, host=host, hint=hint, key_type=key.type, fingerprint=key.fingerprint)


def _changed(key: HostKey, host: str, settings: HostSettings, known: _Entry) -> HostKeyChanged:
    cause = (
        f"its host key {key.type} {key.fingerprint} is not the one in {known.path}:{known.line}"
        f" ({known.key.type} {known.key.fingerprint}): the host was reinstalled, or another machine answers for it"
    )
    hint = f"if it was reinstalled, `ssh-keygen -f {known.path} -R '{settings.host_key_name}'`"
    return HostKeyChanged(cause, host=host, hint=hint, key_type=key.type, fingerprint=key.fingerprint)


def _revoked(key: HostKey, host: str, entry: _Entry) -> HostKeyRevoked:
    cause = f"its host key {key.type} {key.fingerprint} is marked @revoked in {entry.path}:{entry.line}"
    hint = "a new host key for the host (ssh-keygen -A there), or ask who revoked this one"
    return HostKeyRevoked(cause, host=host, hint=hint, key_type=key.type, fingerprint=key.fingerprint)
