"""Values that a user knows to be good."""

from typing import Any

import pytest

from hvlaunch.check import Check
from hvlaunch.check.expectations import expectations_of, unexpected

CHECKS = [
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
    findings = list(unexpected(expectations_of(tree, CHECKS), {"a": HOST}))
    assert [(finding.level, finding.text) for finding in findings] == (
        [] if text is None else [("error", text)]
    )


def test_a_missing_value_is_an_error() -> None:
    expectations = expectations_of({"torch": "2.6.0", "memory": {"max": "1G"}}, CHECKS)
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
        expectations_of(tree, CHECKS)
