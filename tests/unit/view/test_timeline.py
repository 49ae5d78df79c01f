"""The time line, of records as docs/interfaces/events.md has them."""

import pytest

from hvlaunch.view.timeline import Timeline


def record(kind, second, **fields):
    return {"time": f"1970-01-01T00:00:{second:02}.000Z", "job": "j", "type": kind, **fields}


def seen(*records):
    timeline = Timeline()
    for one in records:
        timeline.add_event(one)
    return timeline


def test_a_job_in_two_rounds():
    timeline = seen(
        record("host_ready", 1, host="a"),
        record("round_starting", 2, round=0, workers=3, hosts=["a", "b"]),
        record("workers_starting", 2, host="a", round=0, ranks=[0, 1]),
        record("workers_starting", 2, host="b", round=0, ranks=[2]),
        record("worker_exited", 5, host="b", rank=2, round=0, code=None, signal="SIGKILL"),
        record(
            "round_ending",
            6,
            round=0,
            cause="rank 2 on host b was killed",
            reason={"kind": "worker_ended", "rank": 2, "host": "b"},
        ),
        record("worker_exited", 7, host="a", rank=0, round=0, code=None, signal="SIGTERM"),
        record("round_starting", 8, round=1, workers=2, hosts=["a"]),
        record("workers_starting", 8, host="a", round=1, ranks=[0, 1]),
    )
    first, second = timeline.rounds
    assert (first.begin, first.end, first.hosts, first.cause) == (
        2.0,
        6.0,
        {"a": 2, "b": 1},
        "rank 2 on host b was killed",
    )
    assert (second.number, second.end, second.hosts) == (1, None, {"a": 2})
    assert [(one.kind, one.text) for one in timeline.moments(is_elastic=True)] == [
        ("host", "a is ready"),
        ("round", "round 0 begins: 3 workers on a,b"),
        ("failure", "rank 2 on b ended with signal SIGKILL"),
        ("failure", "round 0 ends: rank 2 on host b was killed"),
        ("round", "round 1 begins: 2 workers on a"),
    ]


def test_the_only_round_of_a_static_job_is_not_named():
    timeline = seen(
        record("host_ready", 1, host="a"),
        record("round_starting", 2, round=0, workers=2, hosts=["a"]),
        record("worker_exited", 5, host="a", rank=1, round=0, code=1, signal=None),
    )
    assert [(one.kind, one.text) for one in timeline.moments(is_elastic=False)] == [
        ("host", "a is ready"),
        ("round", "2 workers on a"),
        ("failure", "rank 1 on a ended with exit code 1"),
    ]


def test_workers_that_ask_are_placed_one_by_one():
    timeline = seen(
        record("round_formed", 1, round=0, workers=2, hosts=["a"]),
        record("worker_placed", 1, round=0, host="a", rank=0),
        record("worker_placed", 1, round=0, host="a", rank=1),
        record("worker_placed", 2, round=0, host="b", rank=2),
    )
    assert timeline.rounds[0].hosts == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("end", "text"),
    [
        ({"code": 3, "signal": None}, "rank 0 on a ended with exit code 3"),
        ({"code": None, "signal": "SIGKILL", "oom_killed": True}, "rank 0 on a ended with signal SIGKILL, killed for want of memory"),
    ],
)  # fmt: skip
def test_a_failure_says_how(end, text):
    (moment,) = seen(record("worker_exited", 1, host="a", rank=0, round=0, **end)).moments(is_elastic=True)
    assert (moment.text, moment.host, moment.rank) == (text, "a", 0)


def test_good_end_of_a_worker_is_not_shown():
    assert not seen(record("worker_exited", 1, host="a", rank=0, round=0, code=0, signal=None)).moments(
        is_elastic=True
    )


def test_the_cause_of_a_lost_host():
    (moment,) = seen(
        record("host_lost", 1, host="a", error="HostLost", cause="no answer for 30 s", hint=None)
    ).moments(is_elastic=True)
    assert moment.text == "a is lost: no answer for 30 s"


def test_text_from_elsewhere_is_made_safe():
    (moment,) = seen(record("host_lost", 1, host="a", cause="\x1b[2Jgone")).moments(is_elastic=True)
    assert moment.text == r"a is lost: \x1b[2Jgone"


def test_the_end_of_the_job_ends_its_round():
    timeline = seen(
        record("round_starting", 1, round=0, workers=1, hosts=["a"]), record("job_ended", 4, exit_code=0)
    )
    assert timeline.rounds[0].end == 4.0
    assert timeline.ending is not None


def test_kept_lines_are_bounded():
    timeline = seen(*(record("host_ready", 1, host=f"h{number}") for number in range(1000)))
    moments = timeline.moments(is_elastic=True)
    assert [len(moments), moments[-1].text] == [200, "h999 is ready"]
