"""The survey of hosts for --nccl auto and --rank-order: hardware, times between hosts, and a trial of two networks.

It runs when a host's agent is there, before workers start. A host that can't be surveyed gets workers as usual.
"""

import threading
from typing import TYPE_CHECKING, Any

from hvlaunch.agent.quick import dumps
from hvlaunch.driver.links.errands import Errand, Limits
from hvlaunch.engine.fabric import Fabric, fabric_of
from hvlaunch.engine.network import candidates
from hvlaunch.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.engine.events import HostFacts
    from hvlaunch.engine.fabric import Way
    from hvlaunch.job import JobSpec

__all__ = ["Survey"]

_LIMITS = Limits(seconds=20.0)
_STREAMING = 0.25
"""Seconds of a trial in each network."""
_MOST_NETWORKS = 4
_PATIENCE = 5.0


class Survey:
    """Surveys the hosts of a job, each once per connection. For the threads of several links."""

    def __init__(self, spec: "JobSpec") -> None:
        self._chooses = spec.nccl == "auto"
        self._orders = spec.rank_order != "given"
        self._measures = spec.rank_order == "measured"
        self._lock = threading.Lock()
        self._hosts: dict[str, tuple[HostLink, HostFacts, Fabric]] = {}
        """Surveyed hosts, in the order of their surveys."""
        self._is_tried = False

    def look(self, link: "HostLink", facts: "HostFacts", ready: "Callable[[HostFacts], None]") -> None:
        """Call `ready` with the facts of a host and its fabric, or without a fabric if the survey fails."""
        try:
            survey = self._survey(link, facts)
        except HostError:
            ready(facts)
        else:
            ready(facts._replace(fabric=dumps(survey)))

    def _survey(self, link: "HostLink", facts: "HostFacts") -> dict[str, Any]:
        """Return the data for fabric_of(). Raises ErrandFailed."""
        survey: dict[str, Any] = _result(_start(link, {"fabric": True, "nvlink": self._orders}))
        survey["trials"] = []
        fabric = fabric_of(dumps(survey))
        with self._lock:
            # Each pair is measured once: by the later host.
            others = {name: host for name, host in self._hosts.items() if name != link.host.name}
            self._hosts[link.host.name] = link, facts, fabric
            tries = self._chooses and not self._is_tried and bool(others)
            self._is_tried = self._is_tried or tries
        if self._measures and others:
            targets = {
                name: {"addresses": list(candidates(other)), "port": other.beacon_port}
                for name, (_, other, _) in others.items()
            }
            survey["times"] = _result(_start(link, {"times": targets}))["times"]
        if tries:
            first, _, its_fabric = next(iter(others.values()))
            survey["trials"] = _try_networks(first, its_fabric, link, fabric)
        return survey


def _start(link: "HostLink", arguments: "Mapping[str, Any]") -> Errand:
    """Raises ErrandFailed."""
    return link.errands.start("network", arguments, _LIMITS)


def _result(errand: Errand) -> Any:
    """Raises ErrandFailed."""
    # A host whose network is cut has the lease's time, and then its errand fails.
    errand.wait(None)
    return errand.result()


def _try_networks(
    sender: "HostLink", its_fabric: Fabric, receiver: "HostLink", fabric: Fabric
) -> list[tuple[str, str, float]]:
    """Return the short streams in the networks of two hosts, if these need a trial. Raises ErrandFailed."""
    from hvlaunch.engine.fabric import common_ways, needs_trial  # noqa: PLC0415 (few jobs have a choice)

    ways = common_ways({"sender": its_fabric, "receiver": fabric})
    if not needs_trial(ways):
        return []
    # One after the other: streams at the same time would share a cable.
    return [
        _stream(sender, by_host["sender"], receiver, by_host["receiver"])
        for by_host in list(ways.values())[:_MOST_NETWORKS]
    ]


def _stream(sender: "HostLink", way: "Way", receiver: "HostLink", its_way: "Way") -> tuple[str, str, float]:
    """Return the receiver's address, the sender's, and bytes per second. Raises ErrandFailed."""
    receiving = _start(receiver, {"receive": its_way.address, "seconds": _STREAMING})
    port = receiving.read(_PATIENCE) or b""
    if port.strip().isdigit():
        target = {"from": way.address, "to": its_way.address, "port": int(port)}
        _result(_start(sender, {"send": target, "seconds": _STREAMING}))
    return its_way.address, way.address, float(_result(receiving)["rate"] or 0.0)
