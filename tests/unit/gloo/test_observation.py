"""Questions to observers, and samples for who subscribes: with links that this test plays, and a clock of its own."""

import json
import zlib
from binascii import b2a_base64
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hvlaunch.driver.observing as module
from hvlaunch.driver.links.errands import HostErrands
from hvlaunch.driver.observing import Answer, Observers
from hvlaunch.driver.observing.observation import Observation
from tests.unit.telemetry.samples import SAMPLE_OF_A_HOST


class PlayedLink:
    """A host with the worker of rank 7 at pid 70. `asked` are the questions that came, `begun` how many observers."""

    def __init__(self, name: str) -> None:
        self.host = SimpleNamespace(name=name)
        self.last_heard: float | None = 0.0
        self.is_closed = self.has_parted = self.is_away = False
        self.scratch = "/scratch"
        self.pids = {(0, 1): 70, (1, 0): 71}
        self.last_output = {7: 90.0}
        self.asked: list[dict[str, Any]] = []
        self.begun = 0
        self.errands = HostErrands(name, self._get)

    def _get(self, header: Mapping[str, Any], body: bytes) -> None:
        match header["what"]:
            case "start":
                assert header["name"] == "observer"
                self.begun += 1
            case "data":
                self.asked.append(json.loads(body.partition(b"\n")[0]))
            case "stop":
                self.end("stopped")

    def end(self, reason: str, cause: str = "") -> None:
        """The observer's process is gone."""
        self.errands.obey({"what": "failed", "id": self.begun, "reason": reason, "cause": cause}, b"")

    def write(self, data: bytes) -> None:
        self.errands.obey({"what": "data", "id": self.begun}, data)

    def say(self, **line: Any) -> None:
        self.write(json.dumps(line).encode() + b"\n")

    def answer(self, answer: Any = SAMPLE_OF_A_HOST) -> None:
        """Answer the newest question."""
        self.say(id=self.asked[-1]["id"], answer=answer)


class World:
    """Hosts, and an agenda that is carried out by go_on()."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.now = 100.0
        self.calls: list[tuple[float, Callable[[], None]]] = []
        monkeypatch.setattr(module, "Agenda", lambda _clock: self)
        self.links = [PlayedLink(name) for name in names]
        links: list[Any] = self.links
        self.observers = Observers(lambda: links, lambda _host, slot, _start: {0: 7}.get(slot), self._clock)
        self.observation = Observation(self.observers, "/here", self._clock)
        self.answers: list[Answer] = []

    def _clock(self) -> float:
        return self.now

    def at(self, when: float, call: Callable[[], None]) -> None:
        self.calls.append((when, call))

    def go_on(self, seconds: float = 0.0) -> None:
        """Let time pass."""
        end = self.now + seconds
        while due := [call for call in self.calls if call[0] <= end]:
            first = min(due, key=lambda call: call[0])
            self.calls.remove(first)
            self.now = max(self.now, first[0])
            first[1]()
        self.now = end

    def ask(self, within: float = 5.0) -> list[str]:
        return self.observers.ask("cats", lambda target: {"of": target.host}, within, self.answers.append)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch, "a", "b")


def test_connected_hosts_are_asked_and_answer(world: World) -> None:
    a, b = world.links
    b.last_heard = None
    assert world.ask() == ["a"]
    assert (a.begun, [question["kind"] for question in a.asked]) == (1, ["cats"])
    a.answer("meow")
    assert world.answers == [Answer("a", "meow")]
    world.ask()
    assert a.begun == 1
    a.say(id=2, problem="no cats\x1b")
    assert world.answers[1:] == [Answer("a", problem="no cats\\x1b")]


def test_a_long_answer_may_be_compressed(world: World) -> None:
    [a, _] = world.links
    world.ask()
    text = json.dumps({"id": 1, "answer": "x" * 100_000}).encode()
    a.write(b2a_base64(zlib.compress(text)))
    assert world.answers == [Answer("a", "x" * 100_000)]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"nonsense",
        b"[]",
        b'{"id": 1, "more": 1, "answer": 1}',
        b'{"id": "1"}',
        b'{"id": 1, "problem": 7}',
        b"{" * 5000,
        b2a_base64(zlib.compress(b" " * (1 << 25)), newline=False),
    ],
)
def test_an_observer_that_writes_nonsense_is_replaced(world: World, line: bytes) -> None:
    [a, _] = world.links
    world.ask()
    a.write(line + b"\n")
    assert [answer.problem for answer in world.answers] == ["its observer sent an invalid answer"]
    world.go_on(3.0)
    world.ask()
    assert a.begun == 2


def test_an_observer_that_does_not_answer_is_replaced_after_growing_pauses(world: World) -> None:
    [a, _] = world.links
    world.links.pop()
    world.ask()
    world.go_on(5.0)
    assert [answer.problem for answer in world.answers] == ["its observer did not answer within 5 s"]
    for _ in range(1000):
        world.ask()
        world.go_on(1.0)
    assert 10 < a.begun < 20
    world.go_on(70.0)
    assert {answer.problem for answer in world.answers} == {"its observer did not answer within 5 s"}
    assert len(world.answers) == 1001
    assert len(world.answers) == 1001


def test_the_cause_of_an_observers_end_is_the_problem(world: World) -> None:
    [a, _] = world.links
    world.ask()
    a.end("start", "resource temporarily unavailable")
    assert [answer.problem for answer in world.answers] == ["its observer: resource temporarily unavailable"]


def test_a_question_waits_for_a_lost_connection_within_its_time(world: World) -> None:
    [a, b] = world.links
    a.is_away = b.is_away = True
    world.ask()
    world.go_on(3.0)
    a.is_away = False
    world.go_on(1.0)
    a.answer("meow")
    assert (a.begun, b.begun, world.answers) == (1, 0, [Answer("a", "meow")])
    world.go_on(2.0)
    assert world.answers[1:] == [Answer("b", problem="the connection to it is lost")]
    b.is_away = False
    world.ask()
    assert len(b.asked) == 1


def test_an_observer_outlives_a_lost_connection(world: World) -> None:
    [a, _] = world.links
    world.links.pop()
    world.ask()
    a.is_away = True
    world.go_on(6.0)
    assert world.answers == [Answer("a", problem="the connection to it is lost")]
    a.is_away = False
    a.answer("too late")
    world.ask()
    a.answer("meow")
    assert world.answers[1:] == [Answer("a", "meow")]
    assert a.begun == 1


def test_an_observer_that_hangs_stays_alone(world: World) -> None:
    [a, _] = world.links
    world.links.pop()
    a.end = lambda *_: None  # type: ignore[method-assign]  # its process can't be killed
    world.ask()
    world.go_on(100.0)
    world.ask()
    assert a.begun == 1
    assert {answer.problem for answer in world.answers} == {"its observer did not answer within 5 s"}
    del a.end
    a.end("stopped")
    world.ask()
    assert a.begun == 2


def test_no_host_is_asked_without_subscribers(world: World) -> None:
    world.go_on(60.0)
    assert not any(link.begun for link in world.links)
    end = world.observation.subscribe()
    world.go_on(0.5)
    end()
    world.go_on(60.0)
    assert [len(link.asked) for link in world.links] == [1, 1]
    assert [call for call in world.calls if call[0] < world.now] == []


def test_the_most_eager_subscriber_sets_the_interval_of_at_least_a_second(world: World) -> None:
    [a, _] = world.links
    ends = [world.observation.subscribe(interval) for interval in (0.1, 30.0)]
    for _ in range(10):
        world.go_on(1.0)
        a.answer()
    assert 10 <= len(a.asked) <= 11
    ends[0]()
    before = len(a.asked)
    for _ in range(60):
        world.go_on(1.0)
        a.answer()
    assert 2 <= len(a.asked) - before <= 3


def test_a_busy_host_is_not_asked_again(world: World) -> None:
    a, b = world.links
    world.observation.subscribe()
    for _ in range(4):
        world.go_on(1.0)
        a.answer()
    assert (len(a.asked), len(b.asked)) == (4, 1)
    world.go_on(2.0)
    assert world.observation.problems()["b"] == "its observer did not answer within 5 s"
    assert [sample.host for sample in world.observation.newest()] == ["a"]


def test_a_sample_has_the_time_since_the_last_output(world: World) -> None:
    [a, _] = world.links
    world.observation.subscribe()
    world.go_on()
    assert a.asked[0]["workers"] == [[7, 70]]
    assert a.asked[0]["paths"] == {"cwd": "/here", "scratch": "/scratch", "shm": "/dev/shm"}
    a.answer()
    [sample] = world.observation.newest()
    assert (sample.host, sample.time, sample.workers[0].rank) == ("a", 100.0, 7)
    assert sample.workers[0].last_output == 10.0
    assert json.loads(json.dumps(world.observation.as_json()))["hosts"][0]["workers"][0]["io"] == 5


@pytest.mark.parametrize(("answers", "waited"), [(2, 0.0), (1, 2.0)])
def test_a_request_for_fresh_samples_waits_for_all_hosts_within_its_time(
    world: World, answers: int, waited: float
) -> None:
    got: list[float] = []
    world.observation.keep_on(10.0)
    world.observation.when_fresh(2.0, lambda: got.append(world.now))
    world.go_on()
    for link in world.links[:answers]:
        link.answer()
    world.go_on(3.0)
    assert got == [100.0 + waited]


def test_a_lost_host_has_no_sample(world: World) -> None:
    [a, _] = world.links
    world.observation.subscribe()
    world.go_on()
    a.answer()
    world.links.pop(0)
    world.go_on(1.0)
    assert world.observation.newest() == []


def test_a_successor_continues_the_sum_of_the_energy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = SAMPLE_OF_A_HOST["gpus"][0]
    worker = {**SAMPLE_OF_A_HOST["workers"][0], "gpus": [gpu["index"]]}

    def play(joules: float) -> Observation:
        world = World(monkeypatch, "a")
        observation = Observation(world.observers, "/here", world._clock, tmp_path / "energy.json")
        observation.subscribe(20.0)
        for number in range(3):
            world.go_on(20.0 * bool(number))
            energy = {**gpu, "energy_joules": joules + 100.0 * number}
            world.links[0].answer({**SAMPLE_OF_A_HOST, "gpus": [energy], "workers": [worker]})
        return observation

    assert play(5000.0).energy() == (200.0, 40.0)
    assert play(9000.0).energy() == (400.0, 80.0)
    assert (tmp_path / "energy.json").stat().st_mode & 0o77 == 0
    (tmp_path / "energy.json").write_text("[1")
    assert play(9000.0).energy() == (200.0, 40.0)
