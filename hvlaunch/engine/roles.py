"""The consequences of a worker's end in a job with roles: the restart of a worker, or of its role, or the end. Pure."""

from hvlaunch.engine import causes as why
from hvlaunch.engine import facts as tell
from hvlaunch.engine.actions import Action
from hvlaunch.engine.causes import Ending
from hvlaunch.engine.hosts import Pool, gone_unasked
from hvlaunch.engine.round import FRUITFUL, STARTS_IN_A_ROW, Restarts
from hvlaunch.engine.rounds import Rounds
from hvlaunch.engine.waits import Wait, Waits
from hvlaunch.engine.workers import Worker, gently
from hvlaunch.hosts.roles import ranks_of
from hvlaunch.job import JobSpec, WorkerExit

__all__ = ["RolePolicies"]


class RolePolicies:
    """Restarts units: a single rank of a role with `restart`, all ranks of a role with `restart-all`."""

    def __init__(self, spec: JobSpec, pool: Pool, rounds: Rounds, waits: Waits) -> None:
        self._spec = spec
        self._pool = pool
        self._rounds = rounds
        self._workers = rounds.workers
        self._waits = waits
        self._ranks = [ranks_of(spec.roles, role.name) for role in spec.roles]
        self._counts: dict[range, Restarts] = {}
        self._began: dict[range, float] = {}
        """Time of each unit's newest start; the job's for the others."""
        self._delays: dict[range, float] = {}
        """Seconds from the end of a failed unit's last worker to its restart."""
        self._hosts: dict[int, str] = {}

    def ended(self, worker: Worker, exit_: WorkerExit, now: float) -> list[Action] | Ending | None:
        """Return what follows the end of a worker; None if the job treats it as the failure of a round."""
        number = 0 if worker.launch.role is None else worker.launch.role.number
        role, ranks = self._spec.roles[number], self._ranks[number]
        unit = ranks if role.policy == "restart-all" else range(exit_.rank, exit_.rank + 1)
        self._hosts[exit_.rank] = worker.host
        if unit in self._delays:
            self._await(unit, now)
            return []
        if exit_.ok:
            return self._ended_well(role.name, ranks)
        return None if role.policy == "end" else self._failed(unit, exit_, now)

    def ended_after(self, worker: Worker) -> None:
        """Note the end of a worker after that of the role which ends the job; it may have failed just before."""
        place = worker.launch.role
        # With time it would have started again.
        if place is not None and self._spec.roles[place.number].policy != "end" and self._rounds.round:
            self._rounds.round.forgive([worker.rank])

    def _ended_well(self, name: str, ranks: range) -> list[Action] | Ending:
        """End the job after the role that it ends with."""
        current = self._rounds.round
        if name != self._spec.end_with_role or current is None:
            return []
        ends = [current.exits.get(rank) for rank in ranks]
        is_done = all(end is not None and end.ok for end in ends)
        has_others = self._workers.size > 0 or bool(self._rounds.restarting)
        return Ending(cause=why.RoleDone(name)) if is_done and has_others else []

    def _failed(self, unit: range, exit_: WorkerExit, now: float) -> list[Action] | Ending:
        """Stop the other workers of the unit, to start all of them again; or end the job after too many failures."""
        counts = self._counts.setdefault(unit, Restarts(self._spec.role_limit, STARTS_IN_A_ROW))
        began = self._began.get(unit, self._workers.began_at or now)
        limit = counts.failed(now, fruitful=now - began >= FRUITFUL)
        if limit is not None:
            return Ending(failure=exit_, cause=limit)
        # The first failure may be an accident; workers that fail at every start get time for its cause to pass.
        self._delays[unit] = 2.0 ** (counts.fruitless - 2) if counts.fruitless > 1 else 0.0
        self._rounds.restarting.update(unit)
        others = [worker for worker in self._workers.living if worker.rank in unit]
        self._hosts.update({worker.rank: worker.host for worker in others})
        end = why.WorkerEnded(exit_.rank, exit_.host, exit_.code, exit_.signal, exit_.not_started, exit_.role)
        stops = self._workers.stop(others, gently(self._spec.grace), now)
        self._await(unit, now)
        return [tell.WorkerRestarting(end, len(unit), self._delays[unit]), *stops]

    def _await(self, unit: range, now: float) -> None:
        """Wait for the restart's time once all workers of the unit have ended."""
        if self._rounds.round is not None:
            self._rounds.round.forgive(unit)
        if not any(worker.rank in unit for worker in self._workers):
            self._waits.begin(Wait.RESTART, unit, now + self._delays[unit])

    def restart(self, now: float) -> list[Action] | Ending:
        """Start the units again whose time has come; end the job if one of their hosts is lost."""
        units = [unit for unit in self._waits.due(Wait.RESTART, now) if isinstance(unit, range)]
        # Before any of them starts: an order must not be lost in a job that ends.
        for name in dict.fromkeys(self._hosts[rank] for unit in units for rank in unit):
            host = self._pool.get(name)
            if host is None or not host.is_usable(now):
                return Ending(error=self._pool.errors.get(name) or gone_unasked(name))
        actions: list[Action] = []
        for unit in units:
            self._waits.end(Wait.RESTART, unit)
            del self._delays[unit]
            self._began[unit] = now
            actions += self._rounds.restart(unit, now)
        return actions
