"""Proofs: workers get no address that their host has not reached."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from tests.simulation.laws.law import Law

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Proofs"]

_PROBING = 8.0
"""Seconds after which a round begins on hosts that have not reported their way to the rendezvous."""
_LOOPBACK = "127.0.0.1"


class Proofs(Law):
    def __init__(self, world: "ElasticWorld") -> None:
        super().__init__(world)
        self._agents: dict[tuple[str, int], int] = {}
        """Agents by host and by their number in requests, which tells old answers from new ones."""

    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        for action in actions:
            if isinstance(action, do.Probe):
                newest = self.ledger.host(action.target).agents
                agent = self._agents.setdefault((action.target, action.agent), newest)
                assert agent == newest, f"two agents of {action.target} are both number {action.agent}"
            elif isinstance(action, do.Start):
                host = self.ledger.host(action.host)
                is_known = host.has_rendezvous or self.ledger.now >= host.ready_at + _PROBING
                assert is_known, f"workers start on {host.name}, which has not tried the rendezvous"
        networks: dict[str, do.HostNetwork] = {}
        for action in actions:
            if isinstance(action, do.Assign):
                networks.setdefault(action.launch.place.host, action.network)
            elif isinstance(action, do.Start) and not self.ledger.is_asking:
                networks[action.host] = action.network
        if not networks:
            return
        first, *others = networks
        if not others:
            assert networks[first].master_addr == _LOOPBACK, f"{first} is alone"
            return
        for name in others:
            address = networks[name].master_addr
            has_proof = (first, address) in self.ledger.host(name).proofs
            assert has_proof, f"{name} is told {address} of {first}, and has not reached it"
        for name, network in networks.items():
            tried = [other for other in networks if other != name]
            has_proof = any((name, network.address) in self.ledger.host(other).proofs for other in tried)
            assert has_proof, f"nobody has reached {name} at {network.address}"
