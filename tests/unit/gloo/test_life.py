"""The tables of a worker's and a round's states, and the consequences of a missing transition."""

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine.round import ROUND_TRANSITIONS, Round, RoundState, RoundTrigger
from hvlaunch.engine.workers import (
    ENDING,
    LIVING,
    TRANSITIONS,
    InvalidTransition,
    Life,
    WorkerState,
    WorkerTrigger,
)
from hvlaunch.errors import EXIT_INTERNAL
from tests.unit.gloo.elastic_history import elastic, training
from tests.unit.gloo.history import AT_ONCE, GENTLE, History, spec


def break_table(monkeypatch: pytest.MonkeyPatch, state: WorkerState, *causes: WorkerTrigger) -> None:
    """Remove these transitions from the table."""
    left = {cause: after for cause, after in TRANSITIONS[state].items() if cause not in causes}
    monkeypatch.setitem(TRANSITIONS, state, left)


def test_every_state_can_be_reached_and_left() -> None:
    assert set(TRANSITIONS) == set(WorkerState)
    reached = {after for ways in TRANSITIONS.values() for after in ways.values()}
    assert reached == set(WorkerState)
    for state in (*LIVING, *ENDING):
        assert TRANSITIONS[state][WorkerTrigger.LOST] is WorkerState.ENDED
        assert TRANSITIONS[state][WorkerTrigger.ENDED] is WorkerState.ENDED


def test_stopped_workers_never_work_again() -> None:
    for state in ENDING:
        assert set(TRANSITIONS[state].values()) <= {state, WorkerState.ENDED}
    assert not TRANSITIONS[WorkerState.ENDED]


@pytest.mark.parametrize("state", WorkerState)
@pytest.mark.parametrize("cause", WorkerTrigger)
def test_transitions_outside_of_the_table_raise(state: WorkerState, cause: WorkerTrigger) -> None:
    life = Life("worker a/0/0", state, TRANSITIONS)
    after = TRANSITIONS[state].get(cause)
    if after is None:
        with pytest.raises(InvalidTransition):
            life.go(cause, 1.0)
        assert (life.state, life.story) == (state, ())
    else:
        assert life.go(cause, 1.0) is after is life.state


def test_an_invalid_transition_tells_the_story_of_its_worker() -> None:
    life = Life("worker gpu07/3/1", WorkerState.STARTING, TRANSITIONS)
    life.go(WorkerTrigger.ASKED, 12.0)
    life.go(WorkerTrigger.PLACED, 12.5)
    with pytest.raises(InvalidTransition) as caught:
        life.go(WorkerTrigger.DISMISSED, 20.0)
    error = caught.value
    assert (error.name, error.state, error.trigger) == (
        "worker gpu07/3/1",
        WorkerState.WORKING,
        WorkerTrigger.DISMISSED,
    )
    assert [(step.when, step.before, step.after) for step in error.story] == [
        (12.0, WorkerState.STARTING, WorkerState.WAITING),
        (12.5, WorkerState.WAITING, WorkerState.WORKING),
    ]
    assert str(error) == (
        "worker gpu07/3/1 is WORKING, where DISMISSED can't come; before: "
        "-8.00 s STARTING -ASKED-> WAITING; -7.50 s WAITING -PLACED-> WORKING"
    )


def test_only_the_last_transitions_are_remembered() -> None:
    life = Life("worker a/0/0", WorkerState.WAITING, TRANSITIONS)
    for count in range(100):
        life.go(WorkerTrigger.ASKED, float(count))
    assert [step.when for step in life.story] == [float(count) for count in range(84, 100)]


# A defect in a job


def test_a_defect_fails_the_tests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    job = training("a:2")
    job.is_journal_whole = False
    break_table(monkeypatch, WorkerState.WORKING, WorkerTrigger.ENDED)
    with pytest.raises(InvalidTransition):
        job.exit("a", 0, code=1)


def end_by_defect(job: History, event: on.Event) -> list[do.Action]:
    job.is_journal_whole = False
    actions = job.engine.handle_or_end(event, job.now)
    job.actions += actions
    return actions


def test_in_a_job_a_defect_stops_the_workers_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    job = History(spec("a:2,b:1")).start()
    with monkeypatch.context() as broken:
        break_table(broken, WorkerState.WORKING, WorkerTrigger.ENDED)
        actions = end_by_defect(job, on.WorkerExited("a", 0, 0, 1, None, job.now))
    assert {stop.host for stop in job.of(do.Stop, actions)} == {"a", "b"}
    assert all([step.signal for step in stop.steps] == [15, 9] for stop in job.of(do.Stop, actions))
    for host, slot in (("a", 0), ("a", 1), ("b", 0)):
        job.exit(host, slot, code=None, signal=15)
    job.close()
    assert job.result.exit_code == EXIT_INTERNAL
    assert "worker a/0/0 is WORKING, where ENDED can't come" in str(job.result.error)


def test_a_defect_during_the_end_leaves_workers_to_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    job = History(spec("a:2")).start()
    job.play(on.Interrupted(2))
    with monkeypatch.context() as broken:
        break_table(broken, WorkerState.STOPPING, WorkerTrigger.ENDED)
        actions = end_by_defect(job, on.WorkerExited("a", 0, 0, None, 2, job.now))
    assert do.Abandon("a") in actions
    assert job.result.error is not None


def test_a_defect_in_stopping_leaves_workers_to_the_agents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = training("a:2")
    with monkeypatch.context() as broken:
        break_table(broken, WorkerState.WORKING, WorkerTrigger.ENDED, WorkerTrigger.STOPPED)
        actions = end_by_defect(job, on.WorkerExited("a", 0, 0, 1, None, job.now))
    assert do.Abandon("a") in actions
    assert job.result.exit_code == EXIT_INTERNAL


# Ways through the table that histories of jobs take


def test_a_worker_that_hangs_is_killed_alone_and_its_peers_are_told() -> None:
    job = training("a:2,b:1")
    actions = job.play(on.WorkerSuspended("a", 0, 1))
    assert job.of(do.Stop, actions) == [do.Stop("a", AT_ONCE, (1,))]
    assert job.of(do.Break, actions)


def test_unmodified_workers_next_to_one_that_hangs_are_stopped_gently() -> None:
    job = elastic("a:3")
    job.start()
    job.now += 60.0
    actions = job.play(on.WorkerSuspended("a", 0, 1))
    stops = job.of(do.Stop, actions)
    assert [(stop.steps, stop.slots) for stop in stops] == [
        (AT_ONCE, (1,)),
        (GENTLE, (0, 2)),
    ]


# A round's table


def test_every_state_of_a_round_is_in_the_table_and_ends_as_left() -> None:
    assert set(ROUND_TRANSITIONS) == set(RoundState)
    for state in RoundState:
        after = ROUND_TRANSITIONS[state].get(RoundTrigger.FOLLOWED)
        assert after is (None if state is RoundState.LEFT else RoundState.LEFT)
    assert not ROUND_TRANSITIONS[RoundState.LEFT]


def test_a_round_fails_once_and_does_not_run_again() -> None:
    current = Round(3, [], 0.0)
    current.change(why.MoreWorkers(1), 1.0)
    current.break_off(why.NoCommit(5.0), 2.0)
    assert current.state is RoundState.BROKEN
    with pytest.raises(InvalidTransition) as caught:
        current.change(why.MoreWorkers(1), 3.0)
    assert str(caught.value) == (
        "round 3 is BROKEN, where CHANGED can't come; before: "
        "-2.00 s RUNNING -CHANGED-> CHANGING; -1.00 s CHANGING -FAILED-> BROKEN"
    )
