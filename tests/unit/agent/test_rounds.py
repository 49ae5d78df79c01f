"""Workers that follow others in the same slots: nothing of the earlier ones is left, and all is told apart."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.testhosts.places import wait_until
from tests.unit.agent.harness import AgentProcess, python

DETACH = "setsid sh -c 'echo $$ > {pid}; exec sleep 1000' & while ! [ -s {pid} ]; do :; done; echo here; exec sleep 1000"


SUSPENSION = 0.05

TAKEN = """
import os, signal, socket, sys
reader, writer = os.pipe()
if os.fork() == 0:
    os.setuid(int(sys.argv[1]))
    listener = socket.create_server(("", int(os.environ["MASTER_PORT"])))
    os.write(writer, b"x")
    signal.pause()
os.read(reader, 1)
raise SystemExit(1)
"""
"""A worker whose port its child takes, as another user."""


def state_of(pid: int) -> str:
    """As proc(5) has it; Z where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter where it goes while it is read
        return "Z"


def is_gone(pid: int) -> bool:
    return state_of(pid) == "Z"


@pytest.fixture
def elastic(agent: AgentProcess) -> AgentProcess:
    agent.hello(elastic=SUSPENSION)
    return agent


def detached(agent: AgentProcess, pid_file: Path, slot: int, round_number: int) -> int:
    """The pid of what a new worker in the slot has detached."""
    agent.start(["sh", "-c", DETACH.format(pid=pid_file)], slots=[slot], round_number=round_number)
    agent.expect("output", slot=slot, stream="stdout")
    return int(pid_file.read_text())


def kill(agent: AgentProcess, slot: int, start: int) -> None:
    agent.send("stop", slots=[slot], steps=[(signal.SIGKILL, 0.0)])
    agent.expect("exited", slot=slot, start=start)


def test_second_worker_of_a_slot_is_distinct_from_the_first(elastic):
    elastic.start(["sh", "-c", "echo one; exit 1"])
    assert elastic.expect("exited", slot=0)[0]["start"] == 0
    elastic.start(["sh", "-c", "echo two; exit 2"], round_number=1)
    header, _ = elastic.expect("exited", slot=0, code=2)
    assert (header["start"], header["round"]) == (1, 1)
    outputs = [
        (header["start"], body) for header, body in elastic.seen if header["type"] == "output" and body
    ]
    assert outputs == [(0, b"one\n"), (1, b"two\n")]


def test_detached_processes_of_a_round_are_gone_before_the_next(elastic, tmp_path):
    pid = detached(elastic, tmp_path / "pid", 0, 0)
    kill(elastic, 0, 0)
    assert not is_gone(pid)
    elastic.start(["true"], round_number=1)
    elastic.expect("started", start=1)
    assert is_gone(pid)


def test_beside_live_workers_only_leftovers_of_the_slot_are_killed(elastic, tmp_path):
    own = detached(elastic, tmp_path / "own", 0, 0)
    others = detached(elastic, tmp_path / "others", 1, 0)
    kill(elastic, 0, 0)
    elastic.start(["true"], slots=[0], round_number=1)
    elastic.expect("started", start=1)
    wait_until(lambda: is_gone(own), "the end of what slot 0 detached")
    assert not is_gone(others)


def test_only_the_worker_that_lives_in_a_slot_is_stopped(elastic):
    elastic.start(["true"])
    elastic.expect("exited", slot=0)
    elastic.start(["sleep", "1000"], round_number=1)
    elastic.expect("started", start=1)
    kill(elastic, 0, 1)


def test_long_suspension_is_reported_once(elastic):
    elastic.start(["sleep", "1000"])
    pid = elastic.expect("started")[0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    header, _ = elastic.expect("suspended", slot=0, start=0)
    assert header["round"] == 0
    os.kill(pid, signal.SIGCONT)
    kill(elastic, 0, 0)
    assert not [one for one, _ in elastic.seen if one["type"] == "suspended"]


TRACE = """
import ctypes, os, sys
libc, pid = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
if libc.ptrace(16, pid, None, None):  # PTRACE_ATTACH
    sys.exit(os.strerror(ctypes.get_errno()))
os.waitpid(pid, 0)
print("attached", flush=True)
sys.stdin.read()
"""
"""A debugger: it stops the worker until its stdin ends."""


def test_worker_stopped_by_a_debugger_is_not_suspended(elastic: AgentProcess) -> None:
    elastic.start(["sleep", "1000"])
    pid = elastic.expect("started")[0]["pid"]
    with subprocess.Popen(
        python(TRACE, str(pid)), stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True
    ) as debugger:
        assert debugger.stdout is not None
        if debugger.stdout.readline() != "attached\n":
            pytest.skip(f"no debugger here: {debugger.communicate()[1]}")
        assert state_of(pid) == "t"
        time.sleep(5 * SUSPENSION)
        debugger.communicate("")
    kill(elastic, 0, 0)
    assert not [header for header, _ in elastic.seen if header["type"] == "suspended"]


def test_worker_paused_by_the_user_is_not_suspended_until_it_is_stopped_otherwise(
    elastic: AgentProcess,
) -> None:
    elastic.start(["sleep", "1000"])
    pid = elastic.expect("started")[0]["pid"]
    elastic.send("signal", slots=None, signal=signal.SIGSTOP)
    wait_until(lambda: state_of(pid) == "T", "a paused worker")
    time.sleep(5 * SUSPENSION)
    elastic.send("signal", slots=None, signal=signal.SIGCONT)
    wait_until(lambda: state_of(pid) == "S", "the end of the pause")
    assert not [header for header, _ in elastic.seen if header["type"] == "suspended"]
    os.kill(pid, signal.SIGSTOP)
    elastic.expect("suspended", slot=0)


def test_static_job_reports_no_suspension(agent):
    agent.hello()
    agent.start(["sleep", "1000"])
    pid = agent.expect("started")[0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state_of(pid) == "T", "a stopped worker")
    agent.send("ping")
    agent.expect("pong")
    kill(agent, 0, 0)
    assert not [one for one, _ in agent.seen if one["type"] == "suspended"]


@pytest.mark.skipif(os.getuid() != 0, reason="another user's program takes root")
@pytest.mark.parametrize("uid", [0, 4242])
def test_another_user_who_took_the_port_of_rank_0_is_reported(agent: AgentProcess, uid: int) -> None:
    port = agent.hello()["master_port"]
    agent.start(python(TAKEN, str(uid)), env={"MASTER_PORT": str(port), "HVLAUNCH_RANK": "0"})
    holder = agent.expect("exited")[0]["port_taken_by"]
    if not uid:
        assert holder is None
        return
    assert (holder["uid"], holder["port"], holder["user"]) == (uid, port, None)
    assert re.fullmatch(r"python[0-9.]*, pid \d+", holder["program"])
    assert "master_port" not in [header["type"] for header, _ in agent.seen]


def test_each_round_has_another_port_for_rank_0(agent):
    first = agent.hello(elastic=30.0)["master_port"]
    agent.start(["true"])
    second = agent.expect("master_port")[0]["port"]
    agent.start(["true"], round_number=1)
    third = agent.expect("master_port")[0]["port"]
    assert second != first
    assert third != second
