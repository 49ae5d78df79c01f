"""Thousands of elastic jobs with many faults: the invariants hold, and each job ends rightly."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hvlaunch.engine import events as on
from hvlaunch.engine import round as round_module
from hvlaunch.engine import rounds
from hvlaunch.engine.engine import Engine
from hvlaunch.engine.health import Draining
from hvlaunch.engine.lifecycle import Phase
from hvlaunch.engine.policy import Policy
from hvlaunch.engine.rounds import Rounds
from hvlaunch.engine.workers import TRANSITIONS, InvalidTransition, WorkerState, WorkerTrigger
from hvlaunch.hosts.placement import seats
from hvlaunch.job import ElasticOptions
from tests.simulation.bugs import BUGS, Bug
from tests.simulation.elastic_world import ElasticWorld, SimHost
from tests.simulation.invariants import Invariants
from tests.simulation.ledger import Ledger
from tests.simulation.planted import MOST_SEEDS, first_found

ROOT = Path(__file__).parents[2]
SEEDS = 2_000
MANY = 5_000
SHARDS = 20
SHOWN = 120
ENOUGH_FOR_A_MUTANT = 500
NEXT_FEW = 3
ONCE_NOT_CLEAN = (
    3882,
    111718,
    137315,
    150407,
    153830,
    188317,
    201629,
    210302,
    211136,
    213516,
    232112,
    253388,
    255322,
    257066,
    330085,
    344442,
    345333,
    360865,
    389328,
    400262,
    476267,
    646766,
    771315,
    755582,
    759018,
    761801,
    915101,
    1305023,
    1325549,
    1337252,
    1373980,
    1399484,
    1439087,
    1478808,
    1486990,
    1557179,
)
"""Seeds of longer runs that found a defect of the engine, of this world or of a law."""


def play(seed: int) -> ElasticWorld:
    """Play a seed. Raises AssertionError with the history if a law is broken."""
    world = ElasticWorld(seed)
    try:
        world.run()
    except (AssertionError, InvalidTransition) as error:
        history = "\n".join(world.history[-SHOWN:])
        raise AssertionError(
            f"{error}\n{history}\nseed {seed}: {world.kind}, {world.workers.goal} commits to make, {world.options}"
        ) from error
    return world


def of_shard(request: pytest.FixtureRequest, shard: int, seeds: Sequence[int]) -> Sequence[int]:
    """Return the shard's seeds; for --seed, this one, in the first shard."""
    seed = request.config.getoption("--seed", default=None)
    if seed is not None and shard:
        pytest.skip("one history is enough")
    return seeds if seed is None else [seed]


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_elastic_job_ends_rightly(shard: int, request: pytest.FixtureRequest) -> None:
    for seed in of_shard(request, shard, range(shard, SEEDS, SHARDS)):
        play(seed)


@pytest.mark.long
@pytest.mark.parametrize("shard", range(SHARDS))
def test_many_jobs(shard: int) -> None:
    for seed in range(SEEDS + shard, MANY, SHARDS):
        play(seed)


@pytest.mark.parametrize("seed", ONCE_NOT_CLEAN)
def test_a_job_that_once_ended_wrongly_ends_rightly(seed: int) -> None:
    play(seed)


class WithALateSpare(ElasticWorld):
    """A host for each of two workers, of which b is bad, and a spare that connects late."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.kind = "in-process" if seed % 2 else "unmodified"
        self.hosts = {name: SimHost(name, number, 1) for number, name in enumerate("abc", 1)}
        self.hosts["b"].is_bad = self.hosts["c"].is_slow = True
        self.listing = list(self.hosts)
        cooldown = None if seed % 3 else (1.0, 8.0)
        self.options = ElasticOptions(min_np=2, max_np=2, spares=1, cooldown=cooldown)
        self.spec = replace(self.spec, hosts=tuple(self._hosts()), start_timeout=60.0, elastic=self.options)
        self.engine = Engine(self.spec, 4711)
        self.ledger = Ledger(self.kind)
        self.ledger.list_all([(name, 1) for name in self.listing])
        self.invariants = Invariants(self)
        self.laws = [type(law)(self) for law in self.laws]
        self._turns = [law.turn for law in self.laws]
        self._afters = [law.after for law in self.laws]

    def begin(self) -> None:
        self.tell(on.Began())


@pytest.mark.parametrize("is_planted", [False, True])
def test_a_job_waits_for_the_spare_of_a_bad_host(is_planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_planted:
        right = Policy._can_do_without
        monkeypatch.setattr(Policy, "_can_do_without", lambda self, host, now, **_: right(self, host, now))
    ends: Counter[int | str] = Counter()
    for seed in range(60):
        world = WithALateSpare(seed)
        try:
            world.run()
        except AssertionError as error:
            ends[str(error).partition("\n")[0]] += 1
        else:
            assert world.result is not None
            ends[world.result.exit_code] += 1
    assert (ends == {0: 60}) is not is_planted, ends
    assert not is_planted or ends["the job ends for b before its spare is there"], ends


def test_histories_run_without_a_tracer() -> None:
    assert sys.gettrace() is None


def test_the_same_seed_is_the_same_history_in_another_process() -> None:
    """Nothing may depend on the order of a set."""
    script = (
        f"import sys; sys.path.append({str(ROOT)!r})\n"
        "from tests.simulation.elastic_world import ElasticWorld\n"
        "for seed in range(100):\n"
        "    world = ElasticWorld(seed)\n"
        "    world.run()\n"
        "    print(seed, *world.history, sep='\\n')\n"
    )

    def histories(hash_seed: int) -> str:
        environ = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
        command = [sys.executable, "-c", script]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout

    assert histories(1) == histories(2)


def test_jobs_of_both_kinds_end_well_and_badly() -> None:
    """The world must not be so easy, or so hard, that it shows nothing."""
    worlds = [play(seed) for seed in range(300)]
    for kind in ("in-process", "unmodified"):
        codes = [world.result.exit_code for world in worlds if world.kind == kind and world.result]
        assert len(codes) / 2 < codes.count(0) < len(codes)
    assert max(len(world.workers.rounds) for world in worlds) > 5
    assert {fault for world in worlds for fault in world.faults} > {
        "kill",
        "cut",
        "flap",
        "stick",
        "power_off",
    }


# Bugs planted by hand: each is found, and named


def a_rank_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(hosts):
        places_by_seat = seats(hosts)
        last = list(places_by_seat)[-1]
        places_by_seat[last] = places_by_seat[last]._replace(rank=max(0, places_by_seat[last].rank - 1))
        return places_by_seat

    for module in (round_module, rounds):
        monkeypatch.setattr(module, "seats", wrong)


def a_lost_host_keeps_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self, host, now):
        if self.phase is Phase.RUNNING:
            self._rounds.workers.lose(host.name, now)
        else:
            gone(self, host, now)

    gone = Engine._gone
    monkeypatch.setattr(Engine, "_gone", wrong)


def a_drain_leaves_an_orphan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Draining, "go_on", lambda self, now: [])


def a_failure_leads_to_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rounds, "break_off", lambda self, cause, now: [])


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (a_rank_is_given_twice, "the ranks are [0, "),
        (a_lost_host_keeps_its_connection, "was released and is none"),
        (a_drain_leaves_an_orphan, "is drained, and workers live there"),
        (a_failure_leads_to_no_round, "ticks without end"),
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert first_found(range(ENOUGH_FOR_A_MUTANT), words)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.plant.__name__)
def test_a_planted_bug_over_time_is_found_by_its_law(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search begins just before the first seed that finds the bug."""
    assert bug.seed < MOST_SEEDS
    bug.plant(monkeypatch)
    assert first_found(range(bug.seed, bug.seed + NEXT_FEW), bug.words)


# Bugs planted in the table of a worker's life

FIRST_SEEDS = {(WorkerState.STARTING, WorkerTrigger.ASKED): 370}
"""Seeds before these don't find the bug, and take seconds."""


@pytest.mark.parametrize(
    ("state", "cause", "after", "words"),
    [
        (WorkerState.STARTING, WorkerTrigger.ASKED, WorkerState.STARTING, "enough workers wait for"),
        (WorkerState.STARTING, WorkerTrigger.STOPPED, WorkerState.WAITING, "has its orders, and is WAITING"),
        (WorkerState.WAITING, WorkerTrigger.PLACED, None, "is WAITING, where PLACED can't come"),
        (WorkerState.WAITING, WorkerTrigger.PLACED, WorkerState.WAITING, "is in round 0, and WAITING"),
        (WorkerState.WAITING, WorkerTrigger.DISMISSED, WorkerState.WAITING, "has its orders, and is WAITING"),
        (WorkerState.WORKING, WorkerTrigger.ASKED, WorkerState.STARTING, "enough workers wait for"),
        (WorkerState.WORKING, WorkerTrigger.TAKEN_BACK, WorkerState.WORKING, "is in no round, and WORKING"),
        (WorkerState.WORKING, WorkerTrigger.STOPPED, WorkerState.WORKING, "has its orders, and is WORKING"),
        (WorkerState.WORKING, WorkerTrigger.STOPPED, WorkerState.HANGING, "was told to end"),
        (WorkerState.WORKING, WorkerTrigger.HANGS, WorkerState.WORKING, "has its orders, and is WORKING"),
        (WorkerState.STOPPING, WorkerTrigger.ENDED, WorkerState.STOPPING, "has no fault, and is named"),
        (WorkerState.STOPPING, WorkerTrigger.LOST, None, "is STOPPING, where LOST can't come"),
    ],
)
def test_a_planted_bug_in_the_table_of_lives_is_found(
    state: WorkerState,
    cause: WorkerTrigger,
    after: WorkerState | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = {key: value for key, value in TRANSITIONS[state].items() if key is not cause}
    monkeypatch.setitem(TRANSITIONS, state, table if after is None else {**table, cause: after})
    assert first_found(range(FIRST_SEEDS.get((state, cause), 0), ENOUGH_FOR_A_MUTANT), words)
