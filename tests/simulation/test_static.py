"""Thousands of static jobs with faults: each ends rightly, and leaves no worker."""

import re
from collections.abc import Callable, Iterable

import pytest

from hvlaunch.engine import lifecycle
from hvlaunch.engine.lifecycle import outcome
from hvlaunch.engine.policy import Policy
from hvlaunch.engine.round import cause_of, first_failed
from hvlaunch.engine.rounds import FreshWorkers
from hvlaunch.engine.waits import Wait
from hvlaunch.job import JobResult, WorkerExit
from tests.simulation.bugs import (
    a_closing_agent_is_awaited_forever,
    a_survivor_of_sigkill_is_awaited_forever,
    nothing_begins,
)
from tests.simulation.world import World

SEEDS = 2000
LATE = 0.2
"""Seconds by which a due tick may be late in this world."""


def check(world: World, result: JobResult) -> None:
    assert not [host.name for host in world.hosts.values() if host.live], "workers are left"
    codes = {int(match[1]) for cause in world.broken if (match := re.match(r"exit (\d+)", cause))}
    slots = sum(host.slots or 0 for host in world.spec.hosts)
    if not world.broken:
        assert result.exit_code == 0
    assert set(world.sizes) <= {world.spec.np or slots} or (world.spec.skip_bad_hosts and not world.spec.np)
    if result.exit_code == 0:
        check_good(world, result)
    elif result.interrupted is not None:
        assert result.exit_code == 128 + result.interrupted
        assert "interrupt" in world.broken
    elif result.error is not None:
        assert result.exit_code == 69
        assert any(cause.startswith(("lose", "connect", "stick")) for cause in world.broken)
        if world.spec.skip_bad_hosts and not world.sizes:
            bad = {cause.split()[1] for cause in world.broken if cause.startswith(("lose", "connect"))}
            left = sum(host.slots or 0 for host in world.spec.hosts if host.name not in bad)
            least = max(world.spec.np or 1, (world.spec.end_with_rank or 0) + 1)
            assert left < least, "the good hosts have enough slots"
    else:
        assert result.failure is not None
        assert result.exit_code in codes
        assert world.spec.end_with_rank not in world.ended_well or result.failure.when <= ended_at(world)
        check_cause(world, result)
    assert len({end.rank for end in result.exits}) == len(result.exits)


def check_good(world: World, result: JobResult) -> None:
    """Check that all workers ended well, or the rank of --end-with-rank did."""
    assert result.failure is None
    assert result.error is None
    (size,) = set(world.sizes)
    last = world.spec.end_with_rank
    assert world.ended_well == set(range(size)) or (last is not None and last in world.ended_well)


def ended_at(world: World) -> float:
    """Return the end of the rank that is to end the job, as far as it was heard of."""
    assert world.result is not None
    ends = (end.when for end in world.result.exits if end.rank == world.spec.end_with_rank)
    return next(ends, float("inf"))


def check_cause(world: World, result: JobResult) -> None:
    """Check the named worker, and how soon the others were stopped."""
    causes = [end for end in result.exits if not (end.ok or end.stopped or end.was_told)]
    causes = [end for end in causes if end.look in ("cause", "silent") and end.when <= ended_at(world)]
    named = result.failure
    assert named is not None
    if causes:
        assert named.look in ("cause", "silent"), "a victim is named, and there was a cause"
        assert named.when <= min(end.when for end in causes), "a later failure is named"
    if result.first_victim is not None:
        assert named.look != "consequence", "a victim is named in another's place"
    assert world.failed_at is not None
    assert world.stopped_at is not None
    assert world.stopped_at <= world.failed_at + world.spec.settle + LATE, "a failure waits without end"


def play(seed: int, faults: float, failures: float | None = None) -> None:
    world = World(seed, faults=faults, failures=failures)
    try:
        check(world, world.run())
    except AssertionError as error:
        history = "\n".join(world.history)
        raise AssertionError(f"seed {seed}, faults {faults}: {error}\n{history}") from error


@pytest.mark.parametrize("faults", [0.0, 0.02, 0.3])
def test_every_job_ends_rightly(faults: float) -> None:
    for seed in range(SEEDS):
        play(seed, faults)


def test_the_cause_is_named_in_time() -> None:
    """Only workers fail here."""
    for seed in range(SEEDS // 4):
        play(seed, 0.0, 0.5)


def lowest_rank(ends: Iterable[WorkerExit]) -> WorkerExit | None:
    """Ignore the times of the ends."""
    ends = tuple(ends)
    cause = cause_of(ends)
    same = [
        end for end in ends if cause is not None and end.look == cause.look and not (end.ok or end.stopped)
    ]
    return min(same, key=lambda end: end.rank, default=cause)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (lambda patch: nothing_begins(patch, Wait.SETTLING), "a failure waits without end"),
        (lambda patch: patch.setattr(lifecycle, "cause_of", first_failed), "a victim is named"),
        (lambda patch: patch.setattr(lifecycle, "cause_of", lowest_rank), "a later failure is named"),
    ],
)
def test_a_planted_bug_in_the_named_cause_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=words):
        test_the_cause_is_named_in_time()


def test_the_same_seed_is_the_same_history() -> None:
    first, second = World(7, faults=0.3), World(7, faults=0.3)
    first.run()
    second.run()
    assert first.history == second.history


# Bugs planted by hand: each is found


def a_bad_host_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FreshWorkers, "_enough", FreshWorkers._all)


def the_last_rank_is_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self, exit_, now):
        return ended(self, exit_._replace(rank=self._spec.end_with_rank or 0), now)

    ended = Policy._static_ended
    monkeypatch.setattr(Policy, "_static_ended", wrong)


def ends_after_the_last_rank_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args, last_ranks):
        return result(*args, last_ranks=())

    result = outcome
    monkeypatch.setattr("hvlaunch.engine.lifecycle.outcome", wrong)


@pytest.mark.parametrize(
    "plant",
    [
        a_survivor_of_sigkill_is_awaited_forever,
        a_closing_agent_is_awaited_forever,
        a_bad_host_is_awaited,
        the_last_rank_is_any_rank,
        ends_after_the_last_rank_count,
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    for seed in range(SEEDS):
        world = World(seed, faults=0.2)
        try:
            check(world, world.run())
        except AssertionError:
            return
    pytest.fail("no seed finds it")
