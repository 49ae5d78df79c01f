"""How values of hosts become findings, also by the good values of --expect."""

from typing import Any

import pytest

from hvlaunch.agent.proc import LEAST_ROOM
from hvlaunch.check import (
    Check,
    Finding,
    Flaw,
    expectations_of,
    findings_of,
    high,
    low,
    merged,
    same,
    same_if_any,
    unexpected,
)
from hvlaunch.check.table import CHECKS


def value(name: str, **more: Any) -> Check:
    return Check(name, lambda values: values[name], **more)


def hosts(name: str, *numbers: Any) -> dict[str, dict[str, Any]]:
    return {f"h{index}": {name: number} for index, number in enumerate(numbers)}


def test_the_host_that_differs_from_most_is_named() -> None:
    check = value("torch", compare=same, level="error", remedy="the same")
    assert findings_of([check], hosts("torch", "2.5", "2.6", "2.6")) == [
        Finding("h0", "error", "torch", "2.5 here, 2.6 on the others", "the same")
    ]
    assert findings_of([check], hosts("torch", "2.6", "2.6", None))[0].text == "none here, 2.6 on the others"
    assert findings_of([check], hosts("torch", None, None)) == []
    assert findings_of([check], hosts("torch", "2.5", "2.6"))[0].text == "2.6 here, 2.5 on h0"


def test_a_value_that_no_host_can_read_has_no_finding() -> None:
    check = Check("x", lambda values: values["gpus"]["count"], compare=same)
    assert findings_of([check], {"a": {"gpus": None}, "b": {}}) == []


def test_numbers_are_compared_with_the_median() -> None:
    assert [
        finding.host for finding in findings_of([value("m", compare=low(0.75))], hosts("m", 8, 8, 5, 9))
    ] == ["h2"]
    slow = value("t", compare=high(4, 1.0))
    assert findings_of([slow], hosts("t", 0.1, 0.1, 0.9)) == []
    assert [finding.host for finding in findings_of([slow], hosts("t", 0.1, 0.1, 1.1))] == ["h2"]


def test_a_value_that_is_wrong_by_itself_is_named_once() -> None:
    check = value(
        "nofile",
        compare=same,
        judge=lambda value, _values: [Flaw("error", "few", "more")] if value < 256 else [],
    )
    assert findings_of([check], hosts("nofile", 64, 1024, 1024)) == [
        Finding("h0", "error", "nofile", "few", "more")
    ]


def test_equal_findings_are_told_once_and_errors_first() -> None:
    findings = [
        Finding("a", "warning", "mtu", "small"),
        Finding("b", "error", "torch", "old"),
        Finding("c", "warning", "mtu", "small"),
    ]
    assert [(names, finding.subject) for names, finding in merged(findings)] == [
        (["b"], "torch"),
        (["a", "c"], "mtu"),
    ]


def test_hosts_without_a_value_are_left_out_where_it_is_optional() -> None:
    check = value("mtu", compare=same_if_any)
    assert findings_of([check], hosts("mtu", None, 1500, 1500)) == []
    assert [finding.host for finding in findings_of([check], hosts("mtu", None, 1500, 1500, 9000))] == ["h3"]


def test_a_part_that_could_not_be_read_is_a_finding() -> None:
    problems = {"a": {"problems": {"files": "no answer within 15 s"}}, "b": {"problems": {"gpus": "no"}}}
    assert [(finding.host, finding.level, finding.subject) for finding in findings_of([], problems)] == [
        ("a", "error", "files"),
        ("b", "warning", "gpus"),
    ]


@pytest.mark.parametrize(
    ("size", "slots", "room", "text"),
    [
        (32 << 20, 2, "33.6 MB", "33.6 MB of memory for commits are hardly enough for 2 workers"),
        (50 << 20, 1, "52.4 MB", "52.4 MB of memory for commits are hardly enough for 1 worker"),
        (4 << 30, 8, "4.29 GB", None),
        (0, 1, "0 B", "0 B of memory for commits are hardly enough for 1 worker"),
    ],
)
def test_room_for_commits_is_shown_and_judged(size: int, slots: int, room: str, text: str | None) -> None:
    check = next(check for check in CHECKS if check.name == "commits")
    machine = {"commit_room": size, "commit_least": LEAST_ROOM}
    values = {"machine": machine, "session": {"slots": slots}}
    assert check.show(check.read(values)) == room
    assert [finding.text for finding in findings_of([check], {"a": values})] == (
        [] if text is None else [text]
    )


SMALL_CHECKS = [
    Check("torch", lambda values: values["torch"]),
    Check("memory", lambda values: values["memory"], show=lambda value: f"{value / (1 << 30):g} GiB"),
    Check("clock", lambda values: values["clock"], show=lambda value: f"{value[0]} s"),
]
HOST = {"torch": "2.6.0", "memory": 64 << 30, "clock": (-2.5, 0.1)}


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"torch": "2.6.0"}, None),
        ({"torch": "2.7.0"}, "2.6.0 here, 2.7.0 expected"),
        ({"memory": "64G"}, None),
        ({"memory": "64 GiB"}, None),
        ({"memory": {"min": "64GB"}}, None),
        ({"memory": {"min": "65G"}}, "64 GiB here, at least 65 GiB expected"),
        (
            {"memory": {"min": "1", "max": "32G"}},
            "64 GiB here, at least 9.31323e-10 GiB and at most 32 GiB expected",
        ),
        ({"clock": {"max": "3"}}, None),
        ({"clock": {"max": "2"}}, "-2.5 s here, at most 2 expected"),
    ],
)
def test_a_value_that_is_not_as_expected_is_an_error(tree: dict[str, Any], text: str | None) -> None:
    findings = list(unexpected(expectations_of(tree, SMALL_CHECKS), {"a": HOST}))
    assert [(finding.level, finding.text) for finding in findings] == (
        [] if text is None else [("error", text)]
    )


def test_a_missing_value_is_an_error() -> None:
    expectations = expectations_of({"torch": "2.6.0", "memory": {"max": "1G"}}, SMALL_CHECKS)
    assert [finding.text[:9] for finding in unexpected(expectations, {"a": {}})] == ["none here", "none here"]


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"pytorch": "2"}, "unknown name 'pytorch'; the names are torch, memory, clock"),
        ({"torch": ["2"]}, "torch: it must be a value"),
        ({"memory": {}}, "memory: it must be a value"),
        ({"memory": {"least": "1"}}, "memory: it must be a value"),
        ({"memory": {"min": "much"}}, "memory: min and max must be numbers"),
    ],
)
def test_a_wrong_file_is_refused(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        expectations_of(tree, SMALL_CHECKS)
