"""The engine with a static job, by histories of events: failures, interrupts, and how the job ends."""

import signal

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.actions import Step
from hvlaunch.errors import (
    HostLost,
)
from tests.unit.gloo.history import AT_ONCE, GENTLE, History, facts, lost, spec

# Failures


def test_one_failing_worker_stops_the_rest_and_gives_its_code() -> None:
    job = History(spec("a:2,b:2")).start()
    assert job.exit("b", 1, 7) == [do.Stop("a", GENTLE, (0, 1)), do.Stop("b", GENTLE, (0,))]
    for host, slot in (("a", 0), ("a", 1), ("b", 0)):
        job.exit(host, slot, None, signal.SIGTERM, after=0.01)
    job.close()
    result = job.result
    assert result.exit_code == 7
    assert result.failure is not None
    assert (result.failure.rank, result.failure.host) == (3, "b")
    assert [end.stopped for end in result.exits] == [True, True, True, False]


def test_a_signal_counts_as_128_and_its_number() -> None:
    job = History(spec("a:1")).start()
    job.exit("a", 0, None, signal.SIGKILL)
    job.close()
    assert job.result.exit_code == 137


def test_the_first_failure_is_the_earliest_not_the_first_heard_of() -> None:
    job = History(spec("a:1,b:1")).start()
    job.now += 5.0
    job.exit("a", 0, 1)
    job.exit("b", 0, 9, after=-0.2)
    job.close()
    assert job.result.failure is not None
    assert job.result.failure.rank == 1
    assert job.result.exit_code == 9


@pytest.mark.parametrize(
    ("code", "number", "after", "stopped"),
    [
        (0, None, 0.1, True),
        (143, None, 0.1, True),
        (None, 15, 0.1, True),
        (None, 9, 0.1, False),  # the grace is not over
        (None, 9, 60.0, True),
        (1, None, 0.1, False),
        (None, 11, 0.1, False),
    ],
)
def test_who_ended_because_it_was_stopped(
    code: int | None, number: int | None, after: float, stopped: bool
) -> None:
    job = History(spec("a:2")).start()
    job.exit("a", 0, 7)
    job.exit("a", 1, code, number, after=after)
    job.close()
    assert job.result.exits[1].stopped is stopped
    assert job.result.exit_code == 7


def test_a_master_port_that_another_user_took_ends_a_static_job() -> None:
    job = History(spec("a:2")).start()
    assert job.of(do.Stop, job.exit("a", 0, 1, look="consequence", port_taken_by=4242))
    job.exit("a", 1, None, signal.SIGTERM)
    job.close()
    assert len(job.of(do.Start)) == 1
    assert job.result.failure is not None
    assert (job.result.failure.rank, job.result.failure.port_taken_by) == (0, 4242)


def test_a_command_that_cannot_be_started() -> None:
    job = History(spec("a:1,b:1")).start()
    actions = job.play(on.WorkerNotStarted("b", 0, 0, 127, "train: command not found"))
    assert actions == [do.Stop("a", GENTLE, (0,))]
    job.exit("a", 0, None, signal.SIGTERM, after=0.1)
    job.close()
    assert job.result.exit_code == 127
    assert job.result.failure is not None
    assert job.result.failure.not_started == "train: command not found"


def test_news_of_other_rounds_and_news_that_come_twice_change_nothing() -> None:
    job = History(spec("a:2")).start()
    assert job.play(on.WorkerExited(host="a", round=1, slot=0, code=3, signal=None, at=job.now)) == []
    assert job.play(on.WorkerExited(host="a", round=0, slot=5, code=3, signal=None, at=job.now)) == []
    job.exit("a", 0, 0)
    assert job.exit("a", 0, 5) == []
    job.exit("a", 1, 0)
    job.close()
    assert job.result.exit_code == 0


def test_a_lost_host_ends_the_job() -> None:
    job = History(spec("a:1,b:1")).start()
    assert job.play(lost("b")) == [do.Stop("a", GENTLE, (0,))]
    assert job.exit("a", 0, None, signal.SIGTERM, after=0.1) == [do.Release("a")]
    job.close()
    assert job.result.exit_code == 69
    assert job.result.failure is None


def test_workers_of_whose_start_nothing_was_heard_never_started() -> None:
    job = History(spec("a:2,b:2")).start()
    job.play(*(on.WorkerStarted(host, 0, slot, 1) for host, slot in (("a", 0), ("a", 1), ("b", 1))))
    job.play(lost("b"))
    for slot in (0, 1):
        job.exit("a", slot, None, signal.SIGTERM, after=0.1)
    job.close()
    assert job.result.never_started == (2,)


@pytest.mark.parametrize(
    ("alone", "code", "told"),
    [
        ({0: "torch", 1: "torch"}, 0, [tell.WorkersAlone(2, ("torch",))]),
        ({0: "torch"}, 0, []),
        ({0: "torch", 1: "torch"}, 1, []),
    ],
)
def test_workers_that_never_met_may_have_been_single_jobs(
    alone: dict[int, str], code: int, told: list[tell.WorkersAlone]
) -> None:
    job = History(spec("a:2")).start()
    for slot, library in alone.items():
        job.play(on.WorkerAlone("a", 0, slot, library))
    job.exit("a", 0, code)
    job.exit("a", 1, 0)
    job.close()
    assert job.of(tell.WorkersAlone) == told
    assert isinstance(job.actions[-1], do.Finish)


def test_a_worker_that_fails_because_its_peers_are_gone_is_not_the_cause() -> None:
    job = History(spec("a:1,b:1")).start()
    job.play(lost("b"))
    job.exit("a", 0, 1, after=0.01)
    job.close()
    assert job.result.exit_code == 69
    assert job.problem.kind == "HostLost"
    assert job.result.failure is None


def test_a_host_lost_after_a_failure_leaves_the_failures_code() -> None:
    job = History(spec("a:1,b:1")).start()
    job.exit("a", 0, 7)
    actions = job.play(lost("b"))
    assert do.Release("a") in actions
    job.close()
    assert job.result.exit_code == 7
    assert [str(end.problem) for end in job.of(tell.HostLostAtEnd)] == ["host b: lost: silent"]


def test_an_agent_that_is_told_to_end_by_others_ends_the_job_and_is_waited_for() -> None:
    job = History(spec("a:1,b:1")).start()
    parting = on.HostParting("b", HostLost("lost: got SIGTERM", host="b").problem)
    assert job.play(parting) == [do.Stop("a", GENTLE, (0,)), do.Stop("b", GENTLE, (0,))]
    job.exit("b", 0, None, signal.SIGTERM, after=0.1)
    assert job.exit("a", 0, None, signal.SIGTERM, after=0.1) == [do.Release("a"), do.Release("b")]
    job.close()
    assert job.result.exit_code == 69
    assert job.result.failure is None


def test_all_hosts_lost() -> None:
    job = History(spec("a:1,b:1")).start()
    job.play(lost("a"))
    job.play(lost("b"))
    assert job.result.exit_code == 69


def test_a_host_lost_when_all_have_ended_well_is_only_said() -> None:
    job = History(spec("a:1,b:1")).start()
    job.exit("a", 0)
    job.exit("b", 0)
    job.play(lost("b"), on.HostClosed("a"))
    assert job.result.exit_code == 0
    assert [str(end.problem) for end in job.of(tell.HostLostAtEnd)] == ["host b: lost: silent"]


def test_a_host_that_does_not_close_is_abandoned_and_said() -> None:
    job = History(spec("a:1")).start()
    job.exit("a", 0)
    actions = job.wait()
    assert do.Abandon("a") in actions
    assert job.result.exit_code == 0
    assert tell.HostNotClosing("a") in actions


def test_processes_that_cannot_be_killed_are_said() -> None:
    job = History(spec("a:1")).start()
    job.exit("a", 0)
    assert tell.HostLeftOver("a", 2, (7, 8)) in job.play(on.HostClosed("a", 2, (7, 8)))


def test_a_worker_that_outlives_sigkill_is_waited_for_a_while_and_told_when_its_host_closes() -> None:
    job = History(spec("a:1,b:1,c:1")).start()
    job.exit("a", 0, 7)
    job.exit("c", 0, None, signal.SIGTERM)
    began = job.now
    while not job.of(do.Release):
        job.wait()
    assert job.now - began < 10.0 + 30.0 + 6.0
    [lost] = job.of(tell.HostLostAtEnd)
    assert str(lost.problem).startswith("host b: lost: its workers do not end, even after SIGKILL; try: ps ")
    job.play(on.HostClosed("a"), on.HostClosed("c"))
    assert tell.HostLeftOver("b", 1, (7,)) in job.play(on.HostClosed("b", 1, (7,)))
    assert job.result.exit_code == 7


def where_a_worker_is_to_end_on_a_host_that_does_not_answer() -> History:
    job = History(spec("a:1,b:1", lease=120.0)).start()
    job.play(on.HostQuiet("b"))
    job.exit("a", 0, 7)
    while job.engine.deadline is not None and job.engine.deadline < 100.0 + 100.0:
        job.wait()
    assert not job.of(tell.HostLostAtEnd)
    assert not job.of(do.Release)
    return job


def test_a_host_of_a_static_job_is_waited_for_that_can_not_tell_of_its_workers_ends() -> None:
    job = where_a_worker_is_to_end_on_a_host_that_does_not_answer()
    job.play(on.HostAnswers("b"))
    job.exit("b", 0, None, signal.SIGTERM)
    assert {action.host for action in job.of(do.Release)} == {"a", "b"}


def test_such_a_host_is_waited_for_no_longer_than_for_a_lost_one() -> None:
    job = where_a_worker_is_to_end_on_a_host_that_does_not_answer()
    while not job.of(do.Release):
        job.wait()
    assert job.now - 100.0 <= 20.0 + 120.0 + 15.0 + 5.5
    assert [end.problem.host for end in job.of(tell.HostLostAtEnd)] == ["b"]


# Interrupts


def test_ctrl_c_is_int_then_term_then_kill() -> None:
    job = History(spec("a:1", grace=10.0)).start()
    actions = job.play(on.Interrupted(signal.SIGINT))
    steps = (Step(signal.SIGINT, 0.0), Step(signal.SIGTERM, 5.0), Step(signal.SIGKILL, 10.0))
    assert job.of(do.Stop, actions) == [do.Stop("a", steps)]
    job.exit("a", 0, None, signal.SIGINT, after=0.1)
    job.close()
    assert job.result.exit_code == 130
    assert job.result.interrupted == signal.SIGINT
    assert job.result.exits[0].stopped


def test_ctrl_c_twice_kills_at_once() -> None:
    job = History(spec("a:1")).start()
    job.play(on.Interrupted(signal.SIGINT))
    assert job.play(on.Interrupted(signal.SIGINT)) == [do.Stop("a", AT_ONCE)]
    job.exit("a", 0, None, signal.SIGKILL, after=0.1)
    job.close()
    assert job.result.exit_code == 130


def test_ctrl_c_later_still_leaves_what_does_not_end_to_the_agents() -> None:
    """Such as a worker that hangs in the kernel, or output that nobody reads."""
    job = History(spec("a:1,b:1")).start()
    job.play(on.Interrupted(signal.SIGINT))
    for _ in range(2):  # the second is too soon to say
        assert job.play(on.Interrupted(signal.SIGINT)) == [do.Stop("a", AT_ONCE), do.Stop("b", AT_ONCE)]
    job.exit("a", 0, None, signal.SIGKILL, after=0.1)
    job.now += 2.0
    actions = job.play(on.Interrupted(signal.SIGINT))
    assert job.of(do.Abandon, actions) == [do.Abandon("a"), do.Abandon("b")]
    assert job.result.exit_code == 130
    assert [one.rank for one in job.result.exits] == [0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE])
def test_other_signals_are_term_then_kill(number: signal.Signals) -> None:
    job = History(spec("a:1")).start()
    actions = job.play(on.Interrupted(number))
    assert job.of(do.Stop, actions) == [do.Stop("a", GENTLE)]
    job.exit("a", 0, 1, after=0.1)
    job.close()
    assert job.result.exit_code == 128 + number
    assert job.result.failure is None


def test_a_console_that_nobody_reads_is_told_as_that() -> None:
    job = History(spec("a:1")).start()
    assert tell.Interrupting(signal.SIGPIPE, 10.0) in job.play(on.Interrupted(signal.SIGPIPE))


def test_an_interrupt_while_a_failure_is_being_handled_kills_and_keeps_the_code() -> None:
    job = History(spec("a:2")).start()
    job.exit("a", 0, 7)
    assert job.play(on.Interrupted(signal.SIGINT)) == [do.Stop("a", AT_ONCE)]
    job.exit("a", 1, None, signal.SIGKILL, after=0.1)
    job.close()
    assert job.result.exit_code == 7


def test_an_interrupt_while_connecting_lets_go_of_everything() -> None:
    job = History(spec("a:1,b:1"))
    job.play(on.Began(), on.HostConnected("a"), on.HostReady("a", facts(1)))
    assert job.play(on.Interrupted(signal.SIGINT)) == [do.Abandon("b"), do.Release("a")]
    job.close()
    assert job.result.exit_code == 130


def test_an_interrupt_while_closing_does_not_wait() -> None:
    job = History(spec("a:1")).start()
    job.exit("a", 0)
    actions = job.play(on.Interrupted(signal.SIGINT))
    assert do.Abandon("a") in actions
    assert job.result.exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGPIPE, signal.SIGHUP])
def test_a_job_that_is_closing_is_not_cut_short_because_nobody_looks_on_any_more(
    number: signal.Signals,
) -> None:
    job = History(spec("a:1")).start()
    job.exit("a", 0)
    assert job.play(on.Interrupted(number)) == []
    job.close()
    assert job.result.exit_code == 0


def test_user_signals_go_to_the_workers_while_there_are_any() -> None:
    job = History(spec("a:1,b:1"))
    assert job.play(on.UserSignal(signal.SIGUSR1)) == []
    job.start()
    assert job.play(on.UserSignal(signal.SIGUSR1)) == [
        do.Signal("a", signal.SIGUSR1),
        do.Signal("b", signal.SIGUSR1),
    ]
    job.play(lost("b"))
    assert job.play(on.UserSignal(signal.SIGUSR2)) == [do.Signal("a", signal.SIGUSR2)]


def test_a_tick_before_its_time_changes_nothing() -> None:
    job = History(spec("a:1"))
    job.play(on.Began())
    assert job.play(on.Tick()) == []
