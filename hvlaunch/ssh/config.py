"""The ssh configuration: questions to the ssh binary (`ssh -G`), and the settings of hosts and of their jump hosts (ProxyJump).

The user's options for hvlaunch come first.
"""

import contextlib
import fnmatch
import functools
import os
import pwd
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hvlaunch.errors import HostError, StartTimeout
from hvlaunch.job import Host, SSHOptions
from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "OPENSSH",
    "Algorithms",
    "Ask",
    "AskSSH",
    "Hop",
    "Hops",
    "HostSettings",
    "LoginTarget",
    "Questions",
    "allowed",
    "ask_ssh",
    "behind",
    "by_hand",
    "parse_hop",
    "resolve",
    "ssh_words",
]


class AskSSH:
    """Runs `ssh` and returns its answer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._closed = False

    def __call__(self, arguments: Sequence[str], timeout: float) -> "subprocess.CompletedProcess[str]":
        """Return the answer to `ssh ARGUMENTS`, within `timeout` seconds.

        Raises FileNotFoundError without an ssh binary, and subprocess.TimeoutExpired, also after close().
        """
        with self._start(arguments) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout)
            finally:
                with self._lock:
                    self._running.discard(process)
                    _kill(process)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def close(self) -> None:
        """Kill running questions. May be repeated."""
        with self._lock:
            self._closed = True
            for process in self._running:
                _kill(process)

    def _start(self, arguments: Sequence[str]) -> "subprocess.Popen[str]":
        command = ["ssh", *arguments]
        with self._lock:
            # After close() no process may start: nothing would end it.
            if self._closed:
                raise subprocess.TimeoutExpired(command, 0.0)
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="surrogateescape",
                # A process group of its own, to kill it with the commands of `Match exec`.
                start_new_session=True,
            )
            self._running.add(process)
        return process


def ask_ssh(arguments: Sequence[str], timeout: float) -> "subprocess.CompletedProcess[str]":
    """Ask one question; see AskSSH."""
    return AskSSH()(arguments, timeout)


def _kill(process: "subprocess.Popen[str]") -> None:
    """Kill the process and its children, unless it was reaped: its number may be reused by then."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


Answer = subprocess.CompletedProcess[str]

_READ = re.compile(r"^debug1: Reading configuration data (.+)$", re.MULTILINE)
_KEYWORD = re.compile(r"\s*(\w+)\s*(?:=|\s)\s*(.*?)\s*")


class Questions:
    """Asks ssh for settings, with few processes; called like ask_ssh. Thread-safe.

    An `ssh -G` takes 4 ms of CPU, which adds up with many hosts. With -v it names the files that it reads. If
    these files have no `Match`, no `HostName`, no token and only `Host *`, and the host keeps its given name,
    the answer for any other name is the same.
    """

    def __init__(self, ask: Callable[[Sequence[str], float], Answer]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._answers: dict[tuple[str, ...], _Asked] = {}

    def is_same_for_all(self) -> bool:
        """True if the answers so far serve all hosts, and further hosts cost no process."""
        with self._lock:
            return all(asked.template is not None for asked in self._answers.values())

    def __call__(self, arguments: Sequence[str], timeout: float) -> Answer:
        """Return the answer to `ssh ARGUMENTS`; the last argument is the host's name. Raises the errors of `ask`."""
        *words, name = arguments
        deadline = time.monotonic() + timeout
        with self._lock:
            # The lock of one set of arguments, so that others can ask meanwhile.
            asked = self._answers.setdefault(tuple(words), _Asked())
        with asked.lock:
            if not asked.done:
                asked.done = True
                answer = self._ask(["-v", *words, name], self._left(arguments, deadline))
                asked.template = _template(answer, name)
                if answer.returncode == 0:
                    return answer
        # A token in the name would be expanded by ssh, and not by the template.
        if asked.template is not None and "%" not in name:
            return subprocess.CompletedProcess(list(arguments), 0, asked.template.replace("\0", name), "")
        return self._ask(arguments, self._left(arguments, deadline))

    @staticmethod
    def _left(arguments: Sequence[str], deadline: float) -> float:
        """Return the remaining seconds, after waiting for an earlier question. Raises TimeoutExpired at 0."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise subprocess.TimeoutExpired(list(arguments), 0.0)
        return left


class _Asked:
    """The state of one set of arguments: the answer as a template with NUL for the name, if it fits all hosts."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.done = False
        self.template: str | None = None


def _template(answer: Answer, name: str) -> str | None:
    if answer.returncode != 0 or not answer.stderr.startswith("OpenSSH_"):
        return None
    lines: list[str] = []
    for line in answer.stdout.splitlines():
        key, _, value = line.partition(" ")
        # Canonical names depend on DNS, so answers may differ by host.
        if key == "canonicalizehostname" and value not in ("false", "no"):
            return None
        if key == "hostname" and value.lower() != name.lower():
            return None
        lines.append(f"{key} \0" if key in ("host", "hostname") else line)
    alike = all(_is_same_for_all(Path(file)) for file in _READ.findall(answer.stderr))
    return "\n".join(lines) if alike else None


def _is_same_for_all(file: Path) -> bool:
    try:
        lines = file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return False
    return all(_means_all(line) for line in lines if line.strip() and not line.lstrip().startswith("#"))


def _means_all(line: str) -> bool:
    match = _KEYWORD.fullmatch(line)
    if match is None or "%" in line:
        return False
    keyword, words = match[1].lower(), match[2]
    return words == "*" if keyword == "host" else keyword not in ("match", "hostname")


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


_WORD = re.compile(
    r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?:\[(?P<v6>[^]]+)\]|(?P<name>[^:@/]+))(?::(?P<port>\d+))?/?"
)


class Hop(NamedTuple):
    """A jump host. `key` is the way to it, in words; equal ways share a connection."""

    host: Host
    key: tuple[str, ...]
    jump: str | None
    """ProxyJump to this host, if another host's ProxyJump determines it; None uses its own configuration."""


def parse_hop(word: str, *, host: str) -> Host:
    """Parse one word of a ProxyJump: `[user@]name[:port]` or an ssh:// URI. `host` is for messages.

    Raises HostError.
    """
    match = _WORD.fullmatch(word.strip())
    if match is None:
        raise HostError(f"its ProxyJump has {word!r}, which is not a host", host=host)
    port = match["port"]
    return Host(match["v6"] or match["name"], user=match["user"], port=int(port) if port else None)


class Hops:
    """The jump hosts and their settings; each is looked up once. Thread-safe.

    As in OpenSSH, the port, user and identity of `options` or of a host do not apply to its jump hosts.
    """

    def __init__(self, options: SSHOptions, *, timeout: float, ask: Ask = ask_ssh) -> None:
        # Only the configuration file and the policy for host keys apply to jump hosts.
        self.options = SSHOptions(config=options.config, host_keys=options.host_keys)
        self._timeout = timeout
        self._ask = ask
        self._lock = threading.Lock()
        self._settings: dict[tuple[Host, str | None], HostSettings] = {}

    def settings(self, hop: Host, jump: str | None = None) -> HostSettings:
        """Return the settings of a jump host; `jump` replaces its own ProxyJump. Raises HostError."""
        with self._lock:
            if (hop, jump) not in self._settings:
                self._settings[hop, jump] = resolve(
                    hop, self.options, jump=jump, timeout=self._timeout, ask=self._ask
                )
            return self._settings[hop, jump]

    def before(self, host: str, jump: str | None) -> tuple[Hop, ...]:
        """Return the jump hosts before `host`, in the order of connecting; `jump` is the host's ProxyJump.

        The first jump host may have a ProxyJump too. Raises HostError for a loop.
        """
        way: tuple[Hop, ...] = ()
        jumps: list[str] = []
        while jump is not None:
            if jump in jumps:
                cause = f"its jump hosts form a loop: {' → '.join((*jumps, jump))}"
                raise HostError(
                    cause, host=host, hint=f"ssh -v {host} shows them; change the ProxyJump of one"
                )
            jumps.append(jump)
            words = jump.split(",")
            way = (
                *(
                    Hop(parse_hop(word, host=host), (word,), ",".join(words[:index]) or None)
                    for index, word in enumerate(words)
                ),
                *way,
            )
            try:
                # The first jump host's own ProxyJump leads to it; the others are reached from their
                # predecessors.
                jump = self.settings(way[0].host).proxy_jump
            except HostError as error:
                raise behind(host, words[0], error) from None
        names = [hop.key[0] for hop in way]
        return tuple(Hop(hop.host, tuple(names[: index + 1]), hop.jump) for index, hop in enumerate(way))


def behind(host: str, jump: str, error: HostError) -> HostError:
    """Turn the error of a jump host into an error of the host behind it."""
    return error.about(host, f"its jump host {jump}: {error.cause}")
