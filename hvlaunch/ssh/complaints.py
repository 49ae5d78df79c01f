"""Error texts of OpenSSH's ssh on stderr, and the hvlaunch error for each.

The texts are those of OpenSSH 7.4 to 10 (sshconnect.c, sshconnect2.c, packet.c, clientloop.c, ssh.c, mux.c).
"""

import re
import shlex

from hvlaunch.errors import (
    ConnectFailed,
    HostError,
    HostKeyChanged,
    HostKeyRevoked,
    HostKeyUnknown,
    PermissionDenied,
    SentAway,
    UnknownHost,
)

__all__ = ["FAILED", "TOO_MANY_KEYS", "explain", "lost", "was_sent_away"]

FAILED = 255
"""Exit status of ssh for its own failures."""

TOO_MANY_KEYS = "-i KEY, or IdentityFile and `IdentitiesOnly yes` in the ssh configuration: its sshd accepts only a few tries"
"""Advice if an agent holds more keys than sshd's MaxAuthTries."""

_REVOKED_KEYS = ("revoked by file", "in revoked keys file")
_REVOKED = ("REVOKED HOST KEY DETECTED", *_REVOKED_KEYS)
_CHANGED = ("REMOTE HOST IDENTIFICATION HAS CHANGED",)
_UNKNOWN_KEY = ("host key is known for", "Host key verification failed", "authenticity of host")
_CERTIFICATE = ("Certificate invalid",)
_UNKNOWN_NAME = ("Could not resolve hostname",)
_DENIED = ("Permission denied (", "Too many authentication failures", "No supported authentication methods")
_KEY_TROUBLE = ("Load key ", "sign_and_send_pubkey: ")
_SENT_AWAY = (
    "kex_exchange_identification:",
    "ssh_exchange_identification:",
    "banner exchange: Connection",
    "Connection closed by",
    "Connection reset by",
    "Exceeded MaxStartups",
    "Not allowed at this time",
)
_NO_AGREEMENT = ("Unable to negotiate with", "ssh_dispatch_run_fatal")
_NO_CONNECTION = ("connect to host", "Connection timed out", "No route to host", "Network is unreachable")
_NO_FORWARDING = (
    "open failed: administratively prohibited",
    "open failed: connect failed",
    "stdio forwarding failed",
)
_NO_SESSION = ("Session open refused by peer", "request failed on channel", "open failed: resource shortage")
_BAD_CONFIGURATION = (
    "Bad configuration option",
    "Bad owner or permissions",
    "bad configuration options",
    "Can't open user config",
)
_LOST = (
    "closed by remote host",
    "client_loop: send disconnect",
    "Connection reset by",
    "Connection closed by",
    "not responding",
    "Broken pipe",
    "Connection timed out",
    "Corrupted MAC",
)
_FINGERPRINT = re.compile(r"for the (\S+) key sent by the remote host is\s+(SHA256:[\w+/=]+)")
_KEY_TYPE = re.compile(r"No (\S+) host key is known")
_EXPOSED = re.compile(r"^Permissions [0-7]+ for '(.+)' are too open", re.MULTILINE)
_NO_NEWS = re.compile(r"^(Warning: Permanently added|Control socket|\*\*|@@@|debug\d)", re.IGNORECASE)


def was_sent_away(text: str) -> bool:
    """Return True if an sshd on the way closed the connection before its greeting."""
    return _line(text, _SENT_AWAY) is not None


def lost(stderr: str) -> str | None:
    """Return ssh's reason for the loss of an established connection, or None."""
    return _line(stderr, _LOST)


def explain(stderr: str, *, host: str, by_hand: str, is_ssh_alone: bool = False) -> HostError:
    """Return the error that ssh's stderr describes. `by_hand` is the command that reproduces it.

    With `is_ssh_alone`, no ProxyCommand has written to stderr: any text not from ssh is an sshd's Banner.
    """
    # The order matters: ssh prints several lines, and the later texts also follow the more specific ones.
    if _line(stderr, _REVOKED + _CHANGED + _UNKNOWN_KEY):
        return _host_key(stderr, host, by_hand)
    if line := _line(stderr, _UNKNOWN_NAME):
        return UnknownHost(line, host=host, hint=by_hand)
    if line := _line(stderr, _DENIED):
        hint = f"{by_hand}; under hvlaunch ssh can't ask for a password: run ssh-add or kinit, or open a ControlPath, before"
        if "Too many authentication failures" in line:
            hint = TOO_MANY_KEYS
        notes = [note for note in _lines(stderr) if note.startswith(_KEY_TROUBLE)]
        if exposed := _EXPOSED.search(stderr):
            # The usual cause when ssh refuses a key: its file is readable by others.
            hint = f"chmod 600 {shlex.quote(exposed[1])}"
        return PermissionDenied("; ".join([line.rstrip("."), *notes]), host=host, hint=hint, tried=())
    if line := _line(stderr, _NO_FORWARDING):
        return ConnectFailed(f"its jump host can't connect to it: {line}", host=host, hint=by_hand)
    if line := _line(stderr, _NO_CONNECTION + _NO_AGREEMENT):
        return ConnectFailed(line, host=host, hint=by_hand)
    if line := _line(stderr, _NO_SESSION):
        return HostError(f"its sshd refused to open a session: {line}", host=host, hint=by_hand)
    if line := _line(stderr, _BAD_CONFIGURATION):
        return HostError(f"the ssh configuration can't be used: {line}", host=host, hint=by_hand)
    # No text is known, so quote what ssh said, without its notices.
    complaints = [line for line in _lines(stderr) if not _NO_NEWS.match(line)]
    gone = [line for line in complaints if was_sent_away(line)]
    other = [line for line in complaints if line not in gone]
    if gone and (is_ssh_alone or not other):
        hint = "a smaller --connect-limit, if its sshd has a small MaxStartups; or its sshd may refuse this machine's address"
        before = f" (before that: {other[-1]})" if other else ""
        return SentAway(gone[0] + before, host=host, hint=hint)
    reason = f": {other[-1 if is_ssh_alone else 0]}" if other else " without a message"
    return ConnectFailed(f"ssh failed{reason}", host=host, hint=by_hand)


def _host_key(stderr: str, host: str, by_hand: str) -> HostError:
    match = _FINGERPRINT.search(stderr)
    kind = _KEY_TYPE.search(stderr)
    key_type, fingerprint = (match[1], match[2].rstrip(".")) if match else (kind[1] if kind else "", "")
    facts = {"host": host, "key_type": key_type, "fingerprint": fingerprint}
    shown = f" {key_type} {fingerprint}".rstrip()
    if _line(stderr, _REVOKED):
        hint = "make a new host key on that host (ssh-keygen -A), or ask who revoked this one"
        listed = _line(stderr, _REVOKED_KEYS)
        cause = f"its host key{shown} is marked @revoked" if listed is None else f"RevokedHostKeys: {listed}"
        return HostKeyRevoked(cause, hint=hint, **facts)
    if _line(stderr, _CHANGED):
        line = _line(stderr, ("Offending",)) or "the key is not the one in known_hosts"
        cause = f"its host key{shown} has changed: {line}"
        hint = "if the host was reinstalled, ssh-keygen -R NAME, with its name in known_hosts as NAME"
        return HostKeyChanged(cause, hint=hint, **facts)
    line = _line(stderr, _CERTIFICATE) or _line(stderr, _UNKNOWN_KEY) or ""
    return HostKeyUnknown(
        line.rstrip("."), hint=f"`{by_hand}` once on this machine, or --host-keys accept-new", **facts
    )


def _line(stderr: str, texts: tuple[str, ...]) -> str | None:
    """Return the first line that contains one of the texts."""
    return next((line for line in _lines(stderr) if any(text in line for text in texts)), None)


def _lines(stderr: str) -> list[str]:
    return [line.strip().removeprefix("ssh: ") for line in stderr.splitlines() if line.strip()]
