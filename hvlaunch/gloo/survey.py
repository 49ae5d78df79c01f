"""The survey of hosts for --nccl auto and --rank-order: hardware, times between hosts, and a trial of two networks.

It runs when a host's agent is there, before workers start. A host that can't be surveyed gets workers as usual.
"""

import secrets
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

from hvlaunch.agent.errands.pairs import MEASURES, PORTS
from hvlaunch.agent.quick import dumps
from hvlaunch.driver.links.errands import Answers, Errand, Limits, write_line
from hvlaunch.engine.fabric import Fabric, fabric_of
from hvlaunch.engine.hosts import candidates
from hvlaunch.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.engine.events import HostFacts
    from hvlaunch.job import JobSpec

__all__ = ["Survey"]

_LIMITS = Limits(seconds=20.0)
_TRIAL = {
    "patience": 1.0,
    "settle": 0.5,
    "paced": 1,
    "pace": 12_500_000,
    "size": 1 << 40,
    "seconds": 0.25,
    "tries": 1,
}
"""A stream in each network for a quarter of a second."""
_MOST_NETWORKS = 4


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
    ends = list(ways.values())[:_MOST_NETWORKS]
    key = secrets.token_hex(32)
    with closing(_Streaming(receiver, key)) as receiving, closing(_Streaming(sender, key)) as sending:
        way = {"name": receiver.host.name, "ports": receiving.ports, **_TRIAL}
        # The streams take turns: at the same time they would share a cable.
        rates = sending.rates(
            [{"addresses": [end["receiver"].address], "from": end["sender"].address, **way} for end in ends]
        )
    return [
        (end["receiver"].address, end["sender"].address, rate) for end, rate in zip(ends, rates, strict=False)
    ]


class _Streaming:
    """A host that receives streams and sends some: the errand `pairs`. Raises ErrandFailed, like `rates`."""

    def __init__(self, link: "HostLink", key: str) -> None:
        name = link.host.name
        self._errand = link.errands.start(
            "pairs", {"key": key, "name": name, "address": None, "ports": []}, _LIMITS
        )
        self._answers = Answers(self._errand, name)
        self.ports: list[int] = self._answers.next(PORTS)["ports"]

    def rates(self, dials: list[dict[str, Any]]) -> list[float]:
        """Return bytes per second for each; 0 for a stream that did not arrive."""
        write_line(self._errand, dials)
        return [float(measure["rate"] or 0.0) for measure in self._answers.next(MEASURES)]

    def close(self) -> None:
        self._errand.stop()
