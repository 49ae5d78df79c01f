"""Measures of hosts over a visit, for `hvlaunch check`: pairs of hosts, and products and all_reduces (`--deep`).

Each host dials some others, and suspicious pairs are measured again before they count. Products and all_reduces run by the job's
Python.
"""

import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvlaunch.agent.errands.deep import OUTCOMES
from hvlaunch.agent.errands.deep import PORTS as PORTS_OF_DEEP
from hvlaunch.agent.errands.pairs import MEASURES, PORTS
from hvlaunch.check import Finding, Values
from hvlaunch.check.measures import (
    DeviceTimes,
    Group,
    Measure,
    Pair,
    SumOfGroup,
    find_faults,
    findings_of_groups,
    findings_of_pairs,
    findings_of_products,
    next_groups,
    partners,
    values_of_pairs,
)
from hvlaunch.driver.links.errands import Answers, Errand, Limits, write_line
from hvlaunch.engine.hosts import LOOPBACK, candidates, interface_of
from hvlaunch.gloo.examination import Gathering

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.engine.events import HostFacts

__all__ = ["Deep", "Pairs"]

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


_LIMITS = Limits(seconds=None, memory=None, output=1 << 24)
_SECONDS = 90.0
"""Seconds for a run; importing torch from a network file system may take most of them."""
_STEP_OF_DEEP = 2 * _SECONDS
_DIAGNOSTICS = [2, 31]
"""First version of NCCL with diagnostics of its own."""


class Deep:
    """Runs on the hosts `names` by `program`, for their findings."""

    def __init__(self, names: Sequence[str], program: str, env: Mapping[str, str], cwd: str) -> None:
        self._names = names
        self._arguments = {"program": program, "directory": cwd, "env": dict(env)}
        self.gathering = Gathering(names)
        self._lock = threading.Lock()
        self._ports: dict[str, list[int]] = {}
        self._facts: dict[str, HostFacts] = {}
        self._alone: dict[str, dict[str, Any]] = {}
        """Outcome of each host alone."""
        self._sums: dict[tuple[int, str], list[dict[str, Any]]] = {}
        """Outcomes of the processes of a host in a round."""
        self._rounds: list[list[SumOfGroup]] = []

    def findings(self) -> list[Finding]:
        """Return the slow and the broken hosts."""
        findings: list[Finding] = []
        for host, outcome in self._alone.items():
            if outcome["error"]:
                remedy = (
                    "install torch for the job's Python there, or name that Python: hvlaunch check … PYTHON"
                )
                findings.append(Finding(host, "error", "matmul", outcome["error"], remedy))
            elif outcome["wrong"]:
                findings.append(
                    Finding(
                        host,
                        "error",
                        "matmul",
                        "a product of matrices is wrong",
                        "leave the host out; look at its memory and GPUs",
                    )
                )
        times = {
            host: DeviceTimes(outcome["gpus"] > 0, outcome["matmul"])
            for host, outcome in self._alone.items()
            if not outcome["error"]
        }
        findings += [*findings_of_products(times), *findings_of_groups(self._rounds)]
        for (_, host), outcomes in self._sums.items():
            for note in dict.fromkeys(note for outcome in outcomes for note in outcome["notes"]):
                findings.append(Finding(host, "warning", "nccl", note, "see NCCL's page on diagnostics"))
        return findings

    def values(self) -> dict[str, Values]:
        """Return values for the table, by host."""
        return {
            host: {"matmul": outcome["matmul"], "sum": self._last_sum(host), "nccl": outcome["nccl"]}
            for host, outcome in self._alone.items()
            if not outcome["error"]
        }

    def _last_sum(self, host: str) -> float | None:
        sums = [
            outcome["sum"]
            for (_, name), outcomes in self._sums.items()
            if name == host
            for outcome in outcomes
        ]
        return next((seconds for seconds in reversed(sums) if seconds is not None), None)

    def measure(self, link: "HostLink", facts: "HostFacts") -> None:
        """Take part with one host, in its thread. Raises ErrandFailed."""
        name = link.host.name
        errand = link.errands.start("deep", self._arguments, _LIMITS)
        try:
            self._measure(name, facts, errand)
        finally:
            errand.stop()
            self.gathering.leave(name)

    def _measure(self, name: str, facts: "HostFacts", errand: Errand) -> None:
        answers = Answers(errand, name)
        self._facts[name] = facts
        self._ports[name] = answers.next(PORTS_OF_DEEP)
        self._alone[name] = self._order(errand, answers, {"size": 0, "local": 0, "rank": 0, "env": {}})[0]
        self.gathering.meet(name, "alone", _STEP_OF_DEEP)
        number = 0
        while groups := self._groups(number):
            group = next((group for group in groups if name in group), None)
            if group is not None:
                self._sums[number, name] = self._order(errand, answers, self._part(group, name, number))
            self.gathering.meet(name, f"round {number}", _STEP_OF_DEEP)
            number += 1

    def _groups(self, number: int) -> list[Group]:
        """Return the groups of a round; the same for each host."""
        with self._lock:
            hosts = [name for name in self._names if name in self._alone and not self._alone[name]["error"]]
            while len(self._rounds) < number:
                earlier = next_groups(hosts, self._rounds)
                self._rounds.append([self._sum(group, len(self._rounds)) for group in earlier])
            return next_groups(hosts, self._rounds[:number]) if hosts else []

    def _sum(self, group: Group, number: int) -> SumOfGroup:
        outcomes = [outcome for host in group for outcome in self._sums.get((number, host), [])]
        errors = [outcome["error"] for outcome in outcomes if outcome["error"]]
        seconds = [outcome["sum"] for outcome in outcomes if outcome["sum"] is not None]
        if any(outcome["wrong"] for outcome in outcomes):
            errors.append("its result is wrong")
        if errors or not seconds:
            return SumOfGroup(group, None, errors[0] if errors else "no result")
        return SumOfGroup(group, max(seconds))

    def _part(self, group: Group, name: str, number: int) -> Mapping[str, Any]:
        """Return the run of one host in its group."""
        local = [max(1, self._alone[host]["gpus"]) for host in group]
        position = group.index(name)
        facts = self._facts[name]
        addresses = [candidates(self._facts[host])[:1] or (LOOPBACK,) for host in group]
        address = addresses[0][0] if len(group) > 1 else LOOPBACK
        interface = interface_of(facts, addresses[position][0] if len(group) > 1 else LOOPBACK)
        env = {"MASTER_ADDR": address, "MASTER_PORT": str(self._ports[group[0]][number])}
        if interface is not None:
            env["GLOO_SOCKET_IFNAME"] = env["NCCL_SOCKET_IFNAME"] = interface
        versions = [self._alone[host]["nccl"] for host in group]
        if all(version is not None and version >= _DIAGNOSTICS for version in versions):
            env["NCCL_RUN_DIAGNOSTICS"] = "1"
        return {"size": sum(local), "local": local[position], "rank": sum(local[:position]), "env": env}

    @staticmethod
    def _order(errand: Errand, answers: Answers, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        write_line(errand, {**order, "seconds": _SECONDS})
        outcomes: list[dict[str, Any]] = answers.next(OUTCOMES)
        return outcomes or [{"error": "no result"}]
