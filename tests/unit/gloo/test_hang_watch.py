"""Whether somebody looks as soon as a job is silent, and not before."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hvlaunch.driver.observing import Answer, Observe, StacksWanted
from hvlaunch.driver.observing.progress import HangWatch, Steps
from hvlaunch.engine import events as on
from hvlaunch.telemetry.hang import Judge
from hvlaunch.telemetry.sample import HostSample, WorkerSample
from hvlaunch.telemetry.stack import Frame, ProcessStack, ThreadStack

TIMEOUT = 60.0
REDUCE = (
    Frame("step", "/me/train.py", 88),
    Frame("all_reduce", "/x/site-packages/torch/distributed/c.py", 1),
)
SLEEP = (Frame("load", "/me/data.py", 31),)


class Rig:
    """A job of two ranks, whose time goes by in run_until(); it is its Observation too."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[float, Callable[[], None]]] = []
        self.said: list[on.Event] = []
        self.words: list[str] = []
        self.looks: list[float] = []
        self.last_output = {0: 0.0}
        link = SimpleNamespace(host=SimpleNamespace(name="a"), last_output=self.last_output)
        link.pids = {(0, 0): 100, (1, 0): 101}
        ranks = SimpleNamespace(rank_of=lambda _host, slot, _start: slot, places=lambda: {0: None, 1: None})
        self.steps = Steps(None, False, {})
        self.answers: Callable[[], list[Answer]] = list
        self.frames = [REDUCE, SLEEP]
        self.watch = HangWatch(
            TIMEOUT,
            [link],  # type: ignore[list-item]
            ranks,  # type: ignore[arg-type]
            SimpleNamespace(steps=lambda _workers: self.steps),  # type: ignore[arg-type]
            list,
            self.post,
            SimpleNamespace(at=lambda when, call: self.calls.append((when, call)), ask=self.ask),  # type: ignore[arg-type]
            lambda: self.now,
            say=self.words.append,
        )
        self.watch.watch(on.WorkerStarted("a", 0, 0, 100), [], 0.0)

    def post(self, request: Any) -> None:
        if isinstance(request, Observe):
            request.answer(self)  # type: ignore[arg-type]
            return
        if not isinstance(request, StacksWanted):
            self.said.append(request)
            return
        assert request.ranks is not None
        ranks = [rank for part in request.ranks for rank in part]
        request.answer([_stack(rank, self.frames[rank]) for rank in ranks])

    def ask(self, kind: str, _question: object, _within: float, answered: Callable[[Answer], None]) -> None:
        assert kind == "peers"
        for answer in self.answers():
            answered(answer)

    def keep_on(self, _seconds: float) -> None:
        self.looks.append(self.now)

    def when_fresh(self, _within: float, call: Callable[[], None]) -> None:
        call()

    def newest(self) -> list[HostSample]:
        workers = tuple(
            WorkerSample(rank, 100 + rank, 1, 0.0, 1.0, 0, "S", 1, None, 0, None, (), 100 + rank)
            for rank in (0, 1)
        )
        return [HostSample("a", self.now, 8, 0, 0, 0, 0, 0, 0, 0, 0, {}, workers, (), ())]

    def run_until(self, end: float, *, printing: bool = False) -> None:
        while self.calls and min(self.calls)[0] <= end:
            when, call = self.calls.pop(self.calls.index(min(self.calls, key=lambda entry: entry[0])))
            self.now = max(self.now, when)
            if printing:
                self.last_output[0] = self.now
            call()
        self.now = end


def _stack(rank: int, frames: tuple[Frame, ...]) -> ProcessStack:
    thread = ThreadStack("MainThread", frames, is_python=True)
    return ProcessStack("a", rank, 100 + rank, "python train.py", False, (thread,), "py-spy")


def test_a_printing_job_is_not_sampled() -> None:
    rig = Rig()
    rig.run_until(1000.0, printing=True)
    assert not rig.looks
    assert not rig.said


def test_a_silent_job_hangs_once_and_continues_with_its_next_line() -> None:
    rig = Rig()
    rig.run_until(TIMEOUT - 1)
    assert rig.looks[0] >= TIMEOUT / 4
    assert not rig.said
    rig.run_until(4 * TIMEOUT)
    [hangs] = rig.said
    assert isinstance(hangs, on.JobHangs)
    assert hangs.ranks == (1,)
    assert "rank 1 (host a) waits in load (data.py:31); rank 0 waits for it" in hangs.text
    rig.last_output[0] = rig.now
    rig.run_until(4 * TIMEOUT + 30)
    assert rig.said[1:] == [on.JobGoesOn()]


def test_commits_are_signs_of_life() -> None:
    rig = Rig()
    for number in range(20):
        rig.run_until(number * TIMEOUT / 2)
        rig.watch.watch(on.WorkerBeat("a", 0, 0, number), [], rig.now)
    assert not rig.said
    for number in range(20, 24):
        rig.run_until(number * TIMEOUT / 2)
        rig.watch.watch(on.WorkerBeat("a", 0, 0, 19), [], rig.now)
    assert len(rig.said) == 1


def test_steps_count_while_reported_and_lines_after_the_last_step() -> None:
    rig = Rig()
    rig.steps = Steps(10.0, True, {("a", 0, 0): 5, ("a", 1, 0): 4})
    rig.run_until(10 + TIMEOUT - 1, printing=True)
    assert not rig.said
    rig.run_until(10 + TIMEOUT + 1, printing=True)
    [hangs] = rig.said
    assert isinstance(hangs, on.JobHangs)
    assert "rank 1 (host a) waits in load (data.py:31) (at step 4, the others at 5)" in hangs.text
    rig.steps = Steps(10.0, False, {("a", 0, 0): 5, ("a", 1, 0): 5})
    rig.run_until(1000.0, printing=True)
    assert rig.said[1:] == [on.JobGoesOn()]


def test_new_nccl_operations_are_progress() -> None:
    rig = Rig()

    def answers() -> list[Answer]:
        begun = int(min(rig.now, 200.0))
        ranks = [{"pid": 100, "host": "a", "collective_counts": {"AllReduce": begun}}]
        nccl = json.dumps({"communicators": [{"ranks": ranks, "missing_ranks": [{"pid": 101, "host": "a"}]}]})
        report = {
            "pids": [[0, 100], [1, 101]],
            "addresses": [],
            "unanswered": [],
            "nccl": nccl,
            "collectives": [],
        }
        return [Answer("a", report), Answer("b", {"pids": 7})]

    rig.answers = answers
    rig.run_until(200.0 + TIMEOUT - 1)
    assert not rig.said
    rig.run_until(200.0 + TIMEOUT + 20)
    [hangs] = rig.said
    assert isinstance(hangs, on.JobHangs)
    assert "rank 1 (host a) waits in load (data.py:31) (NCCL gets no answer from it); rank 0" in hangs.text


def at(*numbers: int) -> Answer:
    """What host a reports of the newest collective of each rank."""
    words = [
        [rank, json.dumps([{"group": "0", "number": number, "kind": "all_reduce"}])]
        for rank, number in enumerate(numbers)
    ]
    pids = [[0, 100], [1, 101]]
    return Answer("a", {"pids": pids, "addresses": [], "unanswered": [], "nccl": None, "collectives": words})


WAIT = "all of them wait in all_reduce (train.py:88); "
EITHER = f"{WAIT}a connection between them may be dead, or one of them is a collective behind"


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([], EITHER),
        ([at(120)], EITHER),
        ([at(120, 120)], f"{WAIT}each has begun collective 120 (all_reduce), so a connection between them may be dead"),
        ([at(120, 119)], "rank 1 (host a) waits in all_reduce (train.py:88) (has begun collective 119 (all_reduce), the others collective 120 (all_reduce)); rank 0 waits for it in all_reduce (train.py:88)"),
        # Its observer did not answer the second time: nobody knows where they are by now.
        ([at(120, 119), Answer("a", problem="late"), Answer("a", {"pids": 7})], EITHER),
    ],
)  # fmt: skip
def test_ranks_in_one_place_differ_in_their_collectives(answers: list[Answer], text: str) -> None:
    rig = Rig()
    rig.frames = [REDUCE, REDUCE]
    rig.answers = lambda: answers
    rig.run_until(2 * TIMEOUT)
    [hangs] = rig.said
    assert isinstance(hangs, on.JobHangs)
    assert hangs.text == text


def test_collectives_from_before_the_last_line_are_forgotten() -> None:
    rig = Rig()
    rig.frames = [REDUCE, REDUCE]
    rig.answers = lambda: [at(120, 119)]
    rig.run_until(TIMEOUT / 2)
    assert rig.looks
    # From now on the observer is too slow, and what it said is of another silence.
    rig.answers = lambda: [Answer("a", problem="late")]
    rig.last_output[0] = rig.now
    rig.run_until(3 * TIMEOUT)
    [hangs] = rig.said
    assert isinstance(hangs, on.JobHangs)
    assert hangs.text == EITHER


def test_no_look_follows_the_end_of_the_job() -> None:
    rig = Rig()
    rig.watch.stop()
    rig.run_until(4 * TIMEOUT)
    assert not rig.looks


def test_a_defect_in_the_watch_ends_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    monkeypatch.setattr(Judge, "samples", lambda *_: "".index("x"))
    rig.run_until(4 * TIMEOUT)
    assert rig.words == [
        "internal error: ValueError: substring not found; hangs of this job are no longer detected"
    ]
    assert len(rig.looks) == 1
    assert not rig.said


def test_kernel_stacks_alone_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of `sleep`: calls that are in no file."""
    kernel = (Frame("clock_nanosleep", "", 0),)
    monkeypatch.setattr(f"{__name__}.SLEEP", kernel)
    monkeypatch.setattr(f"{__name__}.REDUCE", kernel)
    rig = Rig()
    rig.run_until(4 * TIMEOUT)
    assert not rig.words
    [hangs] = rig.said
    assert isinstance(hangs, on.JobHangs)
    assert "clock_nanosleep" in hangs.text
