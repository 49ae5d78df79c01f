"""Names: whoever is named has a fault."""

from collections.abc import Sequence

from hvlaunch.gloo.engine import actions as do
from hvlaunch.gloo.engine import causes as why
from hvlaunch.gloo.engine import events as on
from hvlaunch.gloo.engine import facts as tell
from tests.simulation.laws.law import Law

__all__ = ["Names"]


class Names(Law):
    def turn(self, event: on.Event, actions: Sequence[do.Action]) -> None:
        for action in actions:
            match action:
                case tell.HostExcluded(name, _, cause):
                    self._check_excluded(name, cause)
                case tell.HostNotUsable(problem):
                    assert problem.host is not None
                    self._check_faulty(problem.host)
                case tell.HostNotClosing(name) if not isinstance(event, on.Interrupted):
                    self._check_faulty(name)
                case tell.WorkerKilled(why.WorkerHangs(_, name, "silent" | "stopped")):
                    is_stopped = any(one.is_silent for one in self.world.hosts[name].processes)
                    assert is_stopped or name in self.world.faulty, (
                        f"a worker of {name} is killed for nothing"
                    )
                case tell.WorkerStartFailed(end):
                    same = [one for one in self.ledger.ends if (one.host, one.code) == (end.host, end.code)]
                    assert same, f"no worker of {end.host} ended so"

    def _check_excluded(self, name: str, cause: why.Cause) -> None:
        if isinstance(cause, why.WorkersFail):
            assert cause.cause.host == name, f"{name} is excluded for {cause.cause.host}"
        elif isinstance(cause, why.HostProblem):
            pair = {cause.problem.host, cause.problem.other or cause.problem.host}
            assert name in pair, f"{name} is excluded for {pair}"
            slow = {host.name for host in self.world.hosts.values() if host.is_slow}
            assert pair & (self.world.faulty | slow), f"{name} has no fault, and is named"

    def _check_faulty(self, name: str) -> None:
        faulty = self.world.faulty
        assert name in faulty or self.world.hosts[name].is_slow, f"{name} has no fault, and is named"
