"""Failures that are consequences of another: the wait for the cause, and the named and excluded ones."""

import signal

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.job import JobResult, Look
from tests.unit.gloo.elastic_history import arrive, elastic, excluded, training, wire
from tests.unit.gloo.history import GENTLE, History, lost, spec


def named(result: JobResult) -> tuple[int | None, int | None, int]:
    """Return the ranks of the cause and of the first victim, and the exit code."""
    cause, victim = result.failure, result.first_victim
    return cause and cause.rank, victim and victim.rank, result.exit_code


def test_a_late_cause_is_named_and_ends_the_wait() -> None:
    job = History(spec("a:2,b:2")).start()
    assert job.exit("a", 0, 1, look="consequence") == []
    assert job.engine.deadline == job.now + 2.0
    job.now += 0.5
    assert job.exit("a", 1, 1, look="consequence") == []
    job.now += 0.5
    assert job.exit("b", 1, 7, look="cause") == [do.Stop("b", GENTLE, (0,))]
    job.exit("b", 0, None, signal.SIGTERM, after=0.1)
    job.close()
    assert named(job.result) == (3, 0, 7)


@pytest.mark.parametrize("look", ["cause", "silent"])
def test_a_cause_stops_the_others_at_once(look: Look) -> None:
    job = History(spec("a:1,b:1")).start()
    assert job.exit("b", 0, 7, look=look) == [do.Stop("a", GENTLE, (0,))]
    job.exit("a", 0, 1, look="consequence", after=0.1)
    job.close()
    assert named(job.result) == (1, None, 7)


def test_without_a_cause_in_time_the_first_failure_is_named() -> None:
    job = History(spec("a:1,b:2")).start()
    job.exit("b", 0, 3, look="consequence")
    job.now += 1.0
    job.exit("b", 1, 4, look="consequence")
    assert do.Stop("a", GENTLE, (0,)) in job.wait()
    job.exit("a", 0, None, signal.SIGTERM, after=0.1)
    job.close()
    assert named(job.result) == (1, None, 3)


def test_the_wait_ends_with_the_last_worker() -> None:
    job = History(spec("a:2")).start()
    job.exit("a", 0, 3, look="consequence")
    assert do.Release("a") in job.exit("a", 1, 4, look="consequence")
    job.close()
    assert named(job.result) == (0, None, 3)


def test_settle_0_never_waits() -> None:
    job = History(spec("a:1,b:1", settle=0.0)).start()
    assert do.Stop("b", GENTLE, (0,)) in job.exit("a", 0, 1, look="consequence")


def test_an_unclear_failure_waits_and_comes_before_consequences() -> None:
    job = History(spec("a:3")).start()
    assert job.exit("a", 0, 1, look="consequence") == []
    assert job.exit("a", 1, 5, look="unclear", after=0.1) == []
    job.wait()
    job.exit("a", 2, None, signal.SIGTERM, after=0.1)
    job.close()
    assert named(job.result) == (1, 0, 5)


def test_a_stopped_cause_is_named_with_the_victims_code() -> None:
    job = History(spec("a:3")).start()
    job.exit("a", 0, 4, look="consequence")
    job.wait()
    job.exit("a", 1, None, signal.SIGTERM, after=0.1)
    job.exit("a", 2, None, signal.SIGTERM, after=0.2, look="cause")
    job.close()
    assert named(job.result) == (2, 0, 4)


def test_a_first_failure_with_a_cause_outweighs_stopped_workers() -> None:
    job = History(spec("a:2")).start()
    job.exit("a", 0, 4)
    job.exit("a", 1, None, signal.SIGTERM, after=0.1, look="cause")
    job.close()
    assert named(job.result) == (0, None, 4)


def test_a_silent_failure_after_a_stop_is_not_the_cause() -> None:
    """Programs may catch SIGTERM, and exit with 1."""
    job = History(spec("a:2")).start()
    job.exit("a", 0, 4, look="consequence")
    job.wait()
    job.exit("a", 1, 1, after=0.1)
    job.close()
    assert named(job.result) == (0, None, 4)


def test_a_host_lost_during_the_wait_is_the_cause() -> None:
    job = History(spec("a:1,b:1")).start()
    job.exit("a", 0, 1, look="consequence")
    job.play(lost("b"))
    job.close()
    assert job.result.exit_code == 69


def test_an_interrupt_ends_the_wait() -> None:
    job = History(spec("a:1,b:1")).start()
    job.exit("a", 0, 1, look="consequence")
    assert any(isinstance(action, do.Stop) for action in job.play(on.Interrupted(signal.SIGINT)))
    job.exit("b", 0, None, signal.SIGINT, after=0.1)
    job.close()
    assert job.result.exit_code == 130


# Elastic jobs


def unmodified(text: str = "a:1,b:1,c:1") -> History:
    job = elastic(text, min_np=2)
    arrive(job, *"abc")
    return job


def test_the_host_of_the_cause_is_excluded_not_the_victims() -> None:
    job = unmodified()
    for number in (1, 2):
        assert job.exit("a", 0, 1, look="consequence") == []
        job.now += 1.0
        assert job.of(tell.RoundEnding, job.exit("c", 0, 1, look="cause"))
        job.exit("b", 0, None, signal.SIGTERM, after=0.1)
        assert len(job.of(tell.RoundStarting)) == number + 1
    assert [host for host, *_ in excluded(job)] == ["c"]


def test_the_host_of_a_stopped_cause_is_excluded() -> None:
    job = unmodified()
    for _ in (1, 2):
        job.exit("a", 0, 1, look="consequence")
        assert job.of(tell.RoundEnding, job.wait())
        job.exit("b", 0, None, signal.SIGTERM, after=0.1)
        job.exit("c", 0, None, signal.SIGTERM, after=0.1, look="cause")
    assert [host for host, *_ in excluded(job)] == ["c"]


def test_without_a_cause_the_first_victims_host_is_excluded() -> None:
    job = unmodified()
    for _ in (1, 2):
        job.exit("a", 0, 1, look="consequence")
        assert job.of(tell.RoundEnding, job.wait())
        job.exit("b", 0, None, signal.SIGTERM, after=0.1)
        job.exit("c", 0, None, signal.SIGTERM, after=0.1)
        wire(job)  # nobody knows the cause, so the hosts try each other once more
    assert [host for host, *_ in excluded(job)] == ["a"]


def test_times_of_an_elastic_job_count_from_its_first_workers() -> None:
    job = unmodified()
    job.now += 20.0
    job.exit("a", 0, 1)
    for host in "bc":
        job.exit(host, 0, None, signal.SIGTERM, after=0.1)
    assert len(job.of(tell.RoundStarting)) == 2
    job.now += 7.0
    job.play(on.Interrupted(signal.SIGINT))
    for host in "abc":
        job.exit(host, 0, None, signal.SIGINT)
    job.close()
    assert job.result.elapsed == pytest.approx(27.0)
    assert [end.when for end in job.result.exits] == pytest.approx([27.0] * 3)


def test_asking_workers_break_off_at_once_and_a_victims_host_has_no_strike() -> None:
    """The workers are not stopped, so the cause shows itself."""
    job = training("a:1,b:1,c:1", min_np=1)
    assert job.of(do.Break, job.exit("a", 0, 1, look="consequence"))
    job.exit("c", 0, 1, look="cause")
    engine_pool = job.engine._pool
    assert (engine_pool["a"].strikes, engine_pool["c"].strikes) == (0, 1)
