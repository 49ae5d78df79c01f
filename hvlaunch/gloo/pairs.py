"""Measures pairs of hosts: each host dials some others, and suspicious pairs are measured again before they count."""

import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvlaunch.agent.errands.pairs import MEASURES, PORTS
from hvlaunch.check import Finding, Values
from hvlaunch.check.measures import Measure, Pair, find_faults, findings_of_pairs, partners, values_of_pairs
from hvlaunch.driver.links.errands import Answers, Errand, write_line
from hvlaunch.engine.network import candidates
from hvlaunch.gloo.examination import Gathering

if TYPE_CHECKING:
    from hvlaunch.engine.events import HostFacts

__all__ = ["Pairs"]

_MOST_ADDRESSES = 4
_STEP = 60.0
"""Seconds for a step."""
_LONG = 3600.0
# Seconds for connections, and from the first success on; bytes at a slow pace, the pace, bytes at full speed, seconds and tries for them.
_FIRST = {
    "patience": 1.3,
    "settle": 0.5,
    "paced": 1 << 18,
    "pace": 12_500_000,
    "size": 1 << 21,
    "seconds": 0.15,
    "tries": 1,
}
_AGAIN = {
    "patience": 4.0,
    "settle": 1.5,
    "paced": 1 << 21,
    "pace": 12_500_000,
    "size": 1 << 23,
    "seconds": 0.3,
    "tries": 3,
}


class Pairs:
    """Measures between the hosts `names`. `ports` are ports of the job, if its user has chosen some."""

    def __init__(self, names: Sequence[str], ports: Sequence[int] = ()) -> None:
        self._names = names
        self._ports = list(ports)
        self._key = secrets.token_hex(32)
        self.gathering = Gathering(names)
        self._places: dict[str, dict[str, Any]] = {}
        """Addresses and ports at which each host listens."""
        self._first: dict[Pair, Measure] = {}
        self._again: dict[Pair, Measure] = {}
        self._suspects: Mapping[str, list[str]] | None = None
        self._judging = threading.Lock()
        self._ephemeral = (1 << 16, 1)

    def findings(self) -> list[Finding]:
        """Return the faults between the measured hosts."""
        return findings_of_pairs(self._measures(), self._names, self._ephemeral)

    def values(self) -> dict[str, Values]:
        """Return values for the table, by host."""
        return values_of_pairs(self._measures(), self._names)

    def _measures(self) -> dict[Pair, Measure]:
        again = {
            pair: _best(self._first[pair], measure)
            for pair, measure in self._again.items()
            if pair in self._first
        }
        return {**self._first, **again}

    def arguments(self, name: str, facts: "HostFacts") -> Mapping[str, Any]:
        """Return a host's arguments of agent/errands/pairs.py."""
        address = facts.peer_address or None
        return {"key": self._key, "name": name, "address": address, "ports": self._ports}

    def measure(self, name: str, facts: "HostFacts", errand: Errand, answers: Answers) -> None:
        """Measure from one host, in its thread, while the threads of the others do so. Raises ErrandFailed."""
        try:
            self._measure(name, facts, errand, answers)
        finally:
            self.gathering.leave(name)

    def _measure(self, name: str, facts: "HostFacts", errand: Errand, answers: Answers) -> None:
        listening = answers.next(PORTS)
        low, high = self._ephemeral
        self._ephemeral = min(low, listening["low"]), max(high, listening["high"])
        self._places[name] = {
            "addresses": candidates(facts)[:_MOST_ADDRESSES],
            "ports": listening["ports"],
        }
        # Unreachable hosts leave, hence the wait for a slow host has an end.
        arrived = self.gathering.meet(name, "places", _LONG)
        hosts = [host for host in self._names if host in arrived]
        position = hosts.index(name)
        targets = [hosts[(position + distance) % len(hosts)] for distance in partners(len(hosts))]
        self._first |= self._dial(name, targets, errand, answers, _FIRST)
        self.gathering.meet(name, "first", _STEP)
        targets = self._suspects_of(hosts).get(name, [])
        self._again |= self._dial(name, targets, errand, answers, _AGAIN)
        # Until the others have dialed, this host listens.
        self.gathering.meet(name, "again", _STEP)

    def _suspects_of(self, hosts: Sequence[str]) -> Mapping[str, list[str]]:
        """Return _suspicious() of the first measures."""
        # Once: each host's thread asks, and the time for an answer grows with the number of hosts too.
        with self._judging:
            if self._suspects is None:
                self._suspects = _suspicious(dict(self._first), hosts)
            return self._suspects

    def _dial(
        self,
        name: str,
        targets: Sequence[str],
        errand: Errand,
        answers: Answers,
        how: Mapping[str, Any],
    ) -> dict[Pair, Measure]:
        if not targets:
            return {}
        dials = [{"name": target, **self._places[target], **how} for target in targets]
        write_line(errand, dials)
        measures = answers.next(MEASURES)
        return {
            (name, target): Measure(
                frozenset(self._places[target]["ports"]),
                frozenset(answer["reached"]) & frozenset(self._places[target]["ports"]),
                *(answer[key] for key in ("address", "rtt", "loss", "rate", "mtu")),
            )
            for target, answer in zip(targets, measures, strict=False)
        }


def _suspicious(measures: Mapping[Pair, Measure], hosts: Sequence[str]) -> Mapping[str, list[str]]:
    """Return the pairs to be measured again, as the hosts that each host dials.

    The bad pairs are suspicious, and all pairs of a host that may be their cause. Loss in a short stream is a matter of
    luck: it makes both ends suspicious.
    """
    pairs: set[Pair] = set()
    # A short stream may lose nothing on a link that loses 1 %, or a segment on a good one.
    for fault in find_faults(measures, hosts, lossy=0.0):
        pairs.update(fault.measures)
        if fault.scope in ("host", "to", "from") or fault.kind == "loss":
            pairs.update(pair for pair in measures if not {*fault.hosts}.isdisjoint(pair))
        else:
            pairs.update((listener, dialer) for dialer, listener in fault.measures)
    dials: dict[str, list[str]] = {}
    for dialer, listener in sorted(pairs):
        dials.setdefault(dialer, []).append(listener)
    return dials


def _best(first: Measure, second: Measure) -> Measure:
    """Join both measures of a pair: load can make a measure worse, never better."""
    return Measure(
        first.tried,
        first.reached | second.reached,
        second.address or first.address,
        min((rtt for rtt in (first.rtt, second.rtt) if rtt is not None), default=None),
        # The second is the longer one.
        first.loss if second.loss is None else second.loss,
        max((rate for rate in (first.rate, second.rate) if rate is not None), default=None),
        first.mtu if second.rtt is None else second.mtu,
    )
