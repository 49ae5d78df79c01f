"""Runs products and all_reduces on the hosts of a visit, by the job's Python: for `hvlaunch check --deep`."""

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvlaunch.agent.errands.deep import OUTCOMES, PORTS
from hvlaunch.check import Finding, Values
from hvlaunch.check.measures import (
    DeviceTimes,
    Group,
    SumOfGroup,
    findings_of_groups,
    findings_of_products,
    next_groups,
)
from hvlaunch.driver.links.errands import Answers, Errand, Limits, write_line
from hvlaunch.engine.network import LOOPBACK, candidates, interface_of
from hvlaunch.gloo.examination import Gathering

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.engine.events import HostFacts

__all__ = ["Deep"]

_LIMITS = Limits(seconds=None, memory=None, output=1 << 24)
_SECONDS = 90.0
"""Seconds for a run; importing torch from a network file system may take most of them."""
_STEP = 2 * _SECONDS
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
        self._ports[name] = answers.next(PORTS)
        self._alone[name] = self._order(errand, answers, {"size": 0, "local": 0, "rank": 0, "env": {}})[0]
        self.gathering.meet(name, "alone", _STEP)
        number = 0
        while groups := self._groups(number):
            group = next((group for group in groups if name in group), None)
            if group is not None:
                self._sums[number, name] = self._order(errand, answers, self._part(group, name, number))
            self.gathering.meet(name, f"round {number}", _STEP)
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
