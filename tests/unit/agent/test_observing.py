"""The observer's transport: questions and answers through the agent, which outlives all that an observer may do."""

import json
import os
import signal
from typing import Any

import psutil
import pytest

from hvlaunch.driver.program.observer_bundle import observer_bundle
from tests.unit.agent.harness import AgentProcess, Hunt, has_ended, interpreter, until


def begin(agent: AgentProcess, code: str | None = None) -> None:
    """An observer, or this code in its place."""
    if code is None:
        code, program = observer_bundle()
        agent.send("observe", program, what="begin", code=code)
    else:
        agent.send("observe", b"\n", what="begin", code=code)


def ask(agent: AgentProcess, number: int = 1, kind: str = "samples", data: bytes = b"", **more: Any) -> None:
    question = {"id": number, "kind": kind, "size": len(data), "workers": [], **more}
    agent.send("observe", json.dumps(question).encode() + b"\n" + data, what="ask")


def answer(agent: AgentProcess) -> Any:
    _, body = agent.expect("observed", what="answer")
    return json.loads(body)


def observer_of(agent: AgentProcess) -> psutil.Process:
    """The agent's only child."""
    found: list[psutil.Process] = until(agent.agent.children, "an observer")
    return found[0]


@pytest.mark.parametrize("version", ["3.8", "3.13"])
def test_a_question_is_answered(launch: Any, version: str) -> None:
    agent = launch(candidates=[interpreter(version)])
    agent.hello()
    begin(agent)
    ask(agent, 1, workers=[[0, 7]])
    assert answer(agent)["id"] == 1
    ask(agent, 2, "cats", b"\0" * 100_000)
    assert answer(agent) == {"id": 2, "problem": "KeyError: 'cats'"}
    ask(agent, 3)
    assert answer(agent)["id"] == 3
    assert agent.bye()[0] == {"type": "bye", "left": 0, "pids": []}


def test_who_is_asked_and_is_not_there_says_so(agent: AgentProcess) -> None:
    ask(agent)
    assert agent.expect("observed", what="ended")[0]["cause"] == "there is no observer"


def test_one_that_ends_is_told_and_another_can_begin(agent: AgentProcess) -> None:
    begin(agent)
    observer = observer_of(agent)
    observer.kill()
    assert agent.expect("observed", what="ended")[0]["cause"] == "it has ended"
    begin(agent)
    ask(agent)
    assert answer(agent)["id"] == 1


def test_one_that_hangs_gives_way_to_another_with_what_it_has_started(
    agent: AgentProcess, hunt: Hunt
) -> None:
    begin(agent, f"import subprocess; subprocess.run(['sleep', {hunt.mark!r}], stdout=2)")
    hunt.wait_for("sleep")
    ask(agent, 1)
    begin(agent)
    ask(agent, 2)
    assert answer(agent)["id"] == 2
    hunt.wait_for()


@pytest.mark.parametrize(
    "code",
    [
        "print('not asked', flush=True); input(); input()",
        "print('x' * (1 << 20), end='', flush=True); input(); input()",
    ],
    ids=["what nobody asked", "without end"],
)
def test_one_that_says_too_much_is_ended(agent: AgentProcess, code: str) -> None:
    begin(agent, code)
    agent.expect("observed", what="ended")
    assert not [header for header, _ in agent.seen if header.get("what") == "answer"]


def test_a_question_of_any_size_reaches_it_whole(agent: AgentProcess) -> None:
    begin(
        agent,
        "import sys; sys.stdin.buffer.read(1); print(len(sys.stdin.buffer.read(5_000_000)), flush=True)",
    )
    agent.send("observe", b"x" * 5_000_000, what="ask")
    _, body = agent.expect("observed", what="answer")
    assert int(body) == 5_000_000


def test_one_that_cannot_be_started_is_told_with_the_cause(agent: AgentProcess) -> None:
    inner = agent.agent
    limits = inner.rlimit(psutil.RLIMIT_NOFILE)
    inner.rlimit(psutil.RLIMIT_NOFILE, (3, limits[1]))
    begin(agent)
    assert agent.expect("observed", what="ended")[0]["cause"].endswith(": too many open files")
    inner.rlimit(psutil.RLIMIT_NOFILE, limits)
    begin(agent)
    ask(agent)
    assert answer(agent)["id"] == 1


@pytest.mark.parametrize("victim", ["agent", "guardian", "driver"])
def test_it_ends_whoever_is_killed(agent: AgentProcess, victim: str) -> None:
    begin(agent)
    ask(agent)
    answer(agent)
    observer = observer_of(agent)
    os.kill(observer.pid, signal.SIGSTOP)  # it can't end by itself
    if victim == "driver":
        agent.hang_up()
    else:
        (agent.agent if victim == "agent" else agent.guardian).kill()
    until(lambda: has_ended(observer), "its end")


def test_it_ends_where_agent_and_guardian_are_killed_at_once(agent: AgentProcess) -> None:
    """Nobody is left who could end it."""
    begin(agent)
    ask(agent)
    answer(agent)
    observer, inner = observer_of(agent), agent.agent
    agent.guardian.suspend()
    inner.kill()
    agent.guardian.kill()
    until(lambda: has_ended(observer), "its end")


def test_the_ends_of_workers_and_another_round_are_as_without_it(agent: AgentProcess) -> None:
    begin(agent)
    ask(agent)
    answer(agent)
    assert agent.run(["true"])[0]["code"] == 0
    agent.start(["true"], round_number=1)  # before which all descendants are killed
    agent.expect("exited", code=0, start=1)
    assert agent.bye() == ({"type": "bye", "left": 0, "pids": []}, 0)
