"""The ways between hosts that come and go: who tries whom, what was found so far, and whether that will do. Pure."""

from collections.abc import Mapping, Sequence

from hvlaunch.gloo.actions import Action, Probe
from hvlaunch.gloo.events import HostFacts
from hvlaunch.gloo.network import Network, candidates

__all__ = ["Wiring"]

_PROBING_TIME = 8.0
_SETTLE = 0.3
"""Seconds that a better address may still take when each host can be reached at some."""


class Wiring:
    """Finds the network of whichever hosts are wanted now. What is known of two hosts stays known while both are there."""

    def __init__(self, only: Sequence[str]) -> None:
        self._only = only
        self._findings: dict[str, dict[str, list[str | None]]] = {}
        """By who tries, then by whom; a pair without findings has been asked for."""
        self._hosts: tuple[str, ...] = ()
        self.network: Network | None = None
        self.deadline: float | None = None

    def want(self, facts: Mapping[str, HostFacts], now: float) -> list[Action]:
        """These are the hosts, in order of rank: what is to be tried that was not tried before."""
        if self.network is not None and tuple(facts) == self._hosts:
            return []
        self._hosts = tuple(facts)
        self.network = Network(facts, self._only)
        self.deadline = now + _PROBING_TIME
        probes: list[Action] = []
        for host, target, addresses in self.network.tries():
            for address in self._findings.get(host, {}).get(target, ()):
                self.network.add(host, target, address)
            probes += self._ask(host, target, addresses, facts[target].beacon_port)
        return probes

    def ask(self, host: str, target: str, facts: HostFacts) -> list[Action]:
        """Let the host try the other one, if it was not told to before."""
        return self._ask(host, target, candidates(facts), facts.beacon_port)

    def _ask(self, host: str, target: str, addresses: Sequence[str], port: int) -> list[Action]:
        known = self._findings.setdefault(host, {})
        if target in known:
            return []
        known[target] = []
        return [Probe(host, target, addresses, port)]

    def has_found(self, host: str, target: str, address: str) -> bool:
        return address in self._findings.get(host, {}).get(target, ())

    def add(self, host: str, target: str, address: str | None) -> None:
        """`host` got through to `target` at the address; None: it has tried all."""
        known = self._findings.get(host, {}).get(target)
        if known is None:
            return
        known.append(address)
        if self.network is not None:
            self.network.add(host, target, address)

    def forget(self, host: str) -> None:
        """The host is gone; if it comes back, it may have other addresses."""
        self._findings.pop(host, None)
        for targets in self._findings.values():
            targets.pop(host, None)
        self.network, self._hosts, self.deadline = None, (), None

    def is_settled(self, now: float, *, others: bool) -> bool:
        """Whether to take the network as it is; `others` is whether nothing else is waited for."""
        if self.network is None or self.deadline is None or now >= self.deadline:
            return self.network is not None
        if others and not self.network.is_best and self.network.is_enough:
            self.deadline = min(self.deadline, now + _SETTLE)
        return others and self.network.is_best
