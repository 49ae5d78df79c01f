"""The observer as an errand on a real agent."""

import json
from typing import Any

import pytest

from hvlaunch.driver.links.errands import Errand
from tests.unit.agent.errand_rig import ErrandRig
from tests.unit.agent.harness import interpreter


def ask(errand: Errand, number: int = 1, kind: str = "samples", data: bytes = b"", **more: Any) -> None:
    question = {"id": number, "kind": kind, "size": len(data), "workers": [], **more}
    errand.write(json.dumps(question).encode() + b"\n" + data)


def answer(rig: ErrandRig, errand: Errand) -> Any:
    line = b""
    while not line.endswith(b"\n"):
        line += rig.read(errand, 1)
    return json.loads(line)


@pytest.mark.parametrize("version", ["3.8", "3.13"])
def test_a_question_is_answered(launch: Any, version: str) -> None:
    agent = launch(candidates=[interpreter(version)])
    agent.hello()
    rig = ErrandRig(agent)
    errand = rig.errands.start("observer", {})
    ask(errand, 1, workers=[[0, 7]])
    assert answer(rig, errand)["id"] == 1
    ask(errand, 2, "cats", b"\0" * 100_000)
    assert answer(rig, errand) == {"id": 2, "problem": "KeyError: 'cats'"}
    ask(errand, 3)
    assert answer(rig, errand)["id"] == 3
    errand.close_input()
    assert rig.result(errand) == {"questions": 3}
    assert agent.bye()[0] == {"type": "bye", "left": 0, "pids": []}
