"""Signals on their way to workers."""

import signal
import time
from collections.abc import Callable

import pytest

from hvlaunch.agent.wire.frames import encode
from tests.unit.agent.harness import AgentProcess, Hunt, python

Launch = Callable[..., AgentProcess]
STUBBORN = python(
    "import os, signal, time\n"
    "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):\n"
    "    signal.signal(number, lambda number, _: os.write(1, signal.Signals(number).name[3:].encode() + b'\\n'))\n"
    "os.write(1, b'ready\\n')\n"
    "while True: time.sleep(0.01)"
)


def stubborn(agent: AgentProcess, workers: int = 1) -> None:
    """Start workers that tell of signals and go on."""
    agent.start(STUBBORN, workers=workers)
    for slot in range(workers):
        agent.read_output(6, slot=slot)


def stop(agent: AgentProcess, *steps: tuple[signal.Signals, float], slots: list[int] | None = None) -> float:
    """When it was sent at the earliest."""
    began = time.monotonic()
    agent.send("stop", slots=slots, steps=steps)
    return began


def test_a_worker_that_ignores_term_is_killed_after_the_grace(agent: AgentProcess) -> None:
    agent.start(["/bin/sh", "-c", "trap '' TERM; echo ready; exec sleep 1000"])
    agent.read_output(6)
    began = stop(agent, (signal.SIGTERM, 0.0), (signal.SIGKILL, 0.5))
    header, _ = agent.expect("exited")
    assert (header["signal"], header["code"]) == (signal.SIGKILL, None)
    assert header["at"] - began >= 0.5
    assert header["oom_killed"] is False


def test_a_worker_that_obeys_is_not_waited_for(agent: AgentProcess) -> None:
    agent.start(["sleep", "1000"])
    stop(agent, (signal.SIGTERM, 0.0), (signal.SIGKILL, 1000.0))
    assert agent.expect("exited")[0]["signal"] == signal.SIGTERM


def test_the_steps_come_in_their_time(agent: AgentProcess) -> None:
    """In the order of their numbers, which is Python's for those that come while a worker has no turn."""
    stubborn(agent)
    began = stop(agent, (signal.SIGINT, 0.0), (signal.SIGUSR1, 0.2), (signal.SIGTERM, 0.4))
    assert agent.read_output(14) == b"INT\nUSR1\nTERM\n"
    assert time.monotonic() - began >= 0.4


def test_a_second_stop_replaces_the_steps_of_the_first(agent: AgentProcess) -> None:
    stubborn(agent)
    stop(agent, (signal.SIGINT, 0.0), (signal.SIGTERM, 1000.0))
    assert agent.read_output(4) == b"INT\n"
    stop(agent, (signal.SIGKILL, 0.0))
    assert agent.expect("exited")[0]["signal"] == signal.SIGKILL
    assert agent.output() == b""


def test_a_later_stop_can_also_give_more_time(agent: AgentProcess) -> None:
    stubborn(agent)
    began = time.monotonic()
    stops = [[(signal.SIGKILL, 0.1)], [(signal.SIGTERM, 0.0), (signal.SIGKILL, 0.5)]]
    agent.write(b"".join(encode({"type": "stop", "slots": None, "steps": steps}) for steps in stops))
    assert agent.expect("exited")[0]["at"] - began >= 0.5


def test_only_the_named_slots_stop(agent: AgentProcess) -> None:
    stubborn(agent, workers=3)
    stop(agent, (signal.SIGKILL, 0.0), slots=[1])
    agent.expect("exited", slot=1, signal=signal.SIGKILL)
    agent.send("signal", slots=[0, 2], signal=signal.SIGUSR1)
    for slot in (0, 2):
        assert agent.read_output(5, slot=slot) == b"USR1\n"


def test_a_stop_reaches_the_workers_whole_process_group(agent: AgentProcess, hunt: Hunt) -> None:
    agent.start(["/bin/sh", "-c", "sleep $0 & sleep $0 & wait", hunt.mark])
    hunt.wait_for("sh", "sleep", "sleep")
    stop(agent, (signal.SIGTERM, 0.0))
    agent.expect("exited", signal=signal.SIGTERM)
    hunt.wait_for()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_that_is_to_end_keeps_what_it_forked(agent: AgentProcess, method: str) -> None:
    """As a DataLoader's processes: the worker still needs them, and fails without them, while it saves its state."""
    agent.start(
        python(
            "import multiprocessing, os, signal, sys, time\n"
            "child = multiprocessing.get_context(sys.argv[1]).Process(target=time.sleep, args=(1000,))\n"
            "child.start()\n"
            "def save(*_):\n"
            "    child.kill()\n"
            "    child.join()\n"
            "    os.write(1, b'%d\\n' % child.exitcode)\n"
            "    os._exit(0)\n"
            "signal.signal(signal.SIGTERM, save)\n"
            "os.write(1, b'ready\\n')\n"
            "while True: time.sleep(0.01)",
            method,
        )
    )
    agent.read_output(6)
    stop(agent, (signal.SIGTERM, 0.0))
    assert agent.read_output(3) == b"-9\n"
    agent.expect("exited", code=0)


def test_a_stop_kills_what_a_worker_forked_as_well(agent: AgentProcess, hunt: Hunt) -> None:
    agent.start(python("import os, signal; os.fork(); os.write(1, b'ready\\n'); signal.pause()", hunt.mark))
    agent.read_output(12)
    stop(agent, (signal.SIGKILL, 0.0))
    agent.expect("exited", signal=signal.SIGKILL)
    hunt.wait_for()


def test_a_passed_on_signal_reaches_only_the_worker(agent: AgentProcess, hunt: Hunt) -> None:
    script = "sleep $0 & trap 'echo got it' USR1; echo ready; while :; do wait; done"
    agent.start(["/bin/sh", "-c", script, hunt.mark])
    agent.read_output(6)
    hunt.wait_for("sh", "sleep")
    agent.send("signal", slots=None, signal=signal.SIGUSR1)
    assert agent.read_output(7) == b"got it\n"
    assert sorted(hunt.programs()) == ["sh", "sleep"]


def test_signals_for_workers_that_have_ended_are_no_trouble(agent: AgentProcess) -> None:
    agent.run(["true"])
    agent.send("signal", slots=None, signal=signal.SIGUSR1)
    stop(agent, (signal.SIGTERM, 0.0), (signal.SIGKILL, 0.0), slots=[0, 7])
    agent.send("ping")
    agent.expect("pong")
    assert agent.bye() == ({"type": "bye", "left": 0, "pids": []}, 0)


def test_ending_agent_starts_no_worker(launch: Launch) -> None:
    """The driver may have sent the order before it knew."""
    agent = launch(grace=1000.0)
    agent.hello()
    stubborn(agent)
    agent.agent.send_signal(signal.SIGTERM)
    agent.expect("parting")
    agent.start(["sleep", "1000"], slots=[1])
    agent.settle()
    assert [header["slot"] for header, _ in agent.seen if header["type"] == "started"] == [0]
    assert agent.bye()[1] == 0
