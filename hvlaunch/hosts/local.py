"""Which of the hosts is this machine, and so needs no ssh."""

import os
import pwd
import socket
from collections.abc import Callable, Iterable
from typing import Any

from hvlaunch.job import Host

__all__ = ["Address", "binds", "current_user", "is_local", "is_own", "own_addresses", "resolve"]

Address = tuple[socket.AddressFamily, tuple[Any, ...]]
"""A family and a socket address of it, port 0."""

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
    import psutil  # noqa: PLC0415 (only a job with remote hosts needs it)

    return [
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in _NOBODYS
    ]


def current_user() -> str | None:
    """The login name of this process; None where its uid has no entry, as in some containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return None


def is_local(
    host: Host,
    *,
    resolve: Callable[[str], Iterable[Address]] = resolve,
    is_own: Callable[[Address], bool] = is_own,
    user: Callable[[], str | None] = current_user,
) -> bool:
    """Whether workers of `host` run without ssh: it is `localhost` or resolves to an address of this machine.

    A host with a port, or with another user, needs ssh: it may be a tunnel or a container. A name
    that does not resolve is left to ssh, whose config may know it. Resolving may take seconds.
    """
    if host.port is not None or (host.user is not None and host.user != user()):
        return False
    name = host.address or host.name
    if name == "localhost":
        return True
    try:
        addresses = resolve(name)
    except (
        OSError,
        UnicodeError,
    ):  # UnicodeError: not a name at all, such as one with 64 letters before a dot
        return False
    return any(is_own(address) for address in addresses)
