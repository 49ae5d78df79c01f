"""Workers' output: exact, apart, bounded, and whole before their end is told."""

import hashlib
import random
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hvlaunch.agent.wire.frames import FRAME_COST
from tests.testhosts.places import wait_until
from tests.unit.agent.harness import AgentProcess, Hunt, cost, python

Launch = Callable[..., AgentProcess]
WINDOW = 1 << 18


def test_both_streams_are_exact_and_apart(agent: AgentProcess) -> None:
    code = """if True:
        import os, random
        for seed, fd in ((1, 1), (2, 2)):
            data = random.Random(seed).randbytes(300_000)
            while data:
                data = data[os.write(fd, data[:777]):]
    """
    header, out, err = agent.run(python(code))
    assert header["code"] == 0
    assert out == random.Random(1).randbytes(300_000)
    assert err == random.Random(2).randbytes(300_000)


def test_an_unfinished_line_comes_at_once(agent: AgentProcess) -> None:
    agent.start(["/bin/sh", "-c", "printf prompt; exec sleep 1000"])
    assert agent.read_output(6) == b"prompt"


def test_each_stream_ends_with_an_empty_frame(agent: AgentProcess) -> None:
    agent.start(["/bin/sh", "-c", "echo a; echo b >&2"])
    agent.expect("exited")
    outputs = [(header["stream"], body) for header, body in agent.seen if header["type"] == "output"]
    for stream, text in (("stdout", b"a\n"), ("stderr", b"b\n")):
        bodies = [body for name, body in outputs if name == stream]
        assert b"".join(bodies) == text
        assert bodies[-1] == b""
        assert bodies.count(b"") == 1


def test_the_last_words_come_before_the_end(agent: AgentProcess) -> None:
    """Often, since it is a race of pipe and SIGCHLD; as much as a pipe holds, since that is never waited for."""
    for _ in range(30):
        agent.start(
            python("import os; os.write(1, b'x' * 65536); os.write(2, b'y' * 65536); os.kill(os.getpid(), 9)")
        )
        agent.expect("exited", signal=signal.SIGKILL)
        before_end, agent.seen = agent.seen, []
        sizes = {"stdout": 0, "stderr": 0}
        for header, body in before_end:
            if header["type"] == "output":
                sizes[header["stream"]] += len(body)
        assert sizes == {"stdout": 65536, "stderr": 65536}


def test_content_of_a_large_pipe_comes_before_the_end(agent: AgentProcess) -> None:
    """The worker has ended before the agent looks: all is still in the pipe."""
    code = """if True:
        import fcntl, os, signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        fcntl.fcntl(1, 1031, 1 << 20)
        os.write(2, b'ready')
        signal.sigwait([signal.SIGUSR1])
        os.write(1, b'x' * 900_000)
    """
    agent.start(python(code))
    agent.read_output(5, "stderr")
    process = agent.agent
    [worker] = process.children()
    process.suspend()
    worker.send_signal(signal.SIGUSR1)
    wait_until(lambda: worker.status() == "zombie", "the worker's end")
    process.resume()
    agent.expect("exited", code=0)
    assert len(agent.output()) == 900_000


def until_still(agent: AgentProcess, pid: int) -> None:
    """Wait until the worker has written and both sleep, so that neither goes on by itself."""
    both = agent.agent, psutil.Process(pid)

    def picture() -> list[object]:
        """The same twice: neither had a turn in between."""
        return [(one.status(), one.num_ctx_switches(), one.io_counters().write_chars) for one in both]

    def are_still() -> bool:
        before = picture()
        asleep = all(one.status() == "sleeping" for one in both)
        return asleep and both[1].io_counters().write_chars > 0 and picture() == before

    wait_until(are_still, "the worker to block")


def assert_rests(agent: AgentProcess) -> None:
    """The agent sleeps: it does not turn around a file that is ready and that it won't read."""
    process = agent.agent
    wait_until(lambda: {process.status() for _ in range(50)} == {"sleeping"}, "the agent to rest")


def test_idle_agent_uses_no_processor(agent: AgentProcess, hunt: Hunt) -> None:
    assert_rests(agent)
    agent.start(["/bin/sh", "-c", "exec >&- 2>&-; exec sleep 1000"], stdin=True)
    agent.expect("output", stream="stdout")
    agent.expect("output", stream="stderr")
    assert_rests(agent)
    agent.send("stdin", b"x" * 300_000, slot=0)
    assert_rests(agent)
    agent.send("signal", slots=None, signal=signal.SIGKILL)
    agent.expect("exited")
    assert_rests(agent)
    agent.start(["/bin/sh", "-c", "sleep $0 & exit", hunt.mark])
    agent.expect("exited", code=0)
    assert_rests(agent)


class TestBackPressure:
    """Without acknowledgements no more than the window is on its way, and the worker waits."""

    @staticmethod
    def flooded(launch: Launch) -> tuple[AgentProcess, list[bytes]]:
        """An agent whose worker writes without end, and what came until it stopped."""
        agent = launch(window=WINDOW, acks=False)
        agent.hello()
        agent.start(python("import os\nwhile True: os.write(1, b'x' * 4096)"))
        pid = agent.expect("started")[0]["pid"]
        got = agent.read_window(WINDOW)
        until_still(agent, pid)
        return agent, got

    def test_the_agent_stops_at_the_window_and_goes_on_with_acks(self, launch: Launch) -> None:
        agent, got = self.flooded(launch)
        agent.settle()
        got += agent.outputs()
        assert WINDOW <= cost(got) < WINDOW + 65536 + FRAME_COST
        agent.send("ack", bytes=cost(got))
        assert cost(agent.read_window(WINDOW)) >= WINDOW

    def test_the_agent_keeps_nothing_for_later(self, launch: Launch) -> None:
        agent, got = self.flooded(launch)
        [worker] = agent.agent.children()
        in_the_pipe = 16 * resource.getpagesize()
        agent.settle()
        read = len(b"".join(got + agent.outputs()))
        assert worker.io_counters().write_chars <= read + in_the_pipe + 4096
        assert agent.agent.memory_info().rss < 64 << 20

    def test_a_driver_that_reads_nothing_costs_a_window_of_memory(self, launch: Launch) -> None:
        agent = launch(window=4 << 20, acks=False)
        agent.hello()
        before = agent.agent.memory_info().rss
        agent.start(python("import os\nwhile True: os.write(1, b'x' * 65536)"))
        pid = agent.expect("started")[0]["pid"]
        until_still(agent, pid)
        assert agent.agent.memory_info().rss - before < 12 << 20

    def test_a_blocked_worker_can_be_stopped(self, launch: Launch) -> None:
        agent, _ = self.flooded(launch)
        agent.send("stop", slots=None, steps=[[signal.SIGTERM, 0.0]])
        agent.acks = True
        agent.send("ack", bytes=1 << 20)
        assert agent.expect("exited")[0]["signal"] == signal.SIGTERM

    def test_the_end_waits_for_no_credit(self, launch: Launch) -> None:
        """A worker ends while nobody reads: its end is told, and its last output before it."""
        agent = launch(window=4096, acks=False)
        agent.hello()
        agent.start(["/bin/sh", "-c", "head -c 4096 /dev/zero; read line; echo last words"], stdin=True)
        agent.read_output(4096)
        agent.send("stdin", b"\n", slot=0)
        agent.expect("exited", code=0)
        assert agent.output() == b"last words\n"

    def test_a_bye_brings_all_that_is_left(self, launch: Launch) -> None:
        agent = launch(window=4096, acks=False)
        agent.hello()
        command = "head -c 4096 /dev/zero; read line; echo last words; exit 5"
        agent.start(["/bin/sh", "-c", command], stdin=True)
        agent.read_output(4096)
        agent.send("stdin", b"\n", slot=0)
        pid = agent.expect("started")[0]["pid"]
        wait_until(lambda: not psutil.pid_exists(pid), "the worker's end")
        agent.bye()
        assert agent.output() == b"last words\n"
        assert agent.expect("exited")[0]["code"] == 5


@pytest.mark.timeout(300)
def test_two_hundred_megabytes_arrive_whole(agent: AgentProcess) -> None:
    code = """if True:
        import hashlib, os
        block, digest = os.urandom(1 << 20), hashlib.sha256()
        for number in range(200):
            data = number.to_bytes(4, 'big') + block
            digest.update(data)
            while data:
                data = data[os.write(1, data):]
        os.write(2, digest.hexdigest().encode())
    """
    agent.start(python(code))
    digest, size = hashlib.sha256(), 0
    while not any(header["type"] == "exited" for header, _ in agent.seen):
        agent.receive(30)
        data = agent.output()
        size += len(data)
        digest.update(data)
    assert size == 200 * ((1 << 20) + 4)
    assert agent.output("stderr").decode() == digest.hexdigest()
    assert agent.agent.memory_info().rss < 64 << 20


def test_a_daemon_that_holds_the_pipe_does_not_delay_the_end(
    agent: AgentProcess, hunt: Hunt, tmp_path: Path
) -> None:
    script = "(while [ ! -e $1 ]; do sleep 0.01; done; echo later; exec sleep $0) & echo now; exit 4"
    agent.start(["/bin/sh", "-c", script, hunt.mark, str(tmp_path / "go")])
    assert agent.expect("exited")[0]["code"] == 4
    assert agent.output() == b"now\n"
    (tmp_path / "go").touch()
    assert agent.read_output(6) == b"later\n"


def test_a_daemon_that_never_stops_writing_does_not_delay_the_end(agent: AgentProcess, hunt: Hunt) -> None:
    agent.start(["/bin/sh", "-c", "yes $0 & exit 4", hunt.mark])
    assert agent.expect("exited")[0]["code"] == 4
    agent.read_output(1 << 20)
    assert agent.bye()[1] == 0
    assert hunt.pids() == []


def test_many_workers_outputs_are_never_mixed_up(agent: AgentProcess) -> None:
    code = "import os\nfor n in range(300): os.write(1, (os.environ['ME'] * 500 + '\\n').encode())"
    agent.start(["/bin/sh", "-c", f'ME=$$; export ME; exec {python("")[0]} -c "$0"', code], workers=8)
    pids = {slot: agent.expect("started", slot=slot)[0]["pid"] for slot in range(8)}
    for slot, pid in pids.items():
        agent.expect("exited", slot=slot, code=0)
        assert agent.output("stdout", slot) == (str(pid) * 500 + "\n").encode() * 300
