"""The interface that the host is reached by, its network hardware, and variables that lead programs to a proxy."""

from __future__ import annotations

import os

from hvlaunch.agent.facts import interface_networks
from hvlaunch.agent.facts.fabric import FABRIC, read_fabric
from hvlaunch.agent.wire.frames import mapping, or_null, plain, record, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict

__all__ = ["SHAPE", "read"]

SHAPE = record(
    {
        "interface": or_null(text(64)),
        "address": or_null(text(64)),
        "fabric": FABRIC,
        "proxies": mapping(text(64), text(300), 16),
    }
)
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy", "no_proxy")


def read(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Return the part."""
    address = arguments["address"]
    networks = interface_networks()
    names = [
        name
        for name, listed in networks.items()
        if any(network.partition("/")[0] == address for network in listed)
    ]
    environ = dict(os.environ, **arguments["env"])
    proxies = {
        name: plain(_without_password(environ[name]), 300)
        for lower in _PROXIES
        for name in (lower, lower.upper())
        if environ.get(name)
    }
    return {
        "interface": names[0] if names else None,
        "address": address if names else None,
        "fabric": read_fabric("", networks),
        "proxies": proxies,
    }


def _without_password(url: str) -> str:
    scheme, marks, address = url.rpartition("://")
    return scheme + marks + address.rpartition("@")[2]
