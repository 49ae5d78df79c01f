"""What the hosts of a job on a warm pool find out of the network, told to the pool when the job has ended well: the next need not."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hvlaunch.agent.shapes import address as is_address
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.errors import HvlaunchError
from hvlaunch.job import JobResult
from hvlaunch.outside.pools import KnownPool, ask

__all__ = ["WarmFindings"]

_PATIENCE = 1.0
"""Seconds, at the end of a job."""


class WarmFindings:
    """Sees all turns of a driver's loop. `port` is that of the rendezvous, where the user has chosen it."""

    def __init__(self, pool: KnownPool, port: int) -> None:
        self._pool = pool
        self._port = port or None
        self._tried: dict[tuple[str, str], tuple[str, ...]] = {}
        self._found: dict[str, dict[str, Any]] = {}
        self._goes_by_earlier = False

    def see(self, event: on.Event, actions: Sequence[do.Action], _now: float) -> None:
        """A turn. At the last one the pool is told."""
        match event:
            case on.HostReady(_, facts):
                self._goes_by_earlier |= bool(facts.findings) or facts.rendezvous is not None
            case on.HostProbed(host, target, str(address), 0) if (host, target) in self._tried:
                tried = [*self._tried[host, target]]
                self._of(host)["hosts"].setdefault(target, [tried, []])[1].append(address)
            case on.RendezvousReached(host, str(address), tried, None) if all(map(is_address, tried)):
                known = {"tried": list(tried), "port": self._port, "at": address}
                self._of(host)["rendezvous"] = known
            case _:
                pass
        for action in actions:
            match action:
                case do.Probe(host, target, addresses, _, 0) if all(map(is_address, addresses)):
                    self._tried[host, target] = addresses
                case do.Finish(result):
                    self._tell(result)
                case _:
                    pass

    def _of(self, host: str) -> dict[str, Any]:
        return self._found.setdefault(host, {"hosts": {}, "rendezvous": None})

    def _tell(self, result: JobResult) -> None:
        """Where a job has failed, it may have been for what was found earlier."""
        request: dict[str, Any] = {"what": "found", "found": self._found}
        if result.exit_code != 0:
            request = {"what": "forget"}
        if self._found if result.exit_code == 0 else self._goes_by_earlier:
            with suppress(HvlaunchError):  # the pool is gone
                ask(self._pool, request, timeout=_PATIENCE)
