"""known_hosts files and certificates of hosts, to check that a host is the same as before.

The format and the rules are OpenSSH's: sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT", ssh(1), and in its sources PROTOCOL.certkeys and
sshkey_cert_check_host(). cryptography reads certificates and checks their signatures.
"""

import base64
import binascii
import fcntl
import fnmatch
import hashlib
import hmac
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvlaunch.errors import HostError, HostKeyChanged, HostKeyRevoked, HostKeyUnknown
from hvlaunch.job import HostKeyPolicy
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.owners import make_own_directory
from hvlaunch.ssh.config import OPENSSH, HostSettings

__all__ = [
    "CERTIFICATE",
    "BadHostCertificate",
    "HostCertificate",
    "HostKey",
    "KnownHosts",
    "preferred_algorithms",
    "read_certificate",
]


CERTIFICATE = "-cert-v01@openssh.com"
"""The end of a certificate's type; the type of its key comes before it."""

_FOREVER = (1 << 64) - 1
_STRONG_RSA = (b"rsa-sha2-256", b"rsa-sha2-512")
_LENGTH_BYTES = 4


class BadHostCertificate(Exception):
    """The certificate can't be read, or its authority's signature is wrong."""


class HostCertificate(NamedTuple):
    """A certificate with a valid signature. The caller decides whether to trust the authority."""

    authority: bytes
    """The authority's public key in wire format."""
    is_for_host: bool
    """False for a user's certificate."""
    principals: tuple[str, ...]
    """Valid host names, possibly with * and ?. An empty tuple allows any name."""
    valid_after: int
    """Seconds since 1970."""
    valid_before: int
    has_critical_options: bool
    """A reader must refuse a critical option that it does not know, and none is defined for hosts."""

    def problem(self, name: str, now: float) -> str | None:
        """Return why the certificate is not valid for the host `name` at the time `now`, or None if it is."""
        if not self.is_for_host:
            return "it is not a certificate for a host"
        if now < self.valid_after:
            return "it is not valid yet (is this machine's clock right?)"
        if self.valid_before != _FOREVER and now >= self.valid_before:
            return "it has expired"
        if self.principals and not any(_matches(name, pattern) for pattern in self.principals):
            return f"it is for {', '.join(self.principals)}, not for {name}"
        if self.has_critical_options:
            return "it has critical options, and none is defined for host certificates"
        return None


def read_certificate(blob: bytes) -> HostCertificate:
    """Parse the certificate in `blob` and verify its signature. Raises BadHostCertificate."""
    # cryptography takes as long to import as a local job takes to start, and only SSH to other hosts needs it.
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm  # noqa: PLC0415
    from cryptography.hazmat.primitives import serialization as ssh  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey  # noqa: PLC0415

    key_type = blob[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(blob[:_LENGTH_BYTES], "big")]
    try:
        certificate = ssh.load_ssh_public_identity(key_type + b" " + base64.b64encode(blob))
        if not isinstance(certificate, ssh.SSHCertificate):
            raise BadHostCertificate("it is a key, not a certificate")
        authority = certificate.signature_key()
        # An RSA signature is as long as the modulus, and its algorithm stands before its length. OpenSSH refuses
        # SHA-1 ("ssh-rsa"); cryptography accepts it and has no public name for the algorithm.
        if isinstance(authority, RSAPublicKey):
            signature_size = (authority.key_size + 7) // 8
            if not blob[: -(_LENGTH_BYTES + signature_size)].endswith(_STRONG_RSA):
                raise BadHostCertificate("it is signed by ssh-rsa, which is too weak")
        certificate.verify_cert_signature()
    except InvalidSignature:
        raise BadHostCertificate("its authority's signature is wrong") from None
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadHostCertificate(f"it can't be read: {error}") from None
    encoded = authority.public_bytes(ssh.Encoding.OpenSSH, ssh.PublicFormat.OpenSSH)
    return HostCertificate(
        authority=base64.b64decode(encoded.split()[1]),
        is_for_host=certificate.type is ssh.SSHCertificateType.HOST,
        principals=tuple(name.decode("utf-8", "backslashreplace") for name in certificate.valid_principals),
        valid_after=certificate.valid_after,
        valid_before=certificate.valid_before,
        has_critical_options=bool(certificate.critical_options),
    )


def _matches(name: str, pattern: str) -> bool:
    # Only * and ? are special in OpenSSH's patterns.
    literal = pattern.replace("[", "[[]")
    return re.match(fnmatch.translate(literal), name) is not None


_RSA_ALGORITHMS = ("rsa-sha2-512", "rsa-sha2-256")
_REVOKED = "@revoked"
_AUTHORITY = "@cert-authority"
_KRL = b"SSHKRL\n\0"
"""First bytes of a binary list of revoked keys; PROTOCOL.krl in OpenSSH's sources."""
_OTHER_SOURCES = ("KnownHostsCommand", "VerifyHostKeyDNS")
"""Settings of the ssh binary that may know a host's key."""


@dataclass(frozen=True, slots=True)
class HostKey:
    """A public key: its type, such as `ssh-ed25519`, and its wire format."""

    type: str
    blob: bytes
    certificate: bytes | None = field(default=None, compare=False)
    """The certificate that the host showed with the key, if any."""

    @property
    def fingerprint(self) -> str:
        """`SHA256:…`, as ssh-keygen -l prints it."""
        digest = hashlib.sha256(self.blob).digest()
        return "SHA256:" + base64.b64encode(digest).decode("ascii").rstrip("=")


class _Entry(NamedTuple):
    key: HostKey
    marker: str | None
    path: str
    line: int

    @property
    def is_plain(self) -> bool:
        """True if the entry says that this is the host's own key."""
        return self.marker is None


class _File:
    def __init__(self) -> None:
        self.lines = 0
        self.exact: dict[str, list[_Entry]] = {}
        self.hashed: list[tuple[bytes, bytes, _Entry]] = []
        """Salt, HMAC of the name, entry."""
        self.patterns: list[tuple[list[re.Pattern[str]], list[re.Pattern[str]], _Entry]] = []
        """Patterns to match (at least one), patterns not to match, entry."""

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
        included = [_pattern(word) for word in words if not word.startswith("!")]
        excluded = [_pattern(word[1:]) for word in words if word.startswith("!")]
        self.patterns.append((included, excluded, entry))

    def find(self, name: str) -> Iterator[_Entry]:
        yield from self.exact.get(name, ())
        for salt, digest, entry in self.hashed:
            # Hashed entries hide names, so each must be tried.
            if hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest):
                yield entry
        for included, excluded, entry in self.patterns:
            if any(p.fullmatch(name) for p in included) and not any(p.fullmatch(name) for p in excluded):
                yield entry


def preferred_algorithms(
    key_types: tuple[str, ...], offered: tuple[str, ...], *, certificates: bool = False
) -> tuple[str, ...]:
    """Put the signature algorithms for host keys of `key_types` first, as OpenSSH does.

    A host with several keys then shows the key that we know, or its certificate if we know an authority for it.
    """
    first = {
        name for key_type in key_types for name in (_RSA_ALGORITHMS if key_type == "ssh-rsa" else (key_type,))
    }
    ordered = tuple(sorted(offered, key=lambda name: name not in first))
    return (*(name + CERTIFICATE for name in offered), *ordered) if certificates else ordered


class KnownHosts:
    """The known_hosts files of a job; each is read once for all hosts. Thread-safe."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}
        self._revoked: dict[str, frozenset[bytes]] = {}

    def key_types(self, settings: HostSettings) -> tuple[str, ...]:
        """Return the types of the known keys of the host."""
        with self._lock:
            named, plain = self._find(settings)
        listed = [entry for entry in named if entry.is_plain] or plain
        return tuple(dict.fromkeys(entry.key.type for entry in listed if entry.is_plain))

    def has_authority(self, settings: HostSettings) -> bool:
        """Return True if a known authority may vouch for the host."""
        with self._lock:
            named, plain = self._find(settings)
        return any(entry.marker == _AUTHORITY for entry in (*named, *plain))

    def check(
        self, key: HostKey, *, host: str, settings: HostSettings, policy: HostKeyPolicy, by_hand: str
    ) -> None:
        """Accept `key` as the host's or raise an error; with the policy accept-new, record an unknown key.

        `host` is for messages, and `by_hand` is the ssh command that would ask the user. Raises HostKeyUnknown,
        HostKeyChanged, HostKeyRevoked, and HostError if a RevokedHostKeys file is unreadable, or a new key
        can't be recorded.
        """
        with self._lock:
            named, plain = self._find(settings)
            certificate, problem = _certificate(key)
            same = [entry for entry in (*named, *plain) if entry.key == key]
            vouching = [
                entry for entry in (*named, *plain) if certificate and entry.key.blob == certificate.authority
            ]
            # Revocation comes first: it holds even if another entry or an authority accepts the key.
            revoked = next((entry for entry in (*same, *vouching) if entry.marker == _REVOKED), None)
            if revoked is not None:
                raise _revoked(key, host, f"marked @revoked in {revoked.path}:{revoked.line}")
            if settings.revoked_host_keys is not None:
                listed = self._revoked_in(settings.revoked_host_keys, host)
                if key.blob in listed or (certificate is not None and certificate.authority in listed):
                    raise _revoked(key, host, f"in {settings.revoked_host_keys} (RevokedHostKeys)")
            # A plain entry with this key suffices, whatever other entries say.
            if policy == "off" or any(entry.is_plain for entry in same):
                return
            if certificate is not None and any(entry.marker == _AUTHORITY for entry in vouching):
                problem = certificate.problem(_certified_name(settings), self._now())
                if problem is not None and settings.given_name is not None:
                    named_problem = certificate.problem(settings.given_name.lower(), self._now())
                    problem = problem if named_problem is not None else None
                if problem is None:
                    return
            if problem is not None:
                raise _not_certified(key, host, problem)
            # Only a plain entry of the exact name proves that the key has changed.
            own_entry = next((entry for entry in named if entry.is_plain), None)
            if own_entry is not None:
                raise _changed(key, host, settings, own_entry)
            if policy == "strict":
                raise _unknown(key, host, settings, by_hand)
            if settings.user_known_hosts_files:
                self._record(key, host, settings)

    def _find(self, settings: HostSettings) -> tuple[list[_Entry], list[_Entry]]:
        """Return entries for the host's names with its port, and for its other bare names.

        As in OpenSSH, a matching key of the bare name is accepted, but a different key there proves nothing.
        """
        files = [self._file(path) for path in settings.known_hosts_files]
        named = [settings.host_key_name, settings.other_key_name]
        bare = [settings.host_key_alias or settings.hostname, settings.given_name]
        others = [name for name in bare if name not in named]
        first, second = ([name.lower() for name in names if name is not None] for names in (named, others))
        return _found(files, first), _found(files, second)

    def _file(self, path: str) -> _File:
        if path not in self._files:
            self._files[path] = _read(path)
        return self._files[path]

    def _revoked_in(self, path: str, host: str) -> frozenset[bytes]:
        """Return the keys of a RevokedHostKeys file. As in OpenSSH, an unreadable file means that no host is
        trusted.
        """
        if path not in self._revoked:
            try:
                data = Path(path).read_bytes()
            except OSError as error:
                cause = f"its RevokedHostKeys file {path} can't be read: {error.strerror}"
                raise HostError(
                    cause, host=host, hint="another RevokedHostKeys file, or none, in the ssh configuration"
                ) from None
            if data.startswith(_KRL):
                cause = f"its RevokedHostKeys file {path} is a binary list, which only OpenSSH can read"
                raise HostError(cause, host=host, hint=OPENSSH)
            words = (line.split() for line in data.decode(errors="replace").splitlines())
            blobs = (_blob(line[1]) for line in words if len(line) > 1 and not line[0].startswith("#"))
            self._revoked[path] = frozenset(blob for blob in blobs if blob is not None)
        return self._revoked[path]

    def _record(self, key: HostKey, host: str, settings: HostSettings) -> None:
        path = settings.user_known_hosts_files[0]
        name = settings.host_key_name.lower()
        shown = _hashed(name) if settings.hash_known_hosts else name
        try:
            _append(path, f"{shown} {key.type} {base64.b64encode(key.blob).decode('ascii')}\n")
        except OSError as error:
            cause = f"its host key can't be written to {path}: {error.strerror}"
            raise HostError(
                cause, host=host, hint="another UserKnownHostsFile in the ssh configuration"
            ) from None
        file = self._file(path)
        file.lines += 1
        file.add(shown, _Entry(key, marker=None, path=path, line=file.lines))


def _pattern(word: str) -> re.Pattern[str]:
    return re.compile(re.escape(word).replace(r"\*", ".*").replace(r"\?", "."))


def _read(path: str) -> _File:
    """Parse a file; as in OpenSSH, an unreadable file counts as empty."""
    file = _File()
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return file
    for line in text.split("\n"):
        file.lines += 1
        words = line.split()
        marker = words.pop(0) if words and words[0].startswith("@") else None
        if len(words) < 3 or words[0].startswith("#") or marker not in (None, _REVOKED, _AUTHORITY):  # noqa: PLR2004  (names, type, key)
            continue
        blob = _blob(words[2])
        if blob is not None:
            file.add(words[0], _Entry(HostKey(words[1], blob), marker, path, file.lines))
    return file


def _blob(word: str) -> bytes | None:
    """Decode a public key in base64, or return None."""
    try:
        return base64.b64decode(word, validate=True)
    except ValueError:
        return None


def _certificate(key: HostKey) -> tuple[HostCertificate | None, str | None]:
    """Return the host's certificate, or the reason why it is invalid."""
    if key.certificate is None:
        return None, None
    try:
        return read_certificate(key.certificate), None
    except BadHostCertificate as error:
        return None, str(error)


def _found(files: Sequence[_File], names: Sequence[str]) -> list[_Entry]:
    return [entry for name in names for file in files for entry in file.find(name)]


def _certified_name(settings: HostSettings) -> str:
    return (settings.host_key_alias or settings.hostname).lower()


def _append(path: str, line: str) -> None:
    """Append a line. A lock keeps concurrent lines apart, and an unfinished last line is ended first."""
    # An existing directory is the user's choice, as with ssh.
    if not Path(path).parent.exists():
        make_own_directory(str(Path(path).parent))
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with open(fd, "r+b", buffering=0) as file:  # noqa: PTH123  (a descriptor, no path)
        # ssh and other jobs append to the same file.
        fcntl.flock(file, fcntl.LOCK_EX)
        size = os.fstat(fd).st_size
        unfinished = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        file.write((b"\n" if unfinished else b"") + line.encode())


def _hashed(name: str) -> str:
    salt = os.urandom(hashlib.sha1(usedforsecurity=False).digest_size)
    digest = hmac.digest(salt, name.encode(), "sha1")
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def _unknown(key: HostKey, host: str, settings: HostSettings, by_hand: str) -> HostKeyUnknown:
    existing = [_with_trouble(path) for path in settings.known_hosts_files if Path(path).exists()]
    files = ", ".join(existing or settings.known_hosts_files[:1]) or "no file"
    cause = (
        f"its host key is not known: {key.type} {key.fingerprint}"
        f" (looked for {_searched(settings)} in {files})"
    )
    kind = key.type.removeprefix("ssh-").partition("-")[0]
    hint = (
        f"compare with `ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub` on the host,"
        f" then run `{by_hand}` once on this machine; or --host-keys accept-new"
    )
    if other := [setting for setting in settings.beyond if setting.startswith(_OTHER_SOURCES)]:
        hint = f"{OPENSSH}, which supports {', '.join(other)}"
    return HostKeyUnknown(cause, host=host, hint=hint, key_type=key.type, fingerprint=key.fingerprint)


def _searched(settings: HostSettings) -> str:
    names = [name for name in (settings.host_key_name, settings.other_key_name) if name is not None]
    return " and ".join(names)


def _with_trouble(path: str) -> str:
    is_readable = os.access(path, os.R_OK) and not Path(path).is_dir()
    return path if is_readable else f"{path}, which can't be read"


def _not_certified(key: HostKey, host: str, problem: str) -> HostKeyUnknown:
    cause = f"its host certificate for the key {key.type} {key.fingerprint} is not valid: {problem}"
    hint = (
        "`ssh-keygen -Lf /etc/ssh/ssh_host_*-cert.pub` on the host shows it; its authority can make a new one"
    )
    return HostKeyUnknown(cause, host=host, hint=hint, key_type=key.type, fingerprint=key.fingerprint)


def _changed(key: HostKey, host: str, settings: HostSettings, entry: _Entry) -> HostKeyChanged:
    cause = (
        f"its host key {key.type} {key.fingerprint} is not the one in {entry.path}:{entry.line}"
        f" ({entry.key.type} {entry.key.fingerprint}): the host was reinstalled, or another machine answers under its name"
    )
    names = [name for name in (settings.host_key_name, settings.other_key_name) if name is not None]
    remove = " && ".join(shlex.join(["ssh-keygen", "-f", entry.path, "-R", name]) for name in names)
    hint = f"if it was reinstalled, `{remove}`"
    return HostKeyChanged(cause, host=host, hint=hint, key_type=key.type, fingerprint=key.fingerprint)


def _revoked(key: HostKey, host: str, source: str) -> HostKeyRevoked:
    cause = f"its host key {key.type} {key.fingerprint} is {source}"
    hint = "make a new host key on that host (ssh-keygen -A), or ask who revoked this one"
    return HostKeyRevoked(cause, host=host, hint=hint, key_type=key.type, fingerprint=key.fingerprint)
