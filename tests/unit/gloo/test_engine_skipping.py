"""A static job that does without bad hosts, and one that ends with a rank."""

import signal

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.errors import ConnectFailed
from tests.unit.gloo.history import GENTLE, History, facts, ready, spec

REFUSED = ConnectFailed("connection refused", host="b").problem


def skipping(hosts: str, **changes: object) -> History:
    job = History(spec(hosts, skip_bad_hosts=True, **changes))
    job.play(on.Began())
    return job


def places(job: History) -> list[tuple[str, list[int]]]:
    return [(start.host, [launch.place.rank for launch in start.launches]) for start in job.of(do.Start)]


def meet(job: History) -> None:
    for probe in job.of(do.Probe):
        job.play(on.HostProbed(probe.host, probe.target, probe.addresses[0], probe.agent))


def test_a_bad_host_is_skipped_and_the_next_takes_its_place() -> None:
    job = skipping("a:2,b:2,c:2", np=4)
    assert [connect.host.name for connect in job.of(do.Connect)] == ["a", "b", "c"]
    job.play(*ready("a", 1), on.HostFailed("b", REFUSED))
    assert not places(job)
    job.play(*ready("c", 3))
    meet(job)
    assert places(job) == [("a", [0, 1]), ("c", [2, 3])]
    assert job.of(tell.HostSkipped) == [tell.HostSkipped(REFUSED)]
    for host in "ac":
        for slot in (0, 1):
            job.exit(host, slot)
    job.close()
    assert job.result.exit_code == 0


def test_hosts_that_are_not_needed_are_not_waited_for() -> None:
    job = skipping("a:2,b:2,c:2", np=2)
    assert job.play(*ready("b", 2)) == []
    actions = job.play(*ready("a", 1))
    assert places(job) == [("a", [0, 1])]
    assert do.Release("b") in actions
    assert do.Abandon("c") in actions
    assert not job.of(tell.HostSkipped)


def test_by_node_a_worker_is_on_each_good_host_though_one_has_slots_enough() -> None:
    job = skipping("a:4,b:4,c:4,d:4", np=3, map_by="node")
    job.play(*ready("a", 1), on.HostFailed("b", REFUSED))
    assert not places(job)
    job.play(*ready("c", 3), *ready("d", 4))
    meet(job)
    assert [(host, len(ranks)) for host, ranks in places(job)] == [("a", 1), ("c", 1), ("d", 1)]


def test_by_node_fewer_good_hosts_take_more_workers_each() -> None:
    job = skipping("a:4,b:4,c:1", np=4, map_by="node")
    job.play(*ready("a", 1), on.HostFailed("b", REFUSED), *ready("c", 3))
    meet(job)
    assert [(host, len(ranks)) for host, ranks in places(job)] == [("a", 3), ("c", 1)]


def test_without_np_all_good_hosts_are_used() -> None:
    job = skipping("a:2,b:2,c:1")
    job.play(*ready("a", 1), *ready("c", 3), on.HostFailed("b", REFUSED))
    meet(job)
    assert places(job) == [("a", [0, 1]), ("c", [2])]


def test_too_few_slots_are_an_error_with_the_hosts_that_failed() -> None:
    job = skipping("a:2,b:2", np=4)
    job.play(*ready("a", 1), on.HostFailed("b", REFUSED))
    job.close()
    assert [error.kind for error in job.problem.errors] == ["ConnectFailed", "NotEnoughSlots"]
    assert job.result.exit_code == 69
    assert not job.of(tell.HostSkipped)


def test_a_host_without_the_working_directory_is_skipped_and_released() -> None:
    job = skipping("a:1,b:1")
    job.play(
        on.HostConnected("b"),
        on.HostReady("b", facts(2, cwd_error="no such file or directory")),
        *ready("a", 1),
    )
    assert places(job) == [("a", [0])]
    assert job.of(do.Release) == [do.Release("b")]
    assert [skipped.problem.host for skipped in job.of(tell.HostSkipped)] == ["b"]


def test_a_host_that_does_not_answer_is_skipped_when_its_time_is_over() -> None:
    job = skipping("a:1,b:1", start_timeout=5.0)
    job.play(*ready("a", 1))
    assert not places(job)
    job.wait()
    assert places(job) == [("a", [0])]


def test_a_host_that_cannot_reach_another_is_skipped() -> None:
    job = skipping("a:1,b:1,c:1")
    job.play(*ready("a", 1), *ready("b", 2), *ready("c", 3))
    job.play(on.HostProbed("c", "a", "10.0.0.1"), on.HostProbed("a", "b", "10.0.0.2"))
    job.play(on.HostProbed("b", "c", "10.0.0.3"), on.HostProbed("b", "a", None))
    job.wait()
    meet(job)
    assert places(job)[:2] == [("a", [0]), ("c", [1])]
    assert [skipped.problem.host for skipped in job.of(tell.HostSkipped)] == ["b"]


def test_a_host_that_is_lost_later_ends_the_job() -> None:
    job = skipping("a:1,b:1")
    job.play(*ready("a", 1), *ready("b", 2))
    meet(job)
    actions = job.play(on.HostGone("b", REFUSED))
    assert do.Stop("a", GENTLE, (0,)) in actions


# --end-with-rank


def test_the_job_is_done_when_the_rank_is() -> None:
    job = History(spec("a:1,b:2", end_with_rank=0)).start()
    assert job.exit("b", 0) == []
    actions = job.exit("a", 0)
    assert job.of(tell.JobEnding, actions) == [tell.JobEnding(why.RankDone(0, "a"))]
    assert do.Stop("b", GENTLE) in actions
    job.exit("b", 1, None, signal.SIGTERM)
    job.close()
    assert (job.result.exit_code, job.result.failure, job.result.error) == (0, None, None)


def test_nothing_is_told_where_the_rank_is_the_last() -> None:
    job = History(spec("a:2", end_with_rank=0))
    job.play(on.Began(), on.HostConnected("a"), on.HostReady("a", facts(1, peer_address=None)))
    job.exit("a", 1)
    job.exit("a", 0)
    job.close()
    assert job.result.exit_code == 0
    assert not job.of(tell.JobEnding)


def test_what_others_do_after_the_end_of_the_rank_does_not_count() -> None:
    """They lose their connections to it; and the news of that may come before the news of its end."""
    job = History(spec("a:1,b:1,c:1", end_with_rank=0)).start()
    job.exit("b", 0, 1, after=0.2)
    job.exit("a", 0, after=0.1)
    job.exit("c", 0, None, signal.SIGTERM, after=0.3)
    job.close()
    assert (job.result.exit_code, job.result.failure) == (0, None)


@pytest.mark.parametrize(("host", "code"), [("a", 3), ("b", 4)])
def test_a_failure_before_is_one(host: str, code: int) -> None:
    job = History(spec("a:1,b:1", end_with_rank=0)).start()
    job.exit(host, 0, code)
    job.exit("b" if host == "a" else "a", 0, 0, after=0.5)
    job.close()
    assert job.result.exit_code == code


def test_a_rank_that_there_is_not_is_an_error() -> None:
    job = History(spec("a:1,b:1", end_with_rank=2))
    job.connect()
    job.close()
    assert (job.result.exit_code, job.problem.cause) == (2, "--end-with-rank 2: the job has only ranks 0-1")
