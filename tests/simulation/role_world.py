"""A world for jobs with roles: workers start again in their slots, and the laws of restarts hold in every turn."""

from collections.abc import Callable, Sequence
from functools import partial

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.lifecycle import Phase
from hvlaunch.engine.round import FRUITFUL, STARTS_IN_A_ROW
from hvlaunch.hosts.roles import place_roles, ports_by_host, ranks_of
from hvlaunch.job import Host, JobResult, JobSpec, RestartLimit, Role, Templates
from tests.simulation.play import facts
from tests.simulation.wired_static import WiredStaticWorld
from tests.simulation.world import World, WorldHost

__all__ = ["RoleWorld", "WiredRoleWorld"]

_POLICIES = ("end", "restart", "restart", "restart-all", "restart-all")
_ROLES = ("train", "gen", "judge")


class RoleWorld(World):
    """Plays one job with roles to its end."""

    def __init__(self, seed: int, *, faults: float, failures: float | None = None) -> None:
        super().__init__(seed, faults=faults, failures=0.4 if failures is None else failures)
        self.newest: dict[tuple[str, int, int], int] = {}
        """Number of the newest order to end a worker, by host, slot and start."""
        self.places = place_roles(self.spec.roles)
        self.failed: dict[range, dict[int, float]] = {}
        """Times of failures that the engine heard of, by unit and number of its start."""
        self.began: dict[range, dict[int, float]] = {}
        """Times of starts, in the same way."""
        self.restarts = 0

    def make_spec(self, names: str) -> JobSpec:
        choose = self.random.choice
        roles: list[Role] = []
        for name in _ROLES[: self.random.randint(1, 3)]:
            used = [host for host in names if self.random.random() < 0.6] or [names[-1]]
            workers = tuple((host, self.random.randint(1, 2)) for host in used)
            templates = Templates((name,), {}, choose([(), ("http",)]), {})
            roles.append(Role(name, workers, templates, None, choose(_POLICIES)))  # type: ignore[arg-type]
        counts = ports_by_host(roles)
        slots = {host: sum(dict(role.workers).get(host, 0) for role in roles) for host in counts}
        return JobSpec(
            command=("roles",),
            hosts=tuple(Host(name, slots=slots[name]) for name in names if name in slots),
            np=sum(role.size for role in roles),
            roles=tuple(roles),
            role_limit=RestartLimit(choose([None, None, 0, 1, 3])),
            end_with_role=choose([None, None, roles[0].name]),
            cwd="/",
            grace=5.0,
            start_timeout=20.0,
            settle=choose((0.0, 0.2, 2.0)),
        )

    def facts_of(self, host: WorldHost) -> on.HostFacts:
        return facts(host.number)._replace(
            more_ports=tuple(range(9, 9 + ports_by_host(self.spec.roles)[host.name]))
        )

    def unit_of(self, rank: int) -> range:
        """Return the ranks that start again together."""
        role = self.role_of(rank)
        return ranks_of(self.spec.roles, role.name) if role.policy == "restart-all" else range(rank, rank + 1)

    def role_of(self, rank: int) -> Role:
        return next(role for role in self.spec.roles if rank in ranks_of(self.spec.roles, role.name))

    # The hosts

    def choices(self) -> list[Callable[[], None]]:
        # A message that takes half a minute would be that of a lost host.
        is_quiet = self.engine.phase is Phase.RUNNING and not any(
            host.pending for host in self.hosts.values()
        )
        pause = [self.let_time_pass] if is_quiet else []
        return [*super().choices(), *pause]

    def let_time_pass(self) -> None:
        """Let workers run for a while, up to the next thing that is due."""
        until = self.now + self.random.choice((0.1, 1.0, 20.0))
        for when in (self.due, self.deadline):
            until = until if when is None else min(until, max(when, self.now))
        self.now = until

    def obey(self, action: do.Action) -> None:
        if not isinstance(action, do.Stop):
            super().obey(action)
            return
        host = self.hosts[action.host]
        host.orders += 1
        chosen = sorted(host.live) if action.slots is None else action.slots
        workers = [(host.name, slot, host.starts[slot]) for slot in chosen if slot in host.live]
        self.newest.update(dict.fromkeys(workers, host.orders))
        for step in action.steps:
            call = partial(self.deliver_to, workers, step.signal, host.orders)
            self.at(step.after, call) if step.after else call()

    def deliver_to(self, workers: Sequence[tuple[str, int, int]], number: int, order: int) -> None:
        """Deliver a signal to these workers, unless they have a newer order, or other workers are in their slots."""
        for worker in workers:
            host, slot = self.hosts[worker[0]], worker[1]
            is_there = slot in host.live - host.outliving and host.starts[slot] == worker[2]
            if is_there and self.newest[worker] == order and (number == 9 or self.random.random() < 0.7):
                self.end(host, slot, None, number)

    def start(self, start: do.Start) -> None:
        host = self.hosts[start.host]
        for launch in start.launches:
            assert launch.slot not in host.live, "a worker was started beside another in its slot"
            host.starts[launch.slot] = launch.start
            host.ends.pop(launch.slot, None)
            host.outliving.discard(launch.slot)
            self.ended_well.discard(launch.place.rank)
            if host.link == "ready":
                host.live.add(launch.slot)

    # The laws

    def handle(self, event: on.Event) -> list[do.Action]:
        self._hear(event)
        actions = super().handle(event)
        if self.engine.phase is Phase.RUNNING:
            # Workers were stopped for a restart, and not for the end.
            self.stopped_at = None
        for action in actions:
            if isinstance(action, do.Start):
                self._check_start(action)
            elif isinstance(action, do.Stop) and self.engine.phase is Phase.RUNNING:
                self._check_stop(action)
        return actions

    def _hear(self, event: on.Event) -> None:
        """Note a failure before the engine acts on it."""
        if not isinstance(event, on.WorkerExited) or self.engine.phase is not Phase.RUNNING:
            return
        worker = self.engine.workers.find((event.host, event.slot), event.start)
        if worker is None or event.code == 0:
            return
        failures = self.failed.setdefault(self.unit_of(worker.rank), {})
        # The first counts; the others of the unit may fail because of it.
        if not worker.is_ending and worker.launch.start not in failures:
            failures[worker.launch.start] = self.now

    def _check_start(self, start: do.Start) -> None:
        for launch in start.launches:
            unit = self.unit_of(launch.place.rank)
            self.began.setdefault(unit, {})[launch.start] = self.now
            if launch.start == 0:
                continue
            self.restarts += 1
            assert self.engine.phase is Phase.RUNNING, "a worker starts in a job that ends"
            assert launch.start - 1 in self.failed.get(unit, {}), "a worker starts again that has not failed"
            assert not self.used_up(unit), "there was no restart left"
            starts = {
                worker.rank: worker.launch.start for worker in self.engine.workers if worker.rank in unit
            }
            assert starts == dict.fromkeys(unit, launch.start), "a part of a role starts again"

    def _check_stop(self, stop: do.Stop) -> None:
        assert stop.slots is not None, "all workers of a host are stopped"
        for slot in stop.slots:
            worker = self.engine.workers.at((stop.host, slot))
            assert worker is not None
            failures = self.failed.get(self.unit_of(worker.rank), {})
            assert worker.launch.start in failures, "a worker of another unit is stopped"

    def used_up(self, unit: range) -> bool:
        """True if the unit's last failure was one too many."""
        limit, failures = self.spec.role_limit.max_restarts, self.failed.get(unit, {})
        lives = [when - self.began[unit][start] for start, when in sorted(failures.items())]
        fruitless = len(lives) >= STARTS_IN_A_ROW and max(lives[-STARTS_IN_A_ROW:]) < FRUITFUL
        return fruitless or (limit is not None and len(lives) > limit)

    def check(self, result: JobResult) -> None:
        """Check the end of the job."""
        assert not [host.name for host in self.hosts.values() if host.live], "workers are left"
        last = self.spec.end_with_role
        if result.exit_code == 0:
            ranks = range(len(self.places)) if last is None else ranks_of(self.spec.roles, last)
            assert self.ended_well >= set(ranks), "the job ended well before its workers"
        elif result.interrupted is not None:
            assert "interrupt" in self.broken
        elif result.error is not None:
            assert result.exit_code == 69, result.error
            assert any(cause.startswith(("lose", "connect", "stick")) for cause in self.broken)
        else:
            assert result.failure is not None
            rank = result.failure.rank
            assert result.failure.role == f"{self.role_of(rank).name}:{rank - self._first(rank)}"
            # Another worker than the one whose failure ends the job may turn out to be the cause.
            policies = {self.role_of(failed).policy for failed in (rank, *(unit[0] for unit in self.failed))}
            is_over = "end" in policies or any(map(self.used_up, self.failed))
            assert is_over, "the job ended, and a restart was left"
        if not self.broken:
            assert result.exit_code == 0

    def _first(self, rank: int) -> int:
        return ranks_of(self.spec.roles, self.role_of(rank).name).start


class WiredRoleWorld(WiredStaticWorld, RoleWorld):
    """The same with lost drivers and connections."""
