"""The form of a host's sample."""

import copy
from typing import Any

import pytest

from hvlaunch.telemetry.sample import host_sample
from tests.unit.telemetry.samples import SAMPLE_OF_A_HOST


def test_a_sample_is_parsed() -> None:
    sample = host_sample("a", 5.0, SAMPLE_OF_A_HOST, {7: 3.0})
    assert sample is not None
    assert (sample.host, sample.time, sample.free, sample.gpus[0].xids) == ("a", 5.0, {"cwd": (1, 2)}, (31,))
    assert (sample.workers[0].last_output, sample.workers[0].gpus) == (2.0, (0,))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("cpu",), float("nan")),
        (("cores",), True),
        (("free", "root"), [1, 2]),
        (("free", "cwd"), [1]),
        (("more",), 1),
        (("workers", 0, "rank"), -1),
        (("workers", 0, "state"), "Q"),
        (("workers", 0, "waits_in"), "\x1b[2J"),
        (("workers", 0, "last_output"), 1.0),
        (("workers", 0), None),
        (("gpus", 0, "utilization"), 1.5),
        (("gpus", 0, "pids"), ["70"]),
        (("problems",), ["x" * 5000]),
    ],
)
def test_an_answer_in_a_wrong_form_is_refused(path: tuple[Any, ...], value: Any) -> None:
    answer = copy.deepcopy(SAMPLE_OF_A_HOST)
    target: Any = answer
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    assert host_sample("a", 0.0, answer, {}) is None
