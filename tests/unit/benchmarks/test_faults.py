"""The judge of benchmarks/faults.py: what is planted in a right result must be found. And its table of kinds of faults."""

from dataclasses import replace

import pytest

from benchmarks.faulty import (
    kinds_of_connections,
    kinds_of_console,
    kinds_of_ends,
    kinds_of_hosts,
    kinds_of_links,
    kinds_of_processes,
)
from benchmarks.faulty.judge import ALLOWANCE, Outcome, judge, shown_lines
from benchmarks.faulty.kind import FORMS, Must, goes_on
from benchmarks.faulty.kinds import KINDS

KILLED = KINDS["an agent gets SIGKILL"]
MUST = Must((69,), r"host {host}: .*SIGKILL", within=5.0)
RIGHT = Outcome(
    host="b",
    code=69,
    seconds=3.0,
    messages="hvlaunch: host b: its agent was killed by SIGKILL\n",
    written={"a.0.0": 3, "b.0.0": 2},
    shown={"a.0.0": [0, 1, 2], "b.0.0": [0]},
)


def test_what_is_right_is_right() -> None:
    assert judge(KILLED, MUST, RIGHT) == []


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"code": None}, "had not ended"),
        ({"code": 0}, "its code is 0, not 69"),
        ({"messages": "hvlaunch: host a: its agent was killed by SIGKILL\n"}, "nothing it says"),
        ({"messages": ""}, "nothing it says"),
        ({"messages": f"{RIGHT.messages}Traceback (most recent call last):\n"}, "a traceback"),
        ({"seconds": 5.1 + ALLOWANCE}, "to end, and 5 are promised"),
        ({"left": ["b: 17 (child of 1) sleep 3600"]}, "left: b: 17"),
        ({"shown": {"a.0.0": [0, 2], "b.0.0": [0]}}, "worker a.0.0: 1 of 3 lines are lost, the first is 1"),
        ({"shown": {"a.0.0": [0, 1], "b.0.0": [0]}}, "worker a.0.0: 1 of 3 lines are lost, the first is 2"),
        ({"shown": {"b.0.0": [0]}}, "worker a.0.0: 3 of 3 lines are lost"),
        ({"shown": {"a.0.0": [0, 1, 1, 2]}}, "in disorder, or twice"),
        ({"shown": {"a.0.0": [1, 0, 2]}}, "in disorder, or twice"),
    ],
)
def test_what_is_wrong_is_found(wrong: dict[str, object], problem: str) -> None:
    assert problem in "; ".join(judge(KILLED, MUST, replace(RIGHT, **wrong)))  # type: ignore[arg-type]


def test_the_hosts_own_lines_may_be_lost_only_where_the_kind_says_so() -> None:
    lossy = replace(RIGHT, shown={"a.0.0": [0, 1, 2]})
    assert judge(KILLED, MUST, lossy) == []
    assert "worker b.0.0: 2 of 2 lines" in "; ".join(judge(replace(KILLED, loses="nobody"), MUST, lossy))


def test_a_fault_that_comes_while_the_job_ends_may_change_nothing() -> None:
    stopped = replace(RIGHT, code=143, messages="", at_end=143)
    assert judge(KILLED, MUST, stopped) == []
    assert judge(KILLED, MUST, replace(stopped, code=1)) == ["its code is 1, not 69"]


def test_an_elastic_job_that_goes_on_says_why() -> None:
    well = replace(RIGHT, code=0)
    assert judge(KILLED, goes_on("host {host}: .*SIGKILL"), well) == []
    assert (
        "nothing it says" in judge(KILLED, goes_on("host {host}: .*SIGKILL"), replace(well, messages=""))[0]
    )
    assert judge(KILLED, goes_on("host {host}: .*SIGKILL"), replace(well, messages="", moment="ending")) == []
    assert judge(KILLED, goes_on("host {host}", 69), replace(well, messages="")) == []


def test_what_may_stay_is_what_the_kind_says() -> None:
    kind = replace(KILLED, leaves="/tmp/hvlaunch-")
    assert judge(kind, MUST, replace(RIGHT, left=["b: /tmp/hvlaunch-1"])) == []
    assert judge(kind, MUST, replace(RIGHT, left=["a: /tmp/hvlaunch-1"])) == ["left: a: /tmp/hvlaunch-1"]
    assert judge(kind, MUST, replace(RIGHT, left=["b: 9 sleep"])) == ["left: b: 9 sleep"]


def test_a_job_that_has_not_ended_is_judged_for_what_it_leaves_too() -> None:
    found = judge(KILLED, MUST, replace(RIGHT, code=None, left=["a: 9"]))
    assert found == ["it had not ended 3 s after the fault", "left: a: 9"]


def test_lines_are_found_in_what_is_shown() -> None:
    pad = b"." * 40
    stdout = b"[0]<stdout>: a.0.0 line 0 %s\n[1]<stdout>: b.0.0 line 0 y\n[0]<stdout>: a.0.0 line 1 %s\n" % (
        pad,
        pad,
    )
    shown = shown_lines(stdout + b"[1]<stdout>: b.0.0 end 1\n[0]<stdout>: a.0.0 line 2 ..\n")
    assert shown == {"a.0.0": [0, 1], "b.0.0": [0]}


def test_the_table() -> None:
    modules = (
        kinds_of_processes,
        kinds_of_ends,
        kinds_of_connections,
        kinds_of_links,
        kinds_of_hosts,
        kinds_of_console,
    )
    assert len(KINDS) == sum(len(module.KINDS) for module in modules) >= 78  # no name twice
    assert {form.name for kind in KINDS.values() for form in kind.forms} == set(FORMS)
    assert not [kind.name for kind in KINDS.values() if not kind.forms or not kind.moments]
