"""The engine when hosts say that a job hangs."""

import signal
from collections.abc import Mapping
from typing import Literal

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.watch.overview import overview
from tests.unit.gloo.elastic_history import places, training
from tests.unit.gloo.history import GENTLE, History, spec

HANGS = on.JobHangs(60.0, (3,), "rank 3 waits")


def test_by_default_a_hang_is_told_and_shown_until_the_job_goes_on() -> None:
    job = History(spec("a:2,b:2")).start()
    assert job.play(HANGS) == [tell.JobHanging(60.0, (3,), "rank 3 waits")]
    assert overview(job.engine, job.now, lambda _: None)["hang"] == HANGS._asdict()
    assert job.play(on.JobGoesOn()) == [tell.JobGoingOn()]
    assert overview(job.engine, job.now, lambda _: None)["hang"] is None
    assert job.play(on.JobGoesOn()) == []


@pytest.mark.parametrize("on_hang", ["stop", "restart"])
def test_a_static_job_ends_with_a_code_of_its_own(on_hang: Literal["stop", "restart"]) -> None:
    job = History(spec("a:1,b:1", on_hang=on_hang)).start()
    actions = job.play(HANGS)
    assert job.of(do.Stop, actions) == [do.Stop("a", GENTLE, (0,)), do.Stop("b", GENTLE, (0,))]
    for host in "ab":
        job.exit(host, 0, None, signal.SIGTERM)
    job.close()
    assert job.result.exit_code == 76
    assert job.result.error is not None
    assert "rank 3 waits" in job.result.error.cause


def test_an_elastic_job_begins_another_round() -> None:
    job = training("a:1,b:1", on_hang="restart")
    actions = job.play(HANGS)
    assert job.of(do.Break, actions) == [do.Break(0, why.JobHung(60.0, "rank 3 waits"))]
    job.ask("a", 0, 0, 5)
    assert sorted(places(job.ask("b", 0, 0, 5))) == ["a/0", "b/0"]


def test_a_job_that_ends_anyway_does_not_hang() -> None:
    job = History(spec("a:1,b:1", on_hang="stop")).start()
    job.play(on.Interrupted(signal.SIGINT))
    assert job.play(HANGS) == []


def test_what_a_worker_tells_is_its_progress_else_its_commits_are() -> None:
    job = training("a:2")
    told = {"step": 7, "total": 9, "rate": 0.5, "metrics": {"loss": 0.1}}
    workers = overview(job.engine, job.now, {("a", 1, 0): told}.get)["workers"]
    committed: Mapping[str, object] = {"step": 5, "total": None, "rate": None, "metrics": {}}
    assert [worker["progress"] for worker in workers] == [committed, told]
    static = History(spec("a:1")).start()
    assert overview(static.engine, static.now, lambda _: None)["workers"][0]["progress"] is None
