"""The interface that the host is reached by, and variables that lead programs to a proxy."""

from __future__ import annotations

import os

from hvlaunch.agent.errands.observer.proc import read_text
from hvlaunch.agent.facts import interface_addresses
from hvlaunch.agent.wire.shapes import mapping, or_null, plain, record, text, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Optional

__all__ = ["SHAPE", "read"]

_COUNT = or_null(whole(0, 1 << 40))
SHAPE = record(
    {
        "interface": or_null(text(64)),
        "address": or_null(text(64)),
        "mtu": _COUNT,
        "speed": _COUNT,  # Mbit/s
        "proxies": mapping(text(64), text(300), 16),
    }
)
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy", "no_proxy")


def read(arguments: Dict[str, Any], root: str = "") -> Dict[str, Any]:
    """Return the part. `root` is the folder of /sys."""
    address = arguments["address"]
    interface = next((name for name, listed in interface_addresses().items() if address in listed), None)
    environ = dict(os.environ, **arguments["env"])
    proxies = {
        name: plain(_without_password(environ[name]), 300)
        for lower in _PROXIES
        for name in (lower, lower.upper())
        if environ.get(name)
    }
    return {
        "interface": interface,
        "address": None if interface is None else address,
        "mtu": _number(interface, "mtu", root),
        "speed": _number(interface, "speed", root),
        "proxies": proxies,
    }


def _number(interface: Optional[str], name: str, root: str) -> Optional[int]:
    # An interface without a speed has -1, or refuses to be read.
    words = (read_text("%s/sys/class/net/%s/%s" % (root, interface, name)) or "").strip()
    return int(words) if words.isdigit() else None


def _without_password(url: str) -> str:
    scheme, marks, address = url.rpartition("://")
    return scheme + marks + address.rpartition("@")[2]
