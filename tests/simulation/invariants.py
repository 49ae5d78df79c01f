"""Invariants of an elastic job after every event, and its possible ends (docs/guides/lost-host.md, and the exit codes)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvlaunch.engine import actions as do
from hvlaunch.engine.lifecycle import AT_WORK, Phase
from hvlaunch.engine.round import FRUITLESS_IN_A_ROW
from hvlaunch.engine.waits import Wait
from hvlaunch.engine.workers import WorkerState
from hvlaunch.errors import EXIT_NO_PROGRESS
from hvlaunch.hosts.placement import Placement
from hvlaunch.job import JobResult

if TYPE_CHECKING:
    from tests.simulation.elastic_world import ElasticWorld

__all__ = ["Invariants"]

_DRAIN_MARGIN = 6.0
_MOST_EXCUSED = FRUITLESS_IN_A_ROW - 1


class Invariants:
    """Watches a world."""

    def __init__(self, world: "ElasticWorld") -> None:
        self.world = world
        self.placed = -1
        """Places of the newest round."""
        self._starts: dict[tuple[str, int], int] = {}
        """Number of each slot's newest worker, which tells its messages from older ones."""

    def before(self, actions: Sequence[do.Action]) -> None:
        """Check the actions against the world before they are carried out."""
        for action in actions:
            if isinstance(action, do.Start):
                self.check_start(action)
        places = [action for action in actions if isinstance(action, do.Assign)]
        if places:
            self.check_places(places)
        if self.world.kind == "unmodified":
            starts = [action for action in actions if isinstance(action, do.Start)]
            if starts:
                self.check_round(
                    starts[0].round, [launch.place for start in starts for launch in start.launches]
                )

    def check_start(self, start: do.Start) -> None:
        host, record = self.world.hosts[start.host], self.world.ledger.host(start.host)
        assert record.link == "ready", f"workers start on {host.name}, which is {record.link}"
        assert record.parted_at is None, f"workers start on {host.name}, whose agent ends"
        busy = {process.slot for process in host.processes if process.live and process.agent == host.agent}
        slots = [launch.slot for launch in start.launches]
        assert not busy & set(slots), f"slots {busy & set(slots)} of {host.name} have workers already"
        assert len(set(slots)) == len(slots)
        for launch in start.launches:
            number = self._starts.get(launch.seat, -1) + 1
            assert launch.start == number, f"worker {number} of {launch.seat} is called {launch.start}"
            self._starts[launch.seat] = number

    def check_places(self, places: Sequence[do.Assign]) -> None:
        self.check_round(places[0].round, [assign.launch.place for assign in places])
        assert {assign.round for assign in places} == {places[0].round}, "two rounds at once"
        assert len({assign.launch.seat for assign in places}) == len(places), "two ranks for one worker"
        processes = [self.world.workers.find(*assign.launch.seat, assign.launch.start) for assign in places]
        members = [process for process in processes if process is not None]
        for process in members:
            assert process.is_waiting, f"{process} gets a place, and has not asked"
        if None not in processes and members:
            survivors = [process for process in members if process.last_round >= 0]
            assert not survivors or members[0] in survivors, "rank 0 is no survivor"
            root = members[places[0].root]
            assert root.commit == max(process.commit for process in members), (
                "the root has not the newest commit"
            )

    def check_round(self, number: int, places: Sequence[Placement]) -> None:
        options = self.world.options
        assert number > self.placed, f"round {number} is placed after round {self.placed}"
        self.placed = number
        ranks = sorted(assign.rank for assign in places)
        assert ranks == list(range(len(places))), f"the ranks are {ranks}"
        assert {assign.size for assign in places} == {len(places)}, "a round of two sizes"
        assert len(places) >= options.min_np, "too few workers"
        assert options.max_np is None or len(places) <= options.max_np, "too many workers"

    def after(self) -> None:
        """Check the world after the actions."""
        world = self.world
        taken: set[tuple[int, int]] = set()
        for host in world.hosts.values():
            for process in host.processes:
                if process.live and process.round is not None and process.place is not None:
                    seat = (process.round, process.place.rank)
                    assert seat not in taken, (
                        f"rank {seat[1]} of round {seat[0]} belongs to two living workers"
                    )
                    taken.add(seat)
            self.check_drained(host.name)
        self.check_lives()
        self.check_settled()
        if world.result is not None:
            self.check_end(world.result)

    def check_lives(self) -> None:
        """Check that the engine's records of each worker agree."""
        for worker in self.world.engine.workers:
            name = f"{worker.host}/{worker.slot}/{worker.start}"
            story = worker.life.story
            assert not story or story[-1].after is worker.state, f"{name} has a story that lacks its end"
            has_orders = self.world.engine.waits.has(Wait.ENDING, worker)
            assert worker.is_ending == has_orders, f"{name} has its orders, and is {worker.state.name}"
            if not worker.is_ending:
                is_working = worker.state is WorkerState.WORKING
                round_name = "no round" if worker.round is None else f"round {worker.round}"
                assert is_working == (worker.round is not None), (
                    f"{name} is in {round_name}, and {worker.state.name}"
                )

    def check_settled(self) -> None:
        """Check that a failure does not wait too long for its cause."""
        engine = self.world.engine
        due = engine.waits.until(Wait.SETTLING) if engine.phase is Phase.RUNNING else None
        assert due is None or due >= self.world.now or self.world.is_catching_up, (
            "a failure waits without end"
        )

    def check_drained(self, name: str) -> None:
        """Check that a host that left the pool long ago has neither worker nor connection."""
        host = self.world.hosts[name]
        if (
            host.unlisted_since is None
            or not host.reachable
            or host.is_full
            or host.staying == host.agent
            or any(process.outlives_kill for process in host.processes)
            or self.world.engine.phase not in AT_WORK
        ):
            return
        options = self.world.options
        bound = options.drain_timeout + 2 * self.world.spec.grace + _DRAIN_MARGIN
        if self.world.now > max(host.unlisted_since, host.whole_since, self.world.asleep_until) + bound:
            assert not [process for process in host.processes if process.live], (
                f"{name} is drained, and workers live there"
            )
            assert host.link in ("none", "connecting"), f"{name} is drained, and {host.link}"

    # The end

    def check_end(self, result: JobResult) -> None:
        world = self.world
        for host in world.hosts.values():
            assert host.link == "none", f"{host.name} was never released: it is {host.link}"
            left = [
                str(process)
                for process in host.processes
                if process.live and process.agent == host.agent and host.reachable
            ]
            assert not left or host.link == "none", f"workers are left: {left}"
        if result.interrupted is not None:
            assert result.exit_code == 128 + result.interrupted
            assert "interrupt" in world.faults
        elif result.error is not None:
            self.check_error(result)
        elif result.exit_code == 0:
            assert world.workers.ended_well, "it ended well, and no worker did"
        else:
            assert result.failure is not None
            assert result.exit_code in world.workers.codes | {EXIT_NO_PROGRESS}, "no worker ended so"
            assert self.may_fail, "failures are to be made up for"

    @property
    def may_fail(self) -> bool:
        """True if a fault of this world is a reason for the job to end with a worker's failure."""
        world = self.world
        bad = {"spoil", "kill", "fail", "hang", "stick", "kill_while_placing", "refuse_start"}
        bad |= {"be_judged", "flap", "outlive", "stray", "cut_pair", "leave_early"}
        return (
            world.options.max_restarts is not None
            or world.workers.ended_well > 0
            or "spoil" in world.faults
            or sum(name in bad for name in world.faults) > _MOST_EXCUSED
        )

    def check_error(self, result: JobResult) -> None:
        world, options, error = self.world, self.world.options, result.error
        assert error is not None
        assert result.exit_code == error.exit_code
        for_good = options.cooldown is None
        match error.kind:
            case "NotEnoughSlotsInTime":
                assert for_good or options.elastic_timeout < 100, "there were enough slots"
            case "GaveUp":
                assert self.may_fail, "failures are to be made up for"
            case "DiscoveryFailed":
                assert "fail_discovery" in world.faults or world.is_mute
            case _ if error.host is not None or error.errors:
                assert options.max_restarts is not None or not options.discovers
                assert for_good or options.max_restarts is not None, "hosts come back"
            case "NotEnoughSlots":
                assert not options.discovers
            case _:
                raise AssertionError(f"no reason for {error!r}")
