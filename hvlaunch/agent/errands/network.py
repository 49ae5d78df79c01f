"""Looks at the network of this host: hardware, and times to other hosts."""

from __future__ import annotations

import os
import socket
import time

from hvlaunch.agent.facts import interface_networks
from hvlaunch.agent.facts.fabric import FABRIC, chosen_variables, read_fabric
from hvlaunch.agent.wire.frames import PORT, address, flag, mapping, number, or_null, record, several, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional

    from hvlaunch.agent.errands import ErrandStream

__all__ = ["ARGUMENTS", "RESULT", "run"]

_MOST_HOSTS = 1024
ARGUMENTS = record(
    {
        "fabric": flag,
        "nvlink": flag,
        "times": mapping(text(1024), record({"addresses": several(address, 64), "port": PORT}), _MOST_HOSTS),
    },
    optional=("fabric", "nvlink", "times"),
)
RESULT = record(
    {
        "fabric": or_null(FABRIC),
        "nvlink": or_null(text(256)),  # the clusters that its GPUs are in
        "times": mapping(text(1024), number(0, 3600), _MOST_HOSTS),
    },
)

_TRIES = 5
_MEASURING = 10.0  # seconds for the times to all hosts
_PATIENCE = 1.0  # seconds for a connection


def run(arguments: Dict[str, Any], stream: ErrandStream) -> Dict[str, Any]:  # noqa: ARG001 (every errand has it)
    """Read and measure, as the arguments ask."""
    fabric = nvlink = None
    if arguments.get("fabric"):
        fabric = read_fabric("", interface_networks())
        fabric["variables"] = chosen_variables(os.environ)
    if arguments.get("nvlink"):
        nvlink = _nvlink()
    end = time.monotonic() + _MEASURING
    times = {host: _time_to(end=end, **target) for host, target in arguments.get("times", {}).items()}
    return {
        "fabric": fabric,
        "nvlink": nvlink,
        "times": {host: seconds for host, seconds in times.items() if seconds is not None},
    }


def _nvlink() -> Optional[str]:
    from hvlaunch.agent.errands.observer.nvml import Library, NoGpus  # noqa: PLC0415 (few jobs ask, and ctypes takes time)

    try:
        return ",".join(Library().clusters())[:256] or None
    except NoGpus:
        return None


def _time_to(addresses: List[str], port: int, end: float) -> Optional[float]:
    """Return the shortest time of a few connections to a host, by the first address with an answer."""
    here = {network.partition("/")[0] for networks in interface_networks().values() for network in networks}
    for target in addresses:
        # Every host has docker0's address, and answers itself there.
        if target in here or time.monotonic() > end:
            continue
        best: Optional[float] = None
        for _ in range(_TRIES):
            began = time.perf_counter()
            try:
                socket.create_connection((target, port), _PATIENCE).close()
            except OSError:
                break
            took = time.perf_counter() - began
            best = took if best is None else min(best, took)
        if best is not None:
            return best
    return None
