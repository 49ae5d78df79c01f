"""Questions to hosts about a failure, and the clues in their answers."""

from types import SimpleNamespace
from typing import Any

import pytest

from hvlaunch.driver.observing.observing import Clues
from hvlaunch.engine import events as on
from hvlaunch.report.failure_report import Memory, Missing

LACKS = b"ModuleNotFoundError: No module named 'foo.bar'\n"
GIB = 1 << 30


class Samples:
    """Samples by host: memory in use, out of 8 GiB."""

    def __init__(self, **used: int) -> None:
        self.used, self.kept = used, 0.0

    def newest(self) -> list[Any]:
        gpu = SimpleNamespace(index=3, memory_used=7 * GIB, memory_total=80 * GIB)
        return [
            SimpleNamespace(
                host=host, time=12.0, memory_used=used * GIB, memory_total=8 * GIB, workers=(), gpus=(gpu,)
            )
            for host, used in self.used.items()
        ]

    def keep_on(self, seconds: float) -> None:
        self.kept = seconds


def clues_of(tails: dict[int, bytes], samples: Samples | None = None) -> Clues:
    def rank_of(host: str, slot: int, _start: int) -> int:
        return 2 * "ab".index(host) + slot

    return Clues(rank_of, lambda rank: tails.get(rank, b""), lambda: samples or Samples())  # type: ignore[arg-type, return-value]


def exited(host: str, slot: int = 0, **facts: Any) -> on.WorkerExited:
    return on.WorkerExited(
        **{"host": host, "round": 0, "slot": slot, "code": 1, "signal": None, "at": 10.0, **facts}
    )


def test_the_suspect_is_the_worker_with_an_error_of_its_own() -> None:
    clues = clues_of({1: LACKS})
    clues.record_event(on.Tick())
    clues.record_event(exited("b", look="consequence"))
    clues.record_event(exited("a", 1, look="cause"))
    suspect = clues.find_suspect()
    assert suspect is not None
    assert (suspect.rank, suspect.sought) == (1, ("module", "foo.bar"))


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        ({}, Missing("module", "foo.bar", (), ())),
        ({"a": False, "b": True, "c": False}, Missing("module", "foo.bar", ("b",), ("c",))),
        ({"a": True, "b": True}, None),
    ],
    ids=["nobody has told", "two have", "its own host has it"],
)
def test_hosts_with_and_without_the_file_are_listed(has: dict[str, bool], expected: Missing | None) -> None:
    clues = clues_of({0: LACKS})
    clues.record_event(exited("a"))
    clues.find_suspect()
    assert clues.missing(has) == expected


@pytest.mark.parametrize(("facts", "is_asked"), [({"signal": 9, "code": None}, True), ({}, False)])
def test_memory_is_measured_if_it_may_be_the_cause(facts: dict[str, Any], is_asked: bool) -> None:
    samples = Samples()
    clues = clues_of({0: b"ValueError\n"}, samples)
    clues.record_event(exited("a", **facts))
    clues.find_suspect()
    assert bool(samples.kept) is is_asked
    samples.used = {"a": 3, "b": 4}
    after = (Memory("host a", 3 * GIB, 8 * GIB, 2.0), Memory("GPU 3 of host a", 7 * GIB, 80 * GIB, 2.0))
    assert clues.memory() == (after if is_asked else ())


def test_a_sample_from_before_the_end_is_preferred() -> None:
    samples = Samples(a=7)
    clues = clues_of({0: b"MemoryError\n"}, samples)
    clues.record_event(exited("a"))
    clues.find_suspect()
    samples.used = {"a": 1}
    assert clues.memory()[0].used == 7 * GIB
