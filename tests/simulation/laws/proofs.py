"""Proofs: workers get no address that their host has not reached."""

from collections.abc import Sequence

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from tests.simulation.laws.law import Law

__all__ = ["Proofs"]

_LOOPBACK = "127.0.0.1"


class Proofs(Law):
    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
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
