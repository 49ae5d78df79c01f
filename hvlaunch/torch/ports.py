"""The ports that workers may listen on, where a firewall lets only some through."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from hvlaunch.torch.group_errors import BadPlace, PortsTaken

__all__ = ["port_range", "reserve"]

_BACKLOG = 2048


def port_range(environ: Mapping[str, str]) -> range | None:
    """HVLAUNCH_WORKER_PORTS, `FIRST-LAST`; None where every port may be used. Raises BadPlace."""
    text = environ.get("HVLAUNCH_WORKER_PORTS", "")
    if not text:
        return None
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if found is None or not 0 < int(found[1]) <= int(found[2]) < 1 << 16:
        raise BadPlace("HVLAUNCH_WORKER_PORTS", f"{text!r} is not a range of ports, FIRST-LAST")
    return range(int(found[1]), int(found[2]) + 1)


def reserve(ports: range) -> socket.socket:
    """A socket that listens on the first of these ports that is free. Raises PortsTaken."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
        except OSError:  # noqa: PERF203 (a taken port is an answer)
            continue
    raise PortsTaken(ports[0], ports[-1])
