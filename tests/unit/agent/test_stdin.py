import random
import resource
from collections.abc import Callable

from tests.unit.agent.harness import AgentProcess, python

Launch = Callable[..., AgentProcess]
PIPE_SIZE = 16 * resource.getpagesize()


def feed(agent: AgentProcess, data: bytes, slot: int = 0) -> None:
    agent.send("stdin", data, slot=slot)


def taken(agent: AgentProcess, slot: int = 0) -> int:
    """How much the agent has told so far that the worker took."""
    mine = [header for header, _ in agent.seen if header["type"] == "stdin_taken" and header["slot"] == slot]
    return sum(header["bytes"] for header in mine)


def wait_taken(agent: AgentProcess, size: int, slot: int = 0) -> None:
    for _ in agent.frames():
        if taken(agent, slot) >= size:
            break
    assert taken(agent, slot) == size


def test_stdin_reaches_the_worker_and_ends(agent: AgentProcess) -> None:
    agent.start(["cat"], stdin=True)
    feed(agent, b"one\n")
    assert agent.read_output(4) == b"one\n"
    feed(agent, b"two \x00\xff")
    assert agent.read_output(6) == b"two \x00\xff"
    feed(agent, b"")
    assert agent.expect("exited")[0]["code"] == 0
    assert taken(agent) == 10


def test_an_end_right_behind_the_data_loses_nothing(agent: AgentProcess) -> None:
    agent.start(["cat"], stdin=True)
    data = random.Random(3).randbytes(500_000)
    for start in range(0, len(data), 65536):
        feed(agent, data[start : start + 65536])
    feed(agent, b"")
    agent.expect("exited", code=0)
    assert agent.output() == data
    assert taken(agent) == len(data)


def test_each_worker_has_its_own_stdin(agent: AgentProcess) -> None:
    agent.start(["cat"], workers=3, stdin=True)
    for slot in range(3):
        feed(agent, b"for %d" % slot, slot)
        feed(agent, b"", slot)
    for slot in range(3):
        agent.expect("exited", slot=slot)
        assert agent.output("stdout", slot) == b"for %d" % slot


def test_taken_stdin_is_what_the_pipe_took(agent: AgentProcess) -> None:
    agent.start(["sleep", "1000"], stdin=True)
    agent.expect("started")
    feed(agent, b"x" * 300_000)
    for _ in range(3):
        agent.send("ping")
        agent.expect("pong")
    wait_taken(agent, PIPE_SIZE)
    feed(agent, b"")
    agent.send("signal", slots=[0], signal=9)
    agent.expect("exited", signal=9)
    assert taken(agent) == 300_000


def test_slow_reader_gets_the_whole_stdin(agent: AgentProcess) -> None:
    code = "import sys, time\nn = 0\nwhile d := sys.stdin.buffer.raw.read(20000): n += len(d); time.sleep(.001)\nprint(n)"
    agent.start(python(code), stdin=True)
    feed(agent, b"x" * 1_000_000)
    feed(agent, b"")
    agent.expect("exited", code=0)
    assert agent.output() == b"1000000\n"
    assert taken(agent) == 1_000_000


def test_a_worker_that_ends_without_reading_is_no_trouble(agent: AgentProcess) -> None:
    """What it left counts as taken: a driver that feeds other workers too must not wait for it."""
    agent.start(["/bin/sh", "-c", "sleep 0.1; exit 6"], stdin=True)
    feed(agent, b"x" * 300_000)
    agent.expect("exited", code=6)
    wait_taken(agent, 300_000)
    feed(agent, b"y" * 1000)
    wait_taken(agent, 301_000)
    feed(agent, b"")


def test_a_worker_that_closes_its_stdin_and_lives_on_is_no_trouble(agent: AgentProcess) -> None:
    agent.start(["/bin/sh", "-c", "exec 0<&-; echo closed; exec sleep 1000"], stdin=True)
    agent.read_output(7)
    feed(agent, b"x" * 100_000)
    wait_taken(agent, 100_000)
    feed(agent, b"y" * 1000)
    wait_taken(agent, 101_000)


def test_stdin_for_a_slot_without_stdin_is_dropped(agent: AgentProcess) -> None:
    feed(agent, b"nobody", slot=5)
    assert agent.run(["true"])[0]["code"] == 0
