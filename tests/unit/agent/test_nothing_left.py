"""Whatever ends: no process of the job is left, the scratch directory is gone, other jobs go on."""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hvlaunch.agent.wire.frames import encode
from hvlaunch.driver.program import agent_command, bundle
from tests.testhosts.places import wait_until
from tests.unit.agent.harness import AgentProcess, Hunt, has_ended, python

Launch = Callable[..., AgentProcess]

FAMILY = """
sleep $0 &
setsid sleep $0 &
(setsid sleep $0 >/dev/null 2>&1 </dev/null &)
(env -i setsid sleep $0 &)
(trap '' TERM HUP INT; exec sleep $0) &
(cd /; setsid sh -c 'trap "" TERM; sleep $0' $0 &)
trap '' TERM
sleep $0
:"""
"""A worker that ignores TERM, with children of every kind: six, one of them with a child, and its own."""
FAMILY_PROGRAMS = ["sh"] * 2 + ["sleep"] * 7
CHAIN = python(
    "import fcntl, itertools, os, sys, time\n"
    "held = open(sys.argv[1], 'w'); fcntl.flock(held, fcntl.LOCK_EX)\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    for number in itertools.count():\n"
    "        if number == 50: os.write(1, b'going')\n"
    "        if os.fork(): os._exit(0)\n"
    "time.sleep(1000)"
)
"""A worker that sleeps, and a chain beside it, whose processes are gone before one sees them; all hold a lock."""


class Job:
    """An agent with a family of processes, and what must be gone in the end. Its lease begins when all are there."""

    def __init__(self, agent: AgentProcess, hunt: Hunt) -> None:
        self.link = agent
        self.hunt = hunt
        self.scratch = Path(agent.hello()["scratch"])
        (self.scratch / "error.json").write_text("{}")
        agent.start(["/bin/sh", "-c", FAMILY, hunt.mark])
        hunt.wait_for(*FAMILY_PROGRAMS, meanwhile=agent.settle)
        self.guardian, self.agent = agent.guardian, agent.agent

    def assert_nothing_left(self) -> None:
        """At once when the channel has ended: the driver counts on it."""
        assert self.hunt.pids() == []
        assert not self.agent.is_running()
        assert not self.guardian.is_running()
        assert not self.scratch.exists()


@pytest.fixture
def job(launch: Launch, hunt: Hunt) -> Job:
    return Job(launch(), hunt)


@pytest.fixture(autouse=True)
def neighbour(launch: Launch) -> Iterator[None]:
    """Another job on the same machine, which is to notice nothing."""
    hunt = Hunt()
    other = Job(launch(), hunt)
    before = sorted(hunt.pids())
    yield
    assert sorted(hunt.pids()) == before
    assert not {other.guardian.status(), other.agent.status()} & {"stopped", "zombie", "dead"}
    assert other.scratch.exists()
    other.link.settle()
    hunt.end()


def test_after_a_bye(job: Job) -> None:
    assert job.link.bye() == ({"type": "bye", "left": 0, "pids": []}, 0)
    job.assert_nothing_left()


def test_every_process_is_gone_before_bye(job: Job) -> None:
    """The agent's last frame is a promise, which needs no guardian."""
    job.guardian.suspend()
    job.link.send("bye")
    job.link.expect("bye", left=0)
    assert job.hunt.pids() == []
    job.guardian.resume()


def test_after_the_driver_is_gone(job: Job) -> None:
    job.link.hang_up()
    assert job.link.expect("parting")[0]["cause"] == "the driver is gone"
    assert job.link.status() == 0
    job.assert_nothing_left()


def test_after_the_driver_is_gone_without_reading(job: Job) -> None:
    """As when its machine is switched off: what the agent says goes nowhere."""
    job.link.start(["yes"], workers=2)
    job.link.expect("started", slot=1)
    stdout = job.link.process.stdout
    assert stdout is not None
    stdout.close()
    job.link.hang_up()
    assert job.link.process.wait(60) == 0
    job.assert_nothing_left()


def test_after_a_lease_of_silence(launch: Launch, hunt: Hunt) -> None:
    job = Job(launch(lease=3.0), hunt)
    assert job.link.expect("parting")[0]["cause"] == "received nothing from the driver for 3 seconds"
    assert job.link.status() == 0
    job.assert_nothing_left()


def test_pings_and_partial_frames_renew_the_lease(launch: Launch) -> None:
    """A long start frame over a slow line is no silence."""
    lease = 4.0  # a busy machine may let us pause for seconds
    pinged, fed = launch(lease=lease), launch(lease=lease)
    for agent in (pinged, fed):
        agent.hello()
    fed.write(b"\0\0\x20\0\0\0\0\x14")
    began = time.monotonic()
    while time.monotonic() < began + 1.2 * lease:
        pinged.settle()
        fed.write(b"x")
        fed.receive(0.05)
    assert pinged.seen == fed.seen == []


def test_after_a_kill_of_the_agent(job: Job) -> None:
    job.agent.kill()
    assert job.link.status() == 137
    assert job.link.stderr() == "hvlaunch agent: killed by SIGKILL\n"
    job.assert_nothing_left()


def test_after_an_end_of_the_agent_by_a_signal_without_a_name(job: Job) -> None:
    os.kill(job.agent.pid, signal.SIGRTMIN + 1)
    assert job.link.status() == 128 + signal.SIGRTMIN + 1
    assert job.link.stderr() == f"hvlaunch agent: killed by signal {signal.SIGRTMIN + 1:d}\n"
    job.assert_nothing_left()


def test_after_a_kill_of_the_guardian(job: Job) -> None:
    job.guardian.kill()
    assert job.link.expect("parting")[0]["cause"] == "its guardian was killed"
    assert job.link.status() == -signal.SIGKILL
    wait_until(lambda: has_ended(job.agent), "the agent's end")
    assert job.hunt.pids() == []
    assert not job.scratch.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("which", ["guardian", "agent"])
def test_after_a_signal_to(which: str, number: signal.Signals, job: Job) -> None:
    getattr(job, which).send_signal(number)
    assert job.link.expect("parting")[0]["cause"] == f"got {number.name}"
    assert job.link.expect("exited")[0]["signal"] == signal.SIGKILL
    assert job.link.expect("bye")[0]["left"] == 0
    assert job.link.status() == 0
    job.assert_nothing_left()


def test_after_a_broken_frame(job: Job) -> None:
    job.link.write(b"\xff" * 100)
    assert job.link.status() == 0
    job.assert_nothing_left()


def test_after_a_stopped_agent_loses_its_driver(launch: Launch, hunt: Hunt) -> None:
    """Nothing can wake it; the guardian sees the channel close, and waits no longer than grace and lease."""
    job = Job(launch(grace=0.2, lease=3.0), hunt)
    job.agent.suspend()
    job.link.hang_up()
    assert job.link.status() == 137
    job.assert_nothing_left()


def test_after_a_stopped_agent_whose_channel_stays(launch: Launch, hunt: Hunt) -> None:
    """As where the sshd of its first connection is stopped too, so that the channel never closes."""
    job = Job(launch(grace=0.2, lease=1.0), hunt)
    job.link.send("ping")
    job.link.expect("pong")
    job.agent.suspend()
    assert job.link.status() == 137
    job.assert_nothing_left()


def test_after_a_stopped_worker(job: Job) -> None:
    for pid in job.hunt.pids():
        os.kill(pid, signal.SIGSTOP)
    assert job.link.bye() == ({"type": "bye", "left": 0, "pids": []}, 0)
    job.assert_nothing_left()


@pytest.mark.parametrize("ending", ["bye", "agent", "guardian"])
def test_after_a_chain_of_forks_and_exits(launch: Launch, tmp_path: Path, ending: str) -> None:
    agent = launch()
    agent.hello()
    agent.start([*CHAIN, str(tmp_path / "held")])
    assert agent.read_output(5) == b"going"
    family = [agent.guardian, agent.agent]
    if ending == "bye":
        agent.send("bye")
    else:
        family[ending == "agent"].kill()
    agent.status()
    wait_until(lambda: all(map(has_ended, family)), "the agent's end")
    with (tmp_path / "held").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_after_a_worker_that_ended_and_left_daemons(launch: Launch, hunt: Hunt) -> None:
    agent = launch()
    agent.hello()
    agent.start(["/bin/sh", "-c", "(setsid sleep $0 >/dev/null 2>&1 &); exit 0", hunt.mark])
    agent.expect("exited", code=0)
    hunt.wait_for("sleep")
    assert agent.bye() == ({"type": "bye", "left": 0, "pids": []}, 0)
    assert hunt.pids() == []


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root, and unshare")
@pytest.mark.parametrize("ending", ["bye", "agent"])
def test_with_an_empty_proc(launch: Launch, hunt: Hunt, ending: str) -> None:
    shell = ["unshare", "-m", "/bin/sh", "-c", 'mount -t tmpfs none /proc && exec /bin/sh -c "$0"']
    agent = launch(shell=shell)
    agent.hello()
    agent.start(["/bin/sh", "-c", "setsid sleep $0 & sleep $0", hunt.mark])
    hunt.wait_for("sh", "sleep", "sleep")
    if ending == "bye":
        assert agent.bye() == ({"type": "bye", "left": 0, "pids": []}, 0)
    else:
        agent.agent.kill()
        assert agent.status() == 128 + signal.SIGKILL
    assert hunt.pids() == []


def test_a_guardian_that_is_stopped_ends_with_its_agent(launch: Launch, hunt: Hunt) -> None:
    agent = launch()
    agent.hello()
    agent.start(["/bin/sh", "-c", "setsid sleep $0 & sleep $0", hunt.mark])
    hunt.wait_for("sh", "sleep", "sleep")
    agent.guardian.suspend()
    assert agent.bye() == ({"type": "bye", "left": 0, "pids": []}, 0)
    assert hunt.pids() == []


@pytest.mark.timeout(60)
def test_endless_stream_of_ended_processes_does_not_block() -> None:
    code = """if True:
        import contextlib, os, signal
        from hvlaunch.agent import reaper
        reaper.adopt_descendants()
        ready, tell = os.pipe()
        if os.fork() == 0:
            os.setsid()
            os.write(tell, b"%10d" % os.getpid())
            for _ in range(7):
                if os.fork() == 0:
                    break
            while True:
                if os.fork():
                    os._exit(0)
        group = int(os.read(ready, 10))
        reaper.kill_descendants(0.5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        print(reaper.kill_descendants(30.0))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=50, check=True, start_new_session=True
    )
    assert done.stdout == b"[]\n"


def test_unkillable_process_is_named() -> None:
    code = """if True:
        import subprocess
        from hvlaunch.agent import reaper
        child = subprocess.Popen(["sleep", "1000"])
        reaper.send_signal = lambda pid, number: None
        assert reaper.kill_descendants(0.1) == [child.pid]
        child.kill()
        assert reaper.kill_descendants(10.0) == []
    """
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_before_the_hello(launch: Launch) -> None:
    agent = launch()
    agent.hang_up()
    assert agent.status() == 0


def test_over_a_socket_as_some_ssh_servers_give_it(tmp_path: Path) -> None:
    """One socket for both directions: its end is told otherwise than a pipe's."""
    data = bundle(
        {"grace": 0.2, "lease": 60.0, "window": 1 << 20, "reconnect": 1.0, "spill": 0}, is_near=True
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            ["/bin/sh", "-c", agent_command([sys.executable], len(data), 60)],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
        )
        theirs.close()
        ours.sendall(data + encode({"type": "ping"}))
        assert ours.recv(4)
        [agent] = psutil.Process(process.pid).children()
        ours.shutdown(socket.SHUT_WR)
        assert process.wait(60) == 0
        assert not agent.is_running()
