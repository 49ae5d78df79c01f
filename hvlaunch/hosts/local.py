"""The machine of the driver: recognized among the hosts, since its workers need no ssh, and the variables that belong to it alone."""

import fnmatch
import functools
import os
import pwd
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvlaunch.job import Host, JobSpec

__all__ = [
    "OUTER_RANK_VARIABLES",
    "OWN_VARIABLES",
    "Address",
    "binds",
    "current_user",
    "host_environ",
    "is_here_by_dns",
    "is_local",
    "is_own",
    "is_own_name",
    "is_pattern",
    "matcher",
    "only_local",
    "own_addresses",
    "resolve",
    "without_outer_rank",
]

Address = tuple[socket.AddressFamily, tuple[Any, ...]]
"""An address family with a socket address, port 0."""

_HOSTS_FILE = Path("/etc/hosts")

_NOBODYS: dict[socket.AddressFamily, tuple[Any, ...]] = {
    socket.AF_INET: ("192.0.2.1", 0),
    socket.AF_INET6: ("2001:db8::1", 0, 0, 0),
}
"""Documentation addresses, which no machine has (RFC 5737, RFC 3849)."""


def resolve(name: str) -> list[Address]:
    """Return the system's addresses for a name or a numeric address. Raises OSError or UnicodeError."""
    answers = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    return [(family, address) for family, _, _, _, address in answers if family in _NOBODYS]


def binds(address: Address) -> bool:
    """Return whether a socket can be bound to the address."""
    family, endpoint = address
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(endpoint)
    except OSError:
        return False
    return True


def is_own(address: Address, *, binds: Callable[[Address], bool] = binds) -> bool:
    """Return whether the address belongs to this machine: a socket can be bound to it.

    False if the kernel binds any address (sysctl ip_nonlocal_bind).
    """
    family, _ = address
    # Binding a documentation address succeeds only with ip_nonlocal_bind.
    return binds(address) and not binds((family, _NOBODYS[family]))


def own_addresses() -> list[str]:
    """Return the IPv4 and IPv6 addresses of this machine's interfaces."""
    from hvlaunch.agent.facts import interface_addresses  # noqa: PLC0415 (only a job with remote hosts needs it)

    return [address for addresses in interface_addresses().values() for address in addresses]


@functools.cache
def _hosts_file() -> Mapping[str, Iterable[str]]:
    """Return the numeric addresses in /etc/hosts by lower-case name."""
    addresses_by_name: dict[str, list[str]] = {}
    with suppress(OSError):
        for line in _HOSTS_FILE.read_text("utf-8", "replace").splitlines():
            address, *names = line.partition("#")[0].split() or [""]
            for name in names if _is_numeric(address) else ():
                addresses_by_name.setdefault(name.lower(), []).append(address)
    return addresses_by_name


def _is_numeric(text: str) -> bool:
    for convert in (socket.inet_aton, _ipv6):
        with suppress(OSError, UnicodeError):
            convert(text)
            return True
    return False


def _ipv6(text: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6, text.partition("%")[0])


def current_user() -> str | None:
    """Return this process's login name; None without an entry for its uid, as in some containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return None


def is_own_name(
    name: str,
    *,
    hostname: Callable[[], str] = socket.gethostname,
    hosts_file: Callable[[], Mapping[str, Iterable[str]]] | None = None,
    is_own: Callable[[Address], bool] = is_own,
) -> bool:
    """Return whether this machine itself knows the name as its own, by its hostname in any domain or by /etc/hosts.

    A numeric address counts too: is_own() decides about it without DNS.
    """
    name = name.lower().removesuffix(".")
    this_host = hostname().lower()
    if (
        name == this_host
        or name.partition(".")[0] == this_host
        or name == this_host.partition(".")[0]
        or _is_numeric(name)
    ):
        return True
    # Debian's /etc/hosts maps the hostname to 127.0.1.1, which DNS does not know.
    listed = (hosts_file or _hosts_file)().get(name, ())
    return any(is_own(candidate) for address in listed for candidate in resolve(address))


def is_local(
    host: Host,
    *,
    is_own_name: Callable[[str], bool] = is_own_name,
    resolve: Callable[[str], Iterable[Address]] = resolve,
    is_own: Callable[[Address], bool] = is_own,
    user: Callable[[], str | None] = current_user,
) -> bool:
    """Return whether workers of `host` run without ssh: it is `localhost`, or this machine's own name and address.

    Resolving may take seconds.
    """
    # A host with a port or another user may be a tunnel or a container.
    if host.port is not None or (host.user is not None and host.user != user()):
        return False
    name = host.address or host.name
    if name == "localhost":
        return True
    # If only DNS names this machine, ssh checks the host's key: a DNS server must not choose where workers run.
    if not is_own_name(name):
        return False
    try:
        addresses = resolve(name)
    except (OSError, UnicodeError):  # UnicodeError: an impossible name, such as 64 letters before a dot
        return False
    return any(is_own(address) for address in addresses)


def is_here_by_dns(
    host: Host,
    *,
    is_own_name: Callable[[str], bool] = is_own_name,
    resolve: Callable[[str], Iterable[Address]] = resolve,
    is_own: Callable[[Address], bool] = is_own,
) -> bool:
    """Return whether only DNS says that the host is this machine."""
    name = host.address or host.name
    if name == "localhost" or is_own_name(name):
        return False
    with suppress(OSError, UnicodeError):
        return any(is_own(address) for address in resolve(name))
    return False


def only_local(spec: JobSpec, *, is_local: Callable[[Host], bool] = is_local) -> bool:
    """Return whether every host that the job may ever have is this machine."""
    # A script or an edited hostfile may add other hosts later.
    return not (spec.elastic and spec.elastic.discovers) and all(map(is_local, spec.hosts))


def may_be_taken_over(spec: JobSpec) -> bool:
    """Return whether a successor may continue the job.

    The agents must be hvlaunch's own, no caller may wait for a function's result, and a foreground job on this machine alone
    ends with its terminal.
    """
    is_own = launcher_of(spec) is None and spec.call is None
    return is_own and (spec.detach != "never" or not only_local(spec))


def launcher_of(spec: JobSpec) -> str | None:
    """Return the launcher of the job's agents, if not hvlaunch: no other driver could become their parent."""
    if spec.mpi is not None:
        return spec.mpi.launcher
    return None if spec.ssh.remote_agent is None else Path(spec.ssh.remote_agent).name


def is_pattern(text: str) -> bool:
    return any(mark in text for mark in "*?[")


@functools.cache
def matcher(*patterns: str) -> Callable[[str], bool]:
    """Return a test for names that match one of the patterns: `*`, `?`, `[...]`, as for file names."""
    # Most patterns are names, or beginnings with a `*`. Compiling a regular expression of them takes 1 ms.
    names = frozenset(pattern for pattern in patterns if not is_pattern(pattern))
    beginnings = tuple(
        pattern[:-1] for pattern in patterns if pattern[-1:] == "*" and not is_pattern(pattern[:-1])
    )
    others = [pattern for pattern in patterns if is_pattern(pattern) and pattern[:-1] not in beginnings]

    def matches(name: str) -> bool:
        if name in names or name.startswith(beginnings):
            return True
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in others)

    return matches


OUTER_RANK_VARIABLES = (
    # A job of hvlaunch or torchrun.
    "HVLAUNCH_*",
    "HOROVOD_ELASTIC",
    "TORCHELASTIC_USE_AGENT_STORE",
    # Slurm sets these for each task, and for a batch script and the shell of `srun --pty` too.
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_GTIDS",
    "SLURM_TASK_PID",
    # mpirun, jsrun.
    "OMPI_COMM_WORLD_*",
    "MV2_COMM_WORLD_*",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "PMI_*",
    "PMIX_*",
    "JSM_NAMESPACE_*",
)
"""Patterns of variables with this process's rank in an outer job: every worker would read the same rank."""


def without_outer_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that hold for this process alone."""
    is_outer_rank = matcher(*OUTER_RANK_VARIABLES)
    return {name: value for name, value in environ.items() if not is_outer_rank(name)}


OWN_VARIABLES = (
    # The driver's GPUs are not the host's.
    "*CUDA_VISIBLE_DEVICES",
    # This machine, this user and this shell.
    "BASH_FUNC_*",
    "OLDPWD",
    "PWD",
    "SHLVL",
    "_",
    "HOSTNAME",
    "HOST",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "MAIL",
    # This terminal and this session.
    "TERM",
    "TERM_*",
    "TERMCAP",
    "TERMINFO*",
    "COLORTERM",
    "COLUMNS",
    "LINES",
    "STY",
    "WINDOW",
    "WINDOWID",
    "TMUX*",
    "SSH_*",
    "XDG_*",
    "DBUS_*",
    "DISPLAY",
    "WAYLAND_DISPLAY",
    "XAUTHORITY",
    "GPG_*",
    "SUDO_*",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
    "LISTEN_*",
    "NOTIFY_SOCKET",
)
"""Patterns of names."""

_PLACES = ("TMPDIR", "TMP", "TEMP")
"""Directories that each host has; `--env all` passes them on nevertheless."""


def host_environ(environ: Mapping[str, str], passed_on: Collection[str]) -> dict[str, str]:
    """Return the environment of workers on this machine in a job with other hosts.

    Other hosts get only variables in `passed_on` from here, and have such variables of their own.
    """
    is_own = matcher(*OWN_VARIABLES, *_PLACES)
    return {name: value for name, value in environ.items() if is_own(name) or name in passed_on}
