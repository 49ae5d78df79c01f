"""Recognizing this machine among the hosts: its workers need no ssh."""

import functools
import os
import pwd
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvlaunch.job import Host, JobSpec

__all__ = [
    "Address",
    "binds",
    "current_user",
    "is_here_by_dns",
    "is_local",
    "is_own",
    "is_own_name",
    "only_local",
    "own_addresses",
    "resolve",
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
