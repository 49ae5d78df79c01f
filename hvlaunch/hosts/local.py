"""Which of the hosts is this machine, and so needs no ssh."""

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
"""A family and a socket address of it, port 0."""

_HOSTS_FILE = Path("/etc/hosts")

_NOBODYS: dict[socket.AddressFamily, tuple[Any, ...]] = {
    socket.AF_INET: ("192.0.2.1", 0),
    socket.AF_INET6: ("2001:db8::1", 0, 0, 0),
}
"""Addresses for documentation, which no machine has (RFC 5737, RFC 3849)."""


def resolve(name: str) -> list[Address]:
    """The addresses that the system has for a name or a numeric address. Raises OSError or UnicodeError."""
    found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    return [(family, address) for family, _, _, _, address in found if family in _NOBODYS]


def binds(address: Address) -> bool:
    """Whether a socket can be bound to the address."""
    family, where = address
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(where)
    except OSError:
        return False
    return True


def is_own(address: Address, *, binds: Callable[[Address], bool] = binds) -> bool:
    """Whether the address belongs to this machine: a socket can be bound to it.

    Where the kernel binds any address (sysctl ip_nonlocal_bind), the answer is no.
    """
    family, _ = address
    return binds(address) and not binds((family, _NOBODYS[family]))


def own_addresses() -> list[str]:
    """All addresses of this machine's interfaces, IPv4 and IPv6."""
    from hvlaunch.agent.facts import interface_addresses  # noqa: PLC0415 (only a job with remote hosts needs it)

    return [address for addresses in interface_addresses().values() for address in addresses]


@functools.cache
def _hosts_file() -> Mapping[str, Iterable[str]]:
    """The numeric addresses that /etc/hosts has for each name, in lower case."""
    found: dict[str, list[str]] = {}
    with suppress(OSError):
        for line in _HOSTS_FILE.read_text("utf-8", "replace").splitlines():
            address, *names = line.partition("#")[0].split() or [""]
            for name in names if _is_numeric(address) else ():
                found.setdefault(name.lower(), []).append(address)
    return found


def _is_numeric(text: str) -> bool:
    for convert in (socket.inet_aton, _ipv6):
        with suppress(OSError, UnicodeError):
            convert(text)
            return True
    return False


def _ipv6(text: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6, text.partition("%")[0])


def current_user() -> str | None:
    """The login name of this process; None where its uid has no entry, as in some containers."""
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
    """Whether this machine itself says that the name is its own: by its hostname, in any domain, or in /etc/hosts.

    Numeric addresses are as good: nobody else says whose they are.
    """
    name = name.lower().removesuffix(".")
    own = hostname().lower()
    if name == own or name.partition(".")[0] == own or name == own.partition(".")[0] or _is_numeric(name):
        return True
    listed = (hosts_file or _hosts_file)().get(name, ())
    return any(is_own(known) for address in listed for known in resolve(address))


def is_local(
    host: Host,
    *,
    is_own_name: Callable[[str], bool] = is_own_name,
    resolve: Callable[[str], Iterable[Address]] = resolve,
    is_own: Callable[[Address], bool] = is_own,
    user: Callable[[], str | None] = current_user,
) -> bool:
    """Whether workers of `host` run without ssh: it is `localhost`, or a name of this machine's own that leads to it.

    Where only DNS says that a name is this machine, it is left to ssh, which asks for the host's key: whoever
    answers for DNS must not choose where workers run. So is a host with a port, or with another user: it may be a
    tunnel or a container. Resolving may take seconds.
    """
    if host.port is not None or (host.user is not None and host.user != user()):
        return False
    name = host.address or host.name
    if name == "localhost":
        return True
    if not is_own_name(name):
        return False
    try:
        addresses = resolve(name)
    except (
        OSError,
        UnicodeError,
    ):  # UnicodeError: not a name at all, such as one with 64 letters before a dot
        return False
    return any(is_own(address) for address in addresses)


def is_here_by_dns(
    host: Host,
    *,
    is_own_name: Callable[[str], bool] = is_own_name,
    resolve: Callable[[str], Iterable[Address]] = resolve,
    is_own: Callable[[Address], bool] = is_own,
) -> bool:
    """Whether DNS, and nobody else, says that the host is this machine."""
    name = host.address or host.name
    if name == "localhost" or is_own_name(name):
        return False
    with suppress(OSError, UnicodeError):
        return any(is_own(address) for address in resolve(name))
    return False


def only_local(spec: JobSpec, *, is_local: Callable[[Host], bool] = is_local) -> bool:
    """Whether all hosts that the job may ever have are this machine."""
    return not (spec.elastic and spec.elastic.discovers) and all(map(is_local, spec.hosts))


def may_be_taken_over(spec: JobSpec) -> bool:
    """Whether another driver may go on with the job: its agents are hvlaunch's own, it is no foreground job of this machine alone, and nobody waits for what a function returns."""
    is_own = launcher_of(spec) is None and spec.call is None
    return is_own and (spec.detach != "never" or not only_local(spec))


def launcher_of(spec: JobSpec) -> str | None:
    """The program whose children the job's agents are, where that is not hvlaunch: no other driver could be its parent."""
    if spec.mpi is not None:
        return spec.mpi.launcher
    return None if spec.ssh.remote_agent is None else Path(spec.ssh.remote_agent).name
