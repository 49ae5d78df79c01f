"""A static job whose MASTER_PORT another user's program took: it begins once more where nothing is lost by it."""

import signal

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.course import Phase
from hvlaunch.job import ElasticOptions, MPIOptions
from tests.unit.gloo.history import GENTLE, History, Wanted, lost, ready, spec

THIEF = 4242
AGAIN = tell.BeginningAgain("a", 20001, THIEF)


def taken(job: History, *, has_other_port: bool = True) -> Wanted:
    """Rank 0 could not listen; its agent has kept another port, as a rule."""
    if has_other_port:
        job.play(on.MasterPort("a", 31000))
    return job.exit("a", 0, 1, look="cause", port_taken_by=THIEF)


def is_over(job: History) -> bool:
    return job.engine.phase in (Phase.STOPPING, Phase.CLOSING)


def test_a_second_try_does_not_wait_for_ever_for_the_end_of_the_first() -> None:
    job = History(spec("a:2,b:2")).start()
    taken(job)
    for host, slot in (("a", 1), ("b", 0)):
        job.exit(host, slot, None, signal.SIGTERM)
    while not job.of(do.Finish):
        job.wait()
    assert job.problem.host == "b"
    assert job.result.exit_code == 69


def test_the_job_begins_once_more_in_the_same_places_at_another_port() -> None:
    job = History(spec("a:2,b:2")).start()
    first = job.of(do.Start)
    assert taken(job) == [AGAIN, do.Stop("a", GENTLE, (1,)), do.Stop("b", GENTLE, (0, 1))]
    assert job.exit("b", 0, None, signal.SIGTERM) == []
    assert job.exit("a", 1, None, signal.SIGTERM) == []
    second = job.of(do.Start, job.exit("b", 1, 0, after=0.1))
    assert [(start.host, start.round) for start in second] == [("a", 1), ("b", 1)]
    assert [[launch.place for launch in start.launches] for start in second] == [
        [launch.place for launch in start.launches] for start in first
    ]
    assert {launch.start for start in second for launch in start.launches} == {1}
    assert {start.network.master_port for start in second} == {31000}
    for host, slot in (("a", 0), ("a", 1), ("b", 0), ("b", 1)):
        job.exit(host, slot)
    job.close()
    assert job.result.exit_code == 0
    assert [end.code for end in job.result.exits] == [0, 0, 0, 0]


def test_a_job_of_one_worker_begins_again_at_once() -> None:
    job = History(spec("a:1")).start()
    assert [start.round for start in job.of(do.Start, taken(job))] == [1]


def test_it_begins_again_only_once() -> None:
    job = History(spec("a:1")).start()
    taken(job)
    job.play(on.MasterPort("a", 32000))
    actions = taken(job)
    assert not job.of(do.Start, actions)
    assert tell.JobEnding(why.SecondTryFailed()) in actions
    job.close()
    assert job.result.exit_code == 1
    assert job.result.failure is not None
    assert job.result.failure.port_taken_by == THIEF


def test_any_failure_of_the_second_try_ends_the_job_and_it_says_so() -> None:
    job = History(spec("a:1,b:1")).start()
    taken(job)
    job.exit("b", 0, None, signal.SIGTERM)
    assert tell.JobEnding(why.SecondTryFailed()) in job.exit("b", 0, 7)
    job.exit("a", 0, None, signal.SIGTERM)
    job.close()
    assert job.result.exit_code == 7


@pytest.mark.parametrize("seconds", [59.0, 61.0])
def test_a_script_that_has_worked_for_long_is_not_begun_again(seconds: float) -> None:
    job = History(spec("a:1")).start()
    job.now += seconds
    taken(job)
    assert is_over(job) == (seconds > 60)


def test_nothing_is_begun_again_where_a_worker_has_done_its_work() -> None:
    job = History(spec("a:2")).start()
    job.exit("a", 1, 0)
    assert AGAIN not in taken(job)
    assert is_over(job)


def test_a_worker_had_done_its_work_and_the_news_comes_late() -> None:
    """It was stopped for the second try, and had ended before that."""
    job = History(spec("a:1,b:2")).start()
    job.now += 5.0
    taken(job)
    job.exit("b", 0, 0, after=-0.5)
    assert not job.of(do.Start, job.exit("b", 1, None, signal.SIGTERM))
    job.close()
    assert job.result.exit_code == 1
    assert job.result.failure is not None
    assert job.result.failure.rank == 0


def test_an_earlier_failure_of_another_ends_the_job() -> None:
    job = History(spec("a:1,b:1")).start()
    job.now += 5.0
    taken(job)
    assert not job.of(do.Start, job.exit("b", 0, 7, after=-0.5, look="cause"))
    job.close()
    assert job.result.exit_code == 7


def test_only_rank_0_has_such_a_port() -> None:
    job = History(spec("a:2")).start()
    job.play(on.MasterPort("a", 31000))
    job.exit("a", 1, 1, look="cause", port_taken_by=THIEF)
    assert is_over(job)


def test_an_interrupt_in_between_ends_the_job() -> None:
    job = History(spec("a:1,b:1")).start()
    taken(job)
    job.play(on.Interrupted(signal.SIGINT))
    assert not job.of(do.Start, job.exit("b", 0, None, signal.SIGTERM))
    job.close()
    assert job.result.exit_code == 130


@pytest.mark.parametrize("host", ["a", "b"])
def test_a_host_lost_in_between_ends_the_job(host: str) -> None:
    """Also the one on which no worker is left."""
    job = History(spec("a:1,b:2")).start()
    taken(job)
    job.play(lost(host))
    for slot in (0, 1) if host == "a" else ():
        job.exit("b", slot, None, signal.SIGTERM)
    job.close()
    assert len(job.of(do.Start)) == 2
    assert job.problem.host == host


def test_a_host_that_leaves_by_itself_in_between_ends_the_job() -> None:
    job = History(spec("a:1,b:1")).start()
    taken(job)
    job.play(on.HostClosed("b"))
    job.close()
    assert len(job.of(do.Start)) == 2
    assert job.problem.kind == "NotEnoughSlots"


@pytest.mark.parametrize(
    "changes",
    [
        {"env": {"MASTER_PORT": "29500"}},
        {"mpi": MPIOptions()},
        {"horovod": True},
    ],
)
def test_what_another_port_does_not_help_is_not_begun_again(changes: dict[str, object]) -> None:
    job = History(spec("a:1", **changes)).start()
    taken(job)
    assert is_over(job)


def test_without_another_port_there_is_no_second_try() -> None:
    job = History(spec("a:1")).start()
    taken(job, has_other_port=False)
    assert is_over(job)


def test_input_that_was_given_is_not_given_again() -> None:
    job = History(spec("a:1")).start()
    assert job.play(on.InputRead()) == [do.GiveInput()]
    taken(job)
    assert is_over(job)


def test_input_that_comes_in_between_waits_for_the_second_try() -> None:
    job = History(spec("a:1,b:1")).start()
    taken(job)
    assert job.play(on.InputRead()) == []
    actions = job.exit("b", 0, None, signal.SIGTERM)
    assert [type(action) for action in actions[-3:]] == [do.Start, do.Start, do.GiveInput]


def test_input_of_the_second_try_is_given_at_once() -> None:
    job = History(spec("a:1")).start()
    assert do.GiveInput() not in taken(job)
    assert job.play(on.InputRead()) == [do.GiveInput()]


def test_hosts_that_were_skipped_are_told_of_once() -> None:
    job = History(spec("a:1,b:1,c:1", np=2, skip_bad_hosts=True))
    job.play(on.Began())
    job.names = ["a", "c"]
    job.play(on.HostFailed("b", lost("b").problem))
    for number, name in ((1, "a"), (3, "c")):
        job.play(*ready(name, number))
    job.wire()
    taken(job)
    job.exit("c", 0, None, signal.SIGTERM)
    assert [start.host for start in job.of(do.Start)] == ["a", "c", "a", "c"]
    assert len(job.of(tell.HostSkipped)) == 1


def test_an_elastic_job_begins_its_next_round_as_ever() -> None:
    job = History(spec("a:1", elastic=ElasticOptions(min_np=1))).start()
    assert AGAIN not in taken(job)
    assert [start.round for start in job.of(do.Start)] == [0, 1]
