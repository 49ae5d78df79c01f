"""How a round begins: workers are started in their slots, or those that have asked are told their places. Pure."""

from collections.abc import Sequence

from hvlaunch.engine import actions as do
from hvlaunch.engine import facts as tell
from hvlaunch.engine.actions import Action, HostAddress, HostNetwork
from hvlaunch.engine.life import State
from hvlaunch.engine.network import Wiring
from hvlaunch.engine.pool import PoolHost
from hvlaunch.engine.round import Round
from hvlaunch.engine.seating import Plan, by_host
from hvlaunch.engine.workers import Worker, Workers
from hvlaunch.hosts.placement import Launch

__all__ = ["Starter"]


class Starter:
    """Brings workers into rounds whose hosts have found each other."""

    def __init__(self, workers: Workers, wiring: Wiring) -> None:
        self._workers = workers
        self._wiring = wiring

    def _network(self, host: PoolHost, port: int, hosts: tuple[HostAddress, ...] = ()) -> HostNetwork:
        network = self._wiring.network
        assert network is not None  # noqa: S101 (a plan has one)
        return HostNetwork(
            master_addr=network.address(host.name),
            master_port=port,
            interface=network.interface(host.name),
            rendezvous=host.rendezvous,
            address=network.own_address(host.name),
            hosts=hosts,
        )

    def _addresses(self, plan: Plan) -> tuple[HostAddress, ...]:
        network = self._wiring.network
        assert network is not None  # noqa: S101 (a plan has one)
        return tuple(
            HostAddress(name, network.own_address(name), len(launches))
            for name, launches in by_host(plan.launches).items()
        )

    def start(self, plan: Plan, current: Round, now: float) -> list[Action]:
        """Start all workers of a round."""
        first = plan.hosts[0]
        port = first.facts.master_port if first.facts is not None else 0
        launches, addresses = by_host(plan.launches), self._addresses(plan)
        starts: list[Action] = []
        for host in plan.hosts:
            network = self._network(host, port, addresses)
            starts += self.launch(host, launches[host.name], network, current.number, State.WORKING, now)
        address = self._network(first, port).master_addr
        return [tell.RoundStarting(current.number, len(plan.launches), plan.names, address, port), *starts]

    def launch(
        self,
        host: PoolHost,
        launches: Sequence[Launch],
        network: HostNetwork,
        number: int,
        state: State,
        now: float,
    ) -> list[Action]:
        """Start these workers of a host: WORKING in the round, or STARTING to ask for a place in one from there on."""
        if host.facts is None:
            return []
        for launch in launches:
            self._workers.launch(launch, born=number, state=state, now=now)
        return [do.Start(host.name, number, tuple(launches), network, host.facts)]

    def place(self, plan: Plan, current: Round, newest: Worker, now: float) -> list[Action]:
        """Tell those who asked their places; `newest` is the one of them that has the newest commit."""
        networks = {host.name: self._network(host, 0) for host in plan.hosts}
        for launch in plan.launches:
            self._workers.place(launch, current.number, now)
        return [
            tell.RoundFormed(current.number, len(plan.launches), plan.names, current.cause),
            *(
                do.Assign(current.number, launch, networks[launch.host], newest.rank)
                for launch in plan.launches
            ),
        ]
