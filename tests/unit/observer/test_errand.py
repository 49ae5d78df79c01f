"""The observer's loop, with a kind of question of its own."""

import json
import os
import threading
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

import pytest

from hvlaunch.agent.errands import ErrandStream
from hvlaunch.agent.errands import observer as module

LIMIT = 60.0


class Questions:
    """An observer with a kind of question of this test. `answers` has its answers, `begun` the questions in work until go_on()."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: SimpleQueue[Mapping[str, Any]] = SimpleQueue()
        self.begun: SimpleQueue[int] = SimpleQueue()
        self._may_go_on = threading.Semaphore(0)
        monkeypatch.setattr(module, "_ANSWERS", {"cats": self._answer})
        stdin, self._stdin = os.pipe()
        observer = module._Observer(ErrandStream(stdin, -1))
        monkeypatch.setattr(observer, "_send", self.answers.put)
        self._thread = threading.Thread(target=observer.run)
        self._thread.start()

    def _answer(self, question: Mapping[str, Any]) -> str:
        self.begun.put(question["id"])
        assert self._may_go_on.acquire(timeout=LIMIT)
        return "meow"

    def ask(self, number: int, **more: Any) -> None:
        os.write(self._stdin, json.dumps({"id": number, "kind": "cats", "size": 0, **more}).encode() + b"\n")

    def go_on(self) -> None:
        self._may_go_on.release()

    def end(self) -> None:
        os.close(self._stdin)
        self._thread.join(LIMIT)


def test_a_question_waits_for_the_one_before_it_as_long_as_its_own_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    questions = Questions(monkeypatch)
    questions.ask(1)
    assert questions.begun.get(timeout=LIMIT) == 1
    questions.ask(2)
    refusal = questions.answers.get(timeout=LIMIT)
    assert refusal == {"id": 2, "problem": "it has not answered the previous question yet"}
    questions.ask(3, seconds=LIMIT)
    questions.go_on()
    questions.go_on()
    answers = [questions.answers.get(timeout=LIMIT) for _ in range(2)]
    assert {answer["id"]: answer["answer"] for answer in answers} == {1: "meow", 3: "meow"}
    questions.end()
