"""How a round begins: workers are started in their slots, or those that have asked are told their places. Pure."""

from collections.abc import Container, Mapping

from hvlaunch.gloo import actions as do
from hvlaunch.gloo import wording
from hvlaunch.gloo.actions import Action
from hvlaunch.gloo.crew import Crew, Worker
from hvlaunch.gloo.plan import Plan
from hvlaunch.gloo.pool import PoolHost
from hvlaunch.gloo.round import Round
from hvlaunch.gloo.wiring import Wiring
from hvlaunch.gloo.worker_env import HostNetwork
from hvlaunch.hosts.placement import Placement

__all__ = ["Beginning"]


class Beginning:
    """Brings workers into rounds whose hosts have found each other."""

    def __init__(self, crew: Crew, wiring: Wiring) -> None:
        self._crew = crew
        self._wiring = wiring

    def _network(self, host: PoolHost, port: int) -> HostNetwork:
        network = self._wiring.network
        assert network is not None  # noqa: S101 (a plan has one)
        return HostNetwork(
            master_addr=network.address(host.name),
            master_port=port,
            interface=network.interface(host.name),
            rendezvous=host.rendezvous,
        )

    def start(self, plan: Plan, current: Round, early: Container[str], now: float) -> list[Action]:
        """Start all workers of a round, but for those on hosts where they were early."""
        first = plan.hosts[0]
        port = first.facts.master_port if first.facts is not None else 0
        by_host: dict[str, dict[int, Placement]] = {}
        for (name, slot), one in plan.places.items():
            by_host.setdefault(name, {})[slot] = one
        starts: list[Action] = []
        for host in plan.hosts:
            if host.name not in early:
                network = self._network(host, port)
                starts += self.launch(host, by_host[host.name], network, current.number, now)
        where = f"{self._network(first, port).master_addr}:{port}"
        text = f"starting {wording.count(len(plan.places), 'worker')} on {wording.count(len(plan.hosts), 'host')}; rank 0 is at {where}"
        again = f"round {current.number}: " if current.number else ""
        return [do.Say(again + text, detail=not again), *starts]

    def launch(
        self,
        host: PoolHost,
        places: Mapping[int, Placement],
        network: HostNetwork,
        number: int,
        now: float,
        *,
        will_ask: bool = False,
    ) -> list[Action]:
        """Start workers in these slots of a host: in the round, or to ask for a place in one from there on."""
        if host.facts is None:
            return []
        workers = [
            self._crew.launch((host.name, slot), born=number, rank=one.rank, now=now)
            for slot, one in places.items()
        ]
        for worker in workers:
            if will_ask:
                self._crew.starting.add(worker.seat)
            else:
                worker.round = number
        starts = [worker.start for worker in workers]
        return [do.Start(host.name, number, [*places.values()], network, host.facts, [*places], starts)]

    def place(self, plan: Plan, current: Round, newest: Worker) -> list[Action]:
        """Tell those who asked their places; `newest` is the one of them that has the newest commit."""
        workers = self._crew.of(plan.places)
        for worker in workers:
            worker.round = worker.last_round = current.number
            worker.is_waiting = False
            worker.rank = plan.places[worker.seat].rank
            self._crew.cooldowns.pop(worker.seat, None)
        networks = {host.name: self._network(host, 0) for host in plan.hosts}
        cause = f" ({current.cause})" if current.cause else ""
        where = wording.count(len(plan.hosts), "host")
        return [
            do.Say(f"round {current.number}: {wording.count(len(workers), 'worker')} on {where}{cause}"),
            *(
                do.Place(
                    worker.host,
                    worker.slot,
                    worker.start,
                    current.number,
                    plan.places[worker.seat],
                    networks[worker.host],
                    newest.rank,
                )
                for worker in workers
            ),
        ]
