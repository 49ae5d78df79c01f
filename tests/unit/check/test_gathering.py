"""Hosts that wait for each other, and the hosts that a job waits for."""

import threading
import time
from typing import Any

import pytest

from hvlaunch.gloo.examination import Gathering, expected_hosts
from hvlaunch.job import ElasticOptions, Host, JobSpec


def spec(**fields: Any) -> JobSpec:
    hosts = (Host("a", slots=2), Host("b", slots=2), Host("c", slots=2))
    return JobSpec(command=("true",), hosts=hosts, cwd="/", **fields)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"np": 3}, ["a", "b"]),
        ({}, ["a", "b", "c"]),
        ({"np": 3, "skip_bad_hosts": True}, ["a", "b", "c"]),
        ({"np": 1, "elastic": ElasticOptions(min_np=1)}, ["a", "b", "c"]),
    ],
)
def test_a_job_waits_for_hosts_that_it_connects_to(fields: dict[str, Any], names: list[str]) -> None:
    assert expected_hosts(spec(**fields)) == names


def test_hosts_meet_when_all_have_come_or_left() -> None:
    gathering = Gathering(["a", "b", "c"])
    came: list[frozenset[str]] = []
    threads = [
        threading.Thread(target=lambda name=name: came.append(gathering.meet(name, "step", 60.0)))
        for name in "ab"
    ]
    for thread in threads:
        thread.start()
    gathering.leave("c")
    for thread in threads:
        thread.join(60.0)
    assert came == [frozenset("ab")] * 2
    # A host that comes later waits for nobody.
    assert gathering.meet("d", "step", 60.0) == frozenset({"a", "b", "d"})


def test_a_host_that_does_not_come_is_waited_for_as_long_as_allowed() -> None:
    began = time.monotonic()
    assert Gathering(["a", "b"]).meet("a", "step", 0.05) == frozenset("a")
    assert time.monotonic() - began >= 0.05
