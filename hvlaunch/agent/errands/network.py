"""Looks at the network of this host: hardware, times to other hosts, and the speed of a short stream to another host."""

from __future__ import annotations

import os
import socket
import time

from hvlaunch.agent.fabric import FABRIC, chosen_variables, read_fabric
from hvlaunch.agent.facts import interface_networks
from hvlaunch.agent.wire.shapes import PORT, address, flag, mapping, number, or_null, record, several, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional

    from hvlaunch.agent.errand_runner import ErrandStream

__all__ = ["ARGUMENTS", "RESULT", "run"]

_MOST_HOSTS = 1024
_SECONDS = number(0, 3600)
ARGUMENTS = record(
    {
        "fabric": flag,
        "nvlink": flag,
        "times": mapping(text(1024), record({"addresses": several(address, 64), "port": PORT}), _MOST_HOSTS),
        "receive": or_null(address),  # where to receive a stream
        "send": or_null(record({"from": address, "to": address, "port": PORT})),
        "seconds": _SECONDS,  # of the stream
    },
    optional=("fabric", "nvlink", "times", "receive", "send", "seconds"),
)
RESULT = record(
    {
        "fabric": or_null(FABRIC),
        "nvlink": or_null(text(256)),  # the clusters that its GPUs are in
        "times": mapping(text(1024), _SECONDS, _MOST_HOSTS),
        "rate": or_null(number(0, 1e15)),  # bytes per second
    },
)

_TRIES = 5
_MEASURING = 10.0  # seconds for the times to all hosts
_PATIENCE = 1.0  # seconds for a connection
_PIECE = 1 << 18


def run(arguments: Dict[str, Any], stream: ErrandStream) -> Dict[str, Any]:
    """Read, measure, receive and send, as the arguments ask."""
    fabric = nvlink = rate = None
    if arguments.get("fabric"):
        fabric = read_fabric("", interface_networks())
        fabric["variables"] = chosen_variables(os.environ)
    if arguments.get("nvlink"):
        nvlink = _nvlink()
    end = time.monotonic() + _MEASURING
    times = {host: _time_to(end=end, **target) for host, target in arguments.get("times", {}).items()}
    if arguments.get("receive"):
        rate = _receive(arguments["receive"], arguments["seconds"], stream)
    if arguments.get("send"):
        _send(arguments["send"], arguments["seconds"])
    return {
        "fabric": fabric,
        "nvlink": nvlink,
        "times": {host: seconds for host, seconds in times.items() if seconds is not None},
        "rate": rate,
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


def _listener(at: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in at else socket.AF_INET)
    listener.bind((at, 0))
    listener.listen(1)
    listener.settimeout(2 * _PATIENCE)
    return listener


def _receive(at: str, seconds: float, stream: ErrandStream) -> Optional[float]:
    """Return the rate of a stream from another host; None without a stream."""
    listener = _listener(at)
    try:
        stream.write(b"%d\n" % listener.getsockname()[1])
        connection = listener.accept()[0]
    except OSError:
        return None
    finally:
        listener.close()
    count, began = 0, time.perf_counter()
    end = began + seconds + _PATIENCE
    last = began
    buffer = bytearray(_PIECE)
    with connection:
        connection.settimeout(_PATIENCE)
        try:
            while time.perf_counter() < end and (size := connection.recv_into(buffer)):
                count, last = count + size, time.perf_counter()
        except OSError:
            pass
    return count / (last - began) if last > began else None


def _send(way: Dict[str, Any], seconds: float) -> None:
    """Send a stream for this time. A dead way is no error: the receiver notices."""
    end = time.perf_counter() + seconds
    data = bytes(_PIECE)
    try:
        with socket.create_connection((way["to"], way["port"]), _PATIENCE, (way["from"], 0)) as connection:
            connection.settimeout(_PATIENCE)
            while time.perf_counter() < end:
                connection.sendall(data)
    except OSError:
        pass
