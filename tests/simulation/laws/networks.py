"""Networks: the workers of a round get the newest port of rank 0's host, and all hosts in the order of their ranks."""

from collections.abc import Sequence

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from tests.simulation.laws.law import Law

__all__ = ["Networks"]


class Networks(Law):
    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        begun = next((action for action in actions if isinstance(action, tell.RoundStarting)), None)
        if begun is None:
            return
        starts = [
            action for action in actions if isinstance(action, do.Start) and action.round == begun.round
        ]
        first = begun.hosts[0]
        port = self.ledger.host(first).master_port
        assert begun.master_port == port, f"rank 0 gets port {begun.master_port}, and {first} keeps {port}"
        counts = {start.host: len(start.launches) for start in starts}
        for start in starts:
            network = start.network
            assert network.master_port == port, f"{start.host} is told another port than {port}"
            named = [(host.name, host.workers) for host in network.hosts]
            ranked = [(name, counts[name]) for name in begun.hosts]
            assert named == ranked, f"{start.host} is told the hosts {named}, and they are {ranked}"
            assert start.launches[0].place.size == begun.workers, "another number of workers is reported"
