"""The driver's side of stacks: hosts are asked, and their answers put together. The observers are this test's."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hvlaunch.agent.errands.observer.stacks import packed
from hvlaunch.driver.observing import Answer, Target
from hvlaunch.driver.observing import stacks as module
from hvlaunch.driver.observing.stacks import STACKS_FILE, Stacks, kept_stacks
from hvlaunch.engine.actions import TakeStacks
from hvlaunch.engine.events import StacksTaken
from hvlaunch.engine.waits import Waits
from hvlaunch.engine.workers import Workers, WorkerState
from hvlaunch.hosts.placement import Launch, Placement
from hvlaunch.telemetry.stack import ProcessStack, groups, notes, places


def said(rank: int, line: int = 1, **more: object) -> dict[str, Any]:
    thread = {"name": "MainThread", "is_python": True, "frames": [["main", "/me/train.py", line]]}
    return {
        "rank": rank,
        "pid": 100 + rank,
        "command": "python train.py",
        "is_child": False,
        "source": "py-spy",
        "problem": None,
        "threads": [thread],
        **more,
    }


class Hosts:
    """Two workers on each host; what is asked waits until answer()."""

    def __init__(self, *names: str) -> None:
        self.pids = {name: {2 * at: 100 + 2 * at, 2 * at + 1: 101 + 2 * at} for at, name in enumerate(names)}
        self.asked: list[tuple[str, str, Mapping[str, Any]]] = []
        self.calls: dict[str, Callable[[Answer], None]] = {}

    def ask(self, kind, question, within, answered) -> list[str]:
        answer = []
        for name, pids in self.pids.items():
            content = question(Target(name, f"/tmp/{name}", pids, {}))
            if content is not None:
                answer.append(name)
                self.asked.append((kind, name, content))
                self.calls[name] = answered
        return answer

    def answer(self, name: str, *processes: dict[str, Any], lacks: str | None = None, **more: object) -> None:
        self.calls[name](Answer(name, {**packed(processes), "lacks": lacks, **more}))


@pytest.fixture
def hosts() -> Hosts:
    return Hosts("a", "b")


@pytest.fixture
def taking(hosts: Hosts, tmp_path: Path) -> Stacks:
    return Stacks(hosts, tmp_path)  # type: ignore[arg-type]


def test_all_hosts_are_asked_at_once_and_their_stacks_joined(hosts: Hosts, taking: Stacks) -> None:
    results: list[list[ProcessStack]] = []
    taking.take(None, results.append, native=True)
    content = {"seconds": 20.0, "native": True}
    assert hosts.asked == [
        ("stacks", "a", {"workers": [(0, 100), (1, 101)], "scratch": "/tmp/a", **content}),
        ("stacks", "b", {"workers": [(2, 102), (3, 103)], "scratch": "/tmp/b", **content}),
    ]
    hosts.answer("b", said(2), said(3, 7))
    assert not results
    hosts.answer("a", said(0), said(1))
    assert [places(groups(answer)) for answer in results] == [
        ["rank 3 in main (train.py:7)", "ranks 0-2 in main (train.py:1)"]
    ]


def test_only_requested_ranks_are_kept(hosts: Hosts, taking: Stacks) -> None:
    results: list[list[ProcessStack]] = []
    taking.take((range(3, 9),), results.append)
    assert [(name, content["workers"]) for _, name, content in hosts.asked] == [("b", [(3, 103)])]
    hosts.answer("b", said(3), said(0))  # which it has not
    assert [[stack.rank for stack in answer] for answer in results] == [[3]]
    taking.take((range(50, 51),), results.append)
    assert results[1] == []


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (
            {"threads": [], "stacks": [{**said(2), "threads": 7}], "lacks": None},
            "its observer sent an invalid answer",
        ),
        ("nonsense", "its observer sent an invalid answer"),
        (None, "its observer sent an invalid answer"),
    ],
)
def test_an_answer_of_a_wrong_form_becomes_a_problem(
    hosts: Hosts, taking: Stacks, answer: object, problem: str
) -> None:
    results: list[list[ProcessStack]] = []
    taking.take((range(2, 4),), results.append)
    hosts.calls["b"](Answer("b", answer))
    assert notes(results[0]) == [f"ranks 2-3 by the kernel: {problem}"]
    taking.take((range(2, 4),), results.append)
    hosts.calls["b"](Answer("b", None, "it has ended\x1b[2J"))
    assert notes(results[1]) == ["ranks 2-3 by the kernel: it has ended\\x1b[2J"]


def test_stacks_before_a_kill_answer_per_host_and_are_stored(
    hosts: Hosts, taking: Stacks, tmp_path: Path
) -> None:
    heard: list[StacksTaken] = []
    workers = Workers(Waits())
    for host, slot, rank in (("a", 1, 1), ("b", 0, 2), ("b", 1, 3), ("gone", 0, 9)):
        place = Placement(host, rank, slot, 0, 10, 2, 1, 0, 1)
        workers.launch(Launch(slot, 0, place), born=0, state=WorkerState.WORKING, now=0.0)
    takes = [
        TakeStacks("a", 1, (1,)),
        TakeStacks("b", 1, (0,)),
        TakeStacks("b", 2, (1, 7)),
        TakeStacks("gone", 2, (0,)),
    ]
    taking.take_before_kill(takes, workers, heard.append, lambda _: None)
    assert heard == [StacksTaken("gone", 2)]
    assert {kind for kind, _, _ in hosts.asked} == {"stacks_before_kill"}
    assert {content["seconds"] for _, _, content in hosts.asked} == {0.35}
    hosts.answer("a", said(1))
    assert heard[1:] == [StacksTaken("a", 1)]
    late = places(groups(taking.before_kill()))
    assert late == [
        "rank 1 in main (train.py:1)",
        "ranks 2-3: no stack (it had ended, or could not be read)",
    ]
    hosts.answer("b", said(2), said(3))
    assert heard[2:] == [StacksTaken("b", 1), StacksTaken("b", 2)]
    assert places(groups(taking.before_kill())) == ["ranks 1-3 in main (train.py:1)"]
    (kept,) = kept_stacks(tmp_path)
    assert [stack["rank"] for stack in kept["stacks"]] == [1, 2, 3]
    assert (tmp_path / STACKS_FILE).stat().st_mode & 0o777 == 0o600


@pytest.fixture
def own_py_spy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installation with py-spy."""
    program = tmp_path / "py-spy"
    program.write_bytes(b"program" * 100)
    monkeypatch.setattr(module, "own_py_spy", lambda: program)


@pytest.mark.usefixtures("own_py_spy")
def test_py_spy_is_sent_once_to_a_host_without_it(hosts: Hosts, taking: Stacks) -> None:
    taking.prepare()
    assert [content["workers"] for _, _, content in hosts.asked] == [[], []]
    machine = os.uname().machine
    begun = dict(hosts.calls)
    for _ in range(2):
        begun["a"](Answer("a", {**packed([]), "lacks": machine}))
        begun["b"](Answer("b", {**packed([]), "lacks": "another"}))
    brought = [(name, content) for kind, name, content in hosts.asked if kind == "py_spy"]
    assert [name for name, _ in brought] == ["a"]
    assert brought[0][1]["scratch"] == "/tmp/a"
    assert len(brought[0][1]["data"]) < 100


@pytest.mark.usefixtures("own_py_spy")
def test_the_first_request_waits_for_py_spy_on_its_way(hosts: Hosts, taking: Stacks) -> None:
    results: list[list[ProcessStack]] = []
    taking.take(None, results.append)
    hosts.answer("b", said(2), said(3))
    blind: dict[str, Any] = {"source": "kernel", "threads": []}
    hosts.answer("a", said(0, **blind), said(1, **blind), lacks=os.uname().machine)
    hosts.calls["a"](Answer("a", {}))  # it is there
    assert [(kind, name) for kind, name, _ in hosts.asked[2:]] == [("py_spy", "a"), ("stacks", "a")]
    assert results == []
    hosts.answer("a", said(0), said(1))
    assert places(groups(results[0])) == ["ranks 0-3 in main (train.py:1)"]
    assert len(results) == 1


@pytest.mark.usefixtures("own_py_spy")
def test_a_host_lost_while_py_spy_travels_keeps_its_first_stacks(hosts: Hosts, taking: Stacks) -> None:
    results: list[list[ProcessStack]] = []
    taking.take([range(2)], results.append)
    hosts.answer("a", said(0), said(1), lacks=os.uname().machine)
    brought = hosts.calls["a"]
    del hosts.pids["a"]
    brought(Answer("a", problem="its connection is lost"))
    assert [stack.rank for stack in results[0]] == [0, 1]


def test_preparation_without_py_spy_asks_no_host(
    hosts: Hosts, taking: Stacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "own_py_spy", lambda: None)
    taking.prepare()
    assert hosts.asked == []
