"""A host's settings: the user's options first, then the ssh configuration."""

import fnmatch
import functools
import os
import pwd
import re
import shlex
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvlaunch.errors import HostError, StartTimeout
from hvlaunch.job import Host, SSHOptions
from hvlaunch.ssh.config.ask_ssh import ask_ssh

__all__ = [
    "OPENSSH",
    "Algorithms",
    "Ask",
    "HostSettings",
    "LoginTarget",
    "allowed",
    "by_hand",
    "resolve",
    "ssh_words",
]


_SAME = {"curve25519-sha256": "curve25519-sha256@libssh.org"}
"""Two names of one algorithm: RFC 8731's, and paramiko's."""
_HYBRID = "sntrup761x25519-sha512"
_HYBRIDS = ("mlkem768x25519-sha256",)
"""Key exchanges that resist quantum computers.

An ssh before 9.9 knows only _HYBRID; a configuration that allows it allows these too.
"""


class Algorithms(NamedTuple):
    """Lists of algorithms, as `ssh -G` prints them; None without a list."""

    ciphers: str | None = None
    macs: str | None = None
    key_exchanges: str | None = None
    host_keys: str | None = None
    signatures: str | None = None
    """For the user's keys."""

    @classmethod
    def of(cls, configured: Mapping[str, Sequence[str]]) -> "Algorithms":
        """Build the lists from the configuration: lower-case keywords and their values."""

        def first(*keys: str) -> str | None:
            return next((configured[key][0] for key in keys if configured.get(key)), None)

        return cls(
            first("ciphers"),
            first("macs"),
            first("kexalgorithms"),
            first("hostkeyalgorithms"),
            first("pubkeyacceptedalgorithms", "pubkeyacceptedkeytypes"),
        )


def allowed(ours: Sequence[str], listed: str | None) -> tuple[str, ...]:
    """Return those of `ours` that the configuration allows, in our order; all of them without a list.

    A list that begins with `-` excludes names; `+` and `^` exclude nothing. `ssh -G` has resolved these
    already.
    """
    if listed is None or listed.startswith(("+", "^")):
        return tuple(ours)
    names = [_SAME.get(name, name) for name in listed.removeprefix("-").split(",")]
    if listed.startswith("-"):
        return tuple(name for name in ours if not any(fnmatch.fnmatchcase(name, word) for word in names))
    # An old ssh can't name the newer hybrid, but the user evidently wants a hybrid.
    if any(name.startswith(_HYBRID) for name in names):
        names += _HYBRIDS
    return tuple(name for name in ours if name in names)


OPENSSH = "--ssh-client openssh"
"""Advice if only OpenSSH itself supports a setting."""

_SSH_PORT = 22
_DEFAULT_IDENTITIES = ("~/.ssh/id_rsa", "~/.ssh/id_ecdsa", "~/.ssh/id_ed25519")
_USER_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_GLOBAL_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
_CONFIG_FILES = ("~/.ssh/config", "/etc/ssh/ssh_config")
_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
# OpenSSH refuses these in names, because they may reach a shell through ProxyCommand, or mean user@host or a URI.
_BAD_IN_USER = frozenset("'`\"$;&<>|(){}")
_BAD_IN_NAME = frozenset("'`\"$\\;&<>|(){}@/")

_BEYOND = {
    "gssapiauthentication": "GSSAPIAuthentication",
    "hostbasedauthentication": "HostbasedAuthentication",
    "knownhostscommand": "KnownHostsCommand",
    "pkcs11provider": "PKCS11Provider",
    "proxyusefdpass": "ProxyUseFdpass",
    "verifyhostkeydns": "VerifyHostKeyDNS",
}

Ask = Callable[[Sequence[str], float], subprocess.CompletedProcess[str]]


class HostSettings(NamedTuple):
    """The settings of one host. Paths are expanded; OpenSSH's "none" is None or empty."""

    hostname: str
    """Name or address to connect to."""
    port: int
    user: str
    identity: str | None
    """Private key that the user asked for; it is an error if it is missing or unreadable."""
    identity_files: tuple[str, ...]
    """Private keys to try, `identity` first; missing files are skipped."""
    identities_only: bool
    """Offer only the keys of `identity_files`, even if the ssh agent holds more."""
    identity_agent: str | None
    """Socket of the ssh agent."""
    user_known_hosts_files: tuple[str, ...]
    global_known_hosts_files: tuple[str, ...]
    revoked_host_keys: str | None
    """File of keys that no host may show."""
    hash_known_hosts: bool
    """Hide host names in new entries."""
    host_key_alias: str | None
    given_name: str | None
    """The user's name for a host with a separate address (`address=`); known_hosts may use either."""
    address_family: socket.AddressFamily
    connect_timeout: float | None
    """Seconds for one address to answer, within the limit for all addresses."""
    certificate_files: tuple[str, ...]
    """Certificates for the user's keys, besides those next to the keys."""
    proxy_command: str | None
    """ProxyCommand with its tokens replaced."""
    proxy_jump: str | None
    """As in `user@first:port,second`; the last one connects to the host."""
    control_path: str | None
    """Socket of an open connection of the ssh binary."""
    beyond: tuple[str, ...]
    """Settings that only the ssh binary supports, such as `PKCS11Provider /usr/lib/token.so`."""
    algorithms: Algorithms

    @property
    def known_hosts_files(self) -> tuple[str, ...]:
        """Files with host keys, the user's files first."""
        return self.user_known_hosts_files + self.global_known_hosts_files

    @property
    def host_key_name(self) -> str:
        """Name in known_hosts files: the name, `[name]:port` for a port other than 22, or the alias."""
        if self.host_key_alias is not None:
            return self.host_key_alias
        return self._with_port(self.hostname)

    @property
    def other_key_name(self) -> str | None:
        """The second name of a host whose `address=` differs from its name."""
        return None if self.given_name is None else self._with_port(self.given_name)

    def _with_port(self, name: str) -> str:
        return name if self.port == _SSH_PORT else f"[{name}]:{self.port}"


class LoginTarget(NamedTuple):
    """A host to connect to: its name for messages, its settings, and the equivalent ssh command for hints."""

    name: str
    settings: HostSettings
    by_hand: str


def resolve(
    host: Host,
    options: SSHOptions,
    *,
    jump: str | None = None,
    timeout: float = 10.0,
    ask: Ask = ask_ssh,
    environ: Mapping[str, str] = os.environ,
) -> HostSettings:
    """Return the settings of `host`: its own, then `options`, then the ssh configuration.

    `jump` is a ProxyJump that replaces the configuration's. The configuration is the output of `ssh -G` (within
    `timeout` seconds; it may resolve names and run commands of `Match exec`). Without an ssh binary, paramiko's
    parser reads it, which lacks `Include` and some `Match` criteria. Raises HostError for an invalid name or an
    unreadable configuration, and StartTimeout.
    """
    _check_names(host, options)
    try:
        configured = _from_ssh(host, options, jump, timeout, ask)
    except FileNotFoundError:
        configured = _from_parser(host, options)
        if jump is not None:
            configured = {**configured, "proxyjump": [jump], "proxycommand": ["none"]}
    return _settings(host, options, configured, environ)


def by_hand(host: Host, options: SSHOptions, settings: HostSettings) -> str:
    """Return the ssh command that reproduces the connection, for hints."""
    words = ["ssh"]
    if options.config is not None:
        words += ["-F", str(options.config)]
    if settings.port != _SSH_PORT:
        words += ["-p", str(settings.port)]
    if settings.identity is not None:
        words += ["-i", settings.identity]
    return shlex.join([*words, f"{settings.user}@{host.address or host.name}"])


def _check_names(host: Host, options: SSHOptions) -> None:
    for kind, word in (("name", host.name), ("address", host.address)):
        if word is not None and (not word or word.startswith("-") or not _is_plain(word)):
            raise HostError(f"{word!r} is not a valid {kind} for a host", host=host.name)
    user = host.user or options.user
    if user is not None and (user.startswith("-") or not user.isprintable() or _BAD_IN_USER & set(user)):
        raise HostError(f"{user!r} is not a valid user name", host=host.name)


def _is_plain(word: str) -> bool:
    return word.isprintable() and not any(c.isspace() or c in _BAD_IN_NAME for c in word)


def ssh_words(host: Host, options: SSHOptions) -> list[str]:
    """Return the ssh arguments for the same settings, without the host's name."""
    port, user, identity = _own_words(host, options)
    words: list[str] = []
    if options.config is not None:
        words += ["-F", str(options.config)]
    if port is not None:
        words += ["-p", str(port)]
    if user is not None:
        words += ["-l", user]
    if identity is not None:
        words += ["-i", identity]
    # As HostName on the command line: patterns of the configuration still match the host's name.
    if host.address is not None:
        words += ["-o", "HostName=" + host.address.replace("%", "%%")]
    return words


def _from_ssh(
    host: Host, options: SSHOptions, jump: str | None, timeout: float, ask: Ask
) -> dict[str, list[str]]:
    arguments = ["-G", "-T", *ssh_words(host, options)]
    if jump is not None:
        arguments += ["-J", jump]
    try:
        answer = ask([*arguments, "--", host.name], timeout)
    except subprocess.TimeoutExpired:
        cause = f"`ssh -G {host.name}` did not answer within {timeout:g} s"
        hint = "look for `Match exec` and CanonicalizeHostname in the ssh configuration"
        raise StartTimeout(cause, host=host.name, hint=hint) from None
    if answer.returncode != 0:
        complaints = answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"]
        raise _unusable(host, complaints[0].strip(), shlex.join(["ssh", *arguments, host.name]))
    return _parsed(answer.stdout)


@functools.lru_cache(maxsize=4)  # most jobs have one answer of ssh for all hosts
def _parsed(printed: str) -> dict[str, list[str]]:
    """Return the values by keyword of what `ssh -G` printed; not to be changed."""
    configured: dict[str, list[str]] = {}
    for line in printed.splitlines():
        key, _, value = line.partition(" ")
        configured.setdefault(key.lower(), []).append(value)
    return configured


def _from_parser(host: Host, options: SSHOptions) -> dict[str, list[str]]:
    from paramiko.config import SSHConfig  # noqa: PLC0415  (100 ms, needed only without an ssh binary)
    from paramiko.ssh_exception import SSHException  # noqa: PLC0415

    config = SSHConfig()
    files = [Path(_tilde(str(path))) for path in ([options.config] if options.config else _CONFIG_FILES)]
    path = files[0]
    try:
        for path in files:
            if options.config is not None or path.exists():
                with path.open(encoding="utf-8", errors="surrogateescape") as file:
                    config.parse(file)
        values = config.lookup(host.name)
    except (OSError, SSHException, KeyError, ValueError, ImportError) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _unusable(host, f"{path}: {cause}") from None
    items = ((key, value) for key, value in values.items() if value is not None)
    return {key: value if isinstance(value, list) else [value] for key, value in items}


def _unusable(host: Host, cause: str, hint: str | None = None) -> HostError:
    return HostError(f"the ssh configuration can't be used: {cause}", host=host.name, hint=hint)


def _own_words(host: Host, options: SSHOptions) -> tuple[int | None, str | None, str | None]:
    """Return port, user and identity from hvlaunch's own options."""
    identity = host.identity or options.identity
    return (
        host.port if host.port is not None else options.port,
        host.user if host.user is not None else options.user,
        None if identity is None else _tilde(str(identity)),
    )


def _settings(
    host: Host, options: SSHOptions, configured: Mapping[str, list[str]], environ: Mapping[str, str]
) -> HostSettings:
    def first(key: str, default: str | None = None) -> str | None:
        value = configured.get(key, [default])[0]
        return None if value is None or value.lower() == "none" else value

    port, user, identity = _own_words(host, options)
    # OpenSSH compares host names in lower case.
    hostname = host.address or (first("hostname") or host.name).lower()
    try:
        port = port if port is not None else int(first("port") or _SSH_PORT)
        patience = first("connecttimeout")
        connect_timeout = None if patience is None else float(patience)
    except ValueError as error:
        raise _unusable(host, str(error)) from None
    user = user or first("user") or _account()[0]
    alias = first("hostkeyalias")
    tokens = _tokens(host.name, hostname, str(port), user, alias)

    def paths(value: str | None) -> tuple[str, ...]:
        # `ssh -G` prints several paths in one line, without quotes; a path starts with / or ~.
        return tuple(_expand(path, tokens) for path in re.split(r"\s+(?=[/~])", value)) if value else ()

    identity_words = configured.get("identityfile", [] if identity else list(_DEFAULT_IDENTITIES))
    identities = [_expand(path, tokens) for path in identity_words if path.lower() != "none"]
    return HostSettings(
        hostname=hostname,
        port=port,
        user=user,
        identity=identity,
        identity_files=tuple(dict.fromkeys([identity, *identities] if identity else identities)),
        identities_only=first("identitiesonly") in ("yes", "true"),
        identity_agent=_agent_socket(first("identityagent", "SSH_AUTH_SOCK"), tokens, environ),
        user_known_hosts_files=paths(first("userknownhostsfile", _USER_KNOWN_HOSTS)),
        global_known_hosts_files=paths(first("globalknownhostsfile", _GLOBAL_KNOWN_HOSTS)),
        revoked_host_keys=_expand(revoked, tokens) if (revoked := first("revokedhostkeys")) else None,
        hash_known_hosts=first("hashknownhosts") in ("yes", "true"),
        host_key_alias=alias,
        given_name=host.name if host.address is not None and alias is None else None,
        address_family=_FAMILIES.get(first("addressfamily") or "any", socket.AF_UNSPEC),
        connect_timeout=connect_timeout or None,
        certificate_files=tuple(
            _expand(path, tokens) for path in configured.get("certificatefile", []) if path.lower() != "none"
        ),
        proxy_command=_replaced(first("proxycommand"), tokens),
        proxy_jump=first("proxyjump"),
        control_path=first("controlpath"),
        beyond=tuple(_beyond(configured)),
        algorithms=Algorithms.of(configured),
    )


def _beyond(configured: Mapping[str, list[str]]) -> Iterator[str]:
    for key, name in _BEYOND.items():
        value = configured.get(key, ["no"])[0]
        if value.lower() not in ("no", "none", "false"):
            yield f"{name} {value}"


def _tokens(name: str, hostname: str, port: str, user: str, alias: str | None) -> dict[str, str]:
    account, home = _account()
    here = socket.gethostname()
    ours = {"%": "%", "d": home, "i": str(os.getuid()), "u": account, "l": here, "L": here.partition(".")[0]}
    return {**ours, "h": hostname, "k": alias or name, "n": name, "p": port, "r": user}


def _agent_socket(value: str | None, tokens: Mapping[str, str], environ: Mapping[str, str]) -> str | None:
    if value is None:
        return None
    if value == "SSH_AUTH_SOCK":
        value = "$SSH_AUTH_SOCK"
    if value.startswith("$"):
        return environ.get(value[1:].strip("{}")) or None
    return _expand(value, tokens)


def _expand(path: str, tokens: Mapping[str, str]) -> str:
    """Expand tokens as in ssh_config(5), "TOKENS", and a leading ~."""
    return _tilde(_replaced(path, tokens) or "")


def _replaced(text: str | None, tokens: Mapping[str, str]) -> str | None:
    return text and re.sub("%(.)", lambda match: tokens.get(match[1], match[0]), text)


def _tilde(path: str) -> str:
    home = _account()[1]
    if path == "~" or path.startswith("~/"):
        return home + path[1:]
    return os.path.expanduser(path)  # noqa: PTH111  (pathlib raises for ~nobody)


@functools.cache
def _account() -> tuple[str, str]:
    """Return name and home as OpenSSH does: from the user database, not from the environment."""
    try:
        entry = pwd.getpwuid(os.getuid())
    except KeyError:
        return str(os.getuid()), os.path.expanduser("~")  # noqa: PTH111  (as above)
    return entry.pw_name, entry.pw_dir
