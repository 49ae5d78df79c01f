"""Errands on a real agent: results, streams, limits, failures, and ends without leftovers."""

import os
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest

import hvlaunch.driver.links.errands as module
from hvlaunch.agent.wire.frames import ERRAND_WINDOW, LONGEST_RESULT, MOST_ERRANDS, BadFrame
from hvlaunch.driver.links.errands import Errand, ErrandFailed, HostErrands, Limits
from hvlaunch.driver.links.links import pack_sync
from hvlaunch.driver.program import AgentProgram
from tests.testhosts.places import wait_until
from tests.unit.agent.errand_rig import ErrandRig
from tests.unit.agent.harness import PATIENCE, AgentProcess, Hunt, has_ended, interpreter
from tests.unit.agent.test_rejoin import KEY, Again

UNLIMITED = Limits(None, None, None)


@pytest.fixture
def rig(agent: AgentProcess) -> ErrandRig:
    return ErrandRig(agent)


def start(rig: ErrandRig, act: str, limits: Limits = UNLIMITED, **arguments: Any) -> Errand:
    return rig.errands.start("example", {"act": act, **arguments}, limits)


def process_of(rig: ErrandRig) -> psutil.Process:
    """Return the agent's only child once it runs its own program: before exec the agent waits in posix_spawn."""
    processes: list[psutil.Process] = wait_until(rig.agent.agent.children, "an errand")
    wait_until(lambda: processes[0].name() == "hvl-example", "its name")
    return processes[0]


@pytest.mark.parametrize("version", ["3.8", "3.13"])
def test_an_errand_returns_a_result(launch: Any, version: str) -> None:
    agent = launch(candidates=[interpreter(version)])
    agent.hello()
    rig = ErrandRig(agent)
    errand = start(rig, "echo")
    errand.write(b"some bytes")
    errand.close_input()
    assert rig.result(errand)["bytes"] == 10
    assert errand.read(0.0) == b"some bytes"
    assert errand.read(0.0) == b""
    assert agent.bye()[0] == {"type": "bye", "left": 0, "pids": []}


def test_a_program_is_sent_when_it_is_first_needed_and_once(rig: ErrandRig) -> None:
    assert rig.sent == []
    for _ in range(2):
        rig.result(start(rig, "allocate"))
    assert [header["what"] for header in rig.sent] == ["code", "start", "start"]


def test_streams_of_any_size_go_both_ways_at_once(rig: ErrandRig) -> None:
    errand = start(rig, "echo")
    data = os.urandom(3 * ERRAND_WINDOW)
    errand.write(data)
    assert rig.read(errand, len(data)) == data
    errand.write(b"more")
    assert rig.read(errand, 4) == b"more"
    errand.close_input()
    assert rig.result(errand)["bytes"] == len(data) + 4


def test_a_stream_that_is_not_read_waits(rig: ErrandRig) -> None:
    size = 4 * ERRAND_WINDOW
    errand = start(rig, "fill", size=size)
    arrived = 0
    end = time.monotonic() + 60
    while arrived < ERRAND_WINDOW and time.monotonic() < end:
        rig.pump()
        arrived = sum(map(len, errand._unread))
    # No more comes, however long the driver waits.
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        rig.pump()
    assert sum(map(len, errand._unread)) == ERRAND_WINDOW
    assert not errand.has_ended
    assert len(rig.read(errand, size)) == size
    assert rig.result(errand)["bytes"] == size


def test_input_that_is_not_read_waits_and_does_not_hang_at_the_end(rig: ErrandRig) -> None:
    errand = start(rig, "sleep", size=1)
    errand.write(bytes(2 * ERRAND_WINDOW))
    assert not errand.drain(0.05)
    rig.result(errand)
    assert errand.drain(0.0)
    errand.write(b"too late")


def test_what_it_prints_is_not_in_its_stream(rig: ErrandRig) -> None:
    errand = start(rig, "print", words="noise")
    rig.result(errand)
    assert errand.read(0.0) == b""


@pytest.mark.parametrize(
    ("act", "arguments", "limits", "reason", "cause"),
    [
        ("raise", {"words": "no cats"}, UNLIMITED, "raised", "ValueError: no cats"),
        ("sleep", {"size": 600}, UNLIMITED._replace(seconds=0.2), "time", "it took longer than 0.2 s"),
        (
            "allocate",
            {"size": 1 << 30},
            UNLIMITED._replace(memory=1 << 28),
            "memory",
            "it needed more memory than its limit",
        ),
        (
            "fill",
            {"size": 1 << 20},
            UNLIMITED._replace(output=1000),
            "output",
            "it wrote more than 1000 bytes",
        ),
        (
            "long",
            {"size": LONGEST_RESULT},
            UNLIMITED,
            "output",
            f"its result has more than {LONGEST_RESULT} bytes",
        ),
        ("exit", {"size": 3}, UNLIMITED, "killed", "it ended with status 3 and without a result"),
        ("kill", {"size": 9}, UNLIMITED, "killed", "it was killed by SIGKILL"),
        ("misfit", {}, UNLIMITED, "result", "its result does not fit its schema"),
    ],
)
def test_a_failure_has_its_reason_and_cause(
    rig: ErrandRig, act: str, arguments: dict[str, Any], limits: Limits, reason: str, cause: str
) -> None:
    assert rig.failure(start(rig, act, limits, **arguments)) == (reason, cause)
    assert rig.result(start(rig, "allocate"))["bytes"] == 0, "the next errand is not affected"


def test_an_unknown_errand_and_arguments_that_do_not_fit_are_not_sent(rig: ErrandRig) -> None:
    for name, arguments, reason in (
        ("../cats", {}, "unknown"),
        ("example", {"act": "purr"}, "arguments"),
        ("example", {"act": "raise", "words": "x" * (1 << 20)}, "arguments"),
    ):
        with pytest.raises(ErrandFailed) as failed:
            rig.errands.start(name, arguments)
        assert failed.value.reason == reason
    assert rig.sent == []


def test_an_agent_without_the_program_says_so(agent: AgentProcess) -> None:
    limits: dict[str, Any] = dict.fromkeys(("seconds", "memory", "output"))
    agent.send("errand", b"{}", what="start", id=1, name="cats", **limits)
    header, _ = agent.expect("errand", what="failed")
    assert (header["reason"], header["cause"]) == ("start", "no program of that name has been sent")


def test_an_errand_that_cannot_be_started_has_the_cause(rig: ErrandRig) -> None:
    inner = rig.agent.agent
    limits = inner.rlimit(psutil.RLIMIT_NOFILE)
    inner.rlimit(psutil.RLIMIT_NOFILE, (3, limits[1]))
    reason, cause = rig.failure(start(rig, "echo"))
    assert (reason, cause.endswith(": too many open files")) == ("start", True)
    inner.rlimit(psutil.RLIMIT_NOFILE, limits)
    rig.result(start(rig, "allocate"))


def test_a_host_runs_so_many_errands_at_once(rig: ErrandRig) -> None:
    errands = [start(rig, "echo") for _ in range(MOST_ERRANDS)]
    assert rig.failure(start(rig, "echo")) == ("start", f"{MOST_ERRANDS} errands run on this host already")
    errands[0].close_input()
    rig.result(errands[0])
    rig.result(start(rig, "allocate"))


def test_an_errand_that_is_stopped_ends_with_all_that_it_started(rig: ErrandRig, hunt: Hunt) -> None:
    errand = start(rig, "spawn", words=hunt.mark, size=600)
    hunt.wait_for("sleep", meanwhile=rig.pump)
    errand.stop()
    assert rig.failure(errand) == ("stopped", "it was stopped")
    hunt.wait_for()


def test_what_an_errand_has_started_ends_with_it(rig: ErrandRig, hunt: Hunt) -> None:
    rig.result(start(rig, "spawn", words=hunt.mark))
    hunt.wait_for(meanwhile=rig.pump)


def test_errands_fail_when_their_host_is_gone(rig: ErrandRig) -> None:
    errand = start(rig, "echo")
    rig.errands.lose()
    assert rig.failure(errand) == ("lost", "the connection to the host has ended")
    with pytest.raises(ErrandFailed) as failed:
        start(rig, "echo")
    assert failed.value.reason == "lost"


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ({"what": "data", "id": 2}, b"x"),
        ({"what": "failed", "id": 0, "reason": "time", "cause": ""}, b""),
        ({"what": "credit", "id": 1, "bytes": 1}, b""),
    ],
    ids=["never started", "no such number", "credit for nothing"],
)
def test_a_frame_that_may_not_come_is_refused(header: dict[str, Any], body: bytes) -> None:
    errands = HostErrands("a", lambda *_: None)
    errands.start("observer", {})
    with pytest.raises(BadFrame):
        errands.obey(header, body)


def test_data_beyond_the_window_and_behind_the_end_is_refused() -> None:
    errands = HostErrands("a", lambda *_: None)
    errand = errands.start("observer", {})
    errands.obey({"what": "data", "id": 1}, bytes(ERRAND_WINDOW))
    with pytest.raises(BadFrame):
        errands.obey({"what": "data", "id": 1}, b"x")
    errands.obey({"what": "done", "id": 1}, b'{"result":{"questions":0}}')
    assert errand.result() == {"questions": 0}
    with pytest.raises(BadFrame):
        errands.obey({"what": "done", "id": 1}, b"{}")


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (b"nonsense", "its result is not JSON"),
        (b"[" * 5000, "its result is not JSON"),
        (b"\xff", "its result is not JSON"),
        (b'{"result":{"questions":-1}}', "its result does not fit its schema"),
        (b'{"result":{},"reason":"raised"}', "its result does not fit its schema"),
        (b'{"reason":"lost","cause":"x"}', "its result does not fit its schema"),
        (b'{"reason":"raised","cause":7}', "its result does not fit its schema"),
    ],
)
def test_nonsense_from_an_errands_process_is_its_own_failure(body: bytes, cause: str) -> None:
    errands = HostErrands("a", lambda *_: None)
    errand = errands.start("observer", {})
    errands.obey({"what": "done", "id": 1}, body)
    with pytest.raises(ErrandFailed) as failed:
        errand.result()
    assert (failed.value.reason, failed.value.detail) == ("result", cause)


def test_a_program_is_made_once_for_all_hosts_that_ask_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []

    def make(begin: str, *_: object, **_near: bool) -> bytes:
        time.sleep(0.01)  # another thread asks meanwhile
        made.append(begin)
        return b"program"

    monkeypatch.setattr(module, "make_program", make)
    module._made.cache_clear()
    try:
        with ThreadPoolExecutor(8) as hosts:
            programs = set(hosts.map(lambda _: module.errand_program("library", is_near=True), range(8)))
    finally:
        module._made.cache_clear()
    assert (programs, len(made)) == ({b"program"}, 1)


def test_a_program_is_made_while_the_first_host_proves_its_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    made: SimpleQueue[tuple[str, bool]] = SimpleQueue()
    monkeypatch.setattr(module, "errand_program", lambda name, is_near: made.put((name, is_near)))
    program = AgentProgram({}, None, also=pack_sync)
    program.prepare()
    program.prepare()
    assert made.get(timeout=PATIENCE) == ("sync", True)
    assert made.empty()


@pytest.mark.parametrize("is_near", [False, True])
def test_near_host_gets_a_compiled_program(is_near: bool) -> None:
    sent: list[bytes] = []

    def send(_header: Mapping[str, Any], body: bytes = b"") -> None:
        sent.append(body)

    errands = HostErrands("a", send, is_near=is_near)
    errands.start("library", {"hash": "0", "size": 1})
    assert (len(sent[0]) > 40_000) is is_near


def test_a_program_has_no_modules_of_its_packages_functions() -> None:
    """The check errand borrows two modules of the observer, whose functions import ten more."""
    files: dict[str, Path] = {}
    module._collect("hvlaunch.agent.errands.check", files, set())
    observer = {name.rpartition(".")[2] for name in files if ".observer." in name}
    assert observer == {"__init__", "versions", "nvml"}


def test_a_cause_cannot_control_a_terminal() -> None:
    errands = HostErrands("a", lambda *_: None)
    errand = errands.start("observer", {})
    errands.obey({"what": "done", "id": 1}, b'{"reason":"raised","cause":"\\u001b[2J"}')
    with pytest.raises(ErrandFailed, match=r"\\x1b\[2J"):
        errand.result()


def test_an_errand_goes_on_over_another_connection(launch: Any) -> None:
    agent: AgentProcess = launch(reconnect=PATIENCE, lease=PATIENCE)
    scratch = agent.hello(session=KEY)["scratch"]
    rig = ErrandRig(agent)
    errand = start(rig, "echo")
    errand.write(b"before")
    assert rig.read(errand, 6) == b"before"
    process = process_of(rig)
    errand.write(b"|on its way")
    while not agent.seen:  # the echo, which the driver loses
        agent.receive(PATIENCE)
    for pipe in (agent.process.stdin, agent.process.stdout):
        assert pipe is not None
        pipe.close()
    agent.ended = True
    with closing(Again(scratch)) as driver:
        answer, _ = driver.resume([1, 1])
        assert answer["have"] == [1, 4]  # the program, the start, and two of data
        header, body = driver.until("errand")[-1]
        assert (header["what"], body) == ("data", b"|on its way")
        driver.send("errand", b"|after", what="data", id=1)
        assert driver.until("errand")[-1][1] == b"|after"
        driver.send("errand", what="end", id=1)
        assert driver.until("errand")[-1][0]["what"] == "done"
        assert has_ended(process)
        driver.send("bye")
        driver.until("bye")


def test_the_next_driver_finds_no_errands(launch: Any) -> None:
    agent: AgentProcess = launch(reconnect=PATIENCE, lease=PATIENCE)
    scratch = agent.hello(session=KEY)["scratch"]
    rig = ErrandRig(agent)
    errand = start(rig, "echo")
    errand.write(b"x")
    rig.read(errand, 1)
    process = process_of(rig)
    with closing(Again(scratch)) as driver:
        assert driver.resume([1, 0], epoch=2)[0]["have"] == [1, 0]
        wait_until(lambda: has_ended(process), "its end")
        driver.send("ping")
        assert [header["type"] for header, _ in driver.until("pong")] == ["pong"]
        driver.send("bye")
        driver.until("bye")


@pytest.mark.parametrize("victim", ["agent", "guardian", "driver"])
def test_an_errand_ends_with_agent_guardian_or_driver(rig: ErrandRig, victim: str) -> None:
    start(rig, "echo")
    process = process_of(rig)
    os.kill(process.pid, signal.SIGSTOP)  # it can't end by itself
    if victim == "driver":
        rig.agent.hang_up()
    else:
        (rig.agent.agent if victim == "agent" else rig.agent.guardian).kill()
    wait_until(lambda: has_ended(process), "its end")


def test_an_errand_ends_if_agent_and_guardian_are_killed_at_once(rig: ErrandRig) -> None:
    """The kernel alone can end the errand."""
    start(rig, "echo")
    process, inner = process_of(rig), rig.agent.agent
    rig.agent.guardian.suspend()
    inner.kill()
    rig.agent.guardian.kill()
    wait_until(lambda: has_ended(process), "its end")


def test_another_round_ends_an_errand_and_nothing_else_changes(rig: ErrandRig) -> None:
    agent = rig.agent
    errand = start(rig, "echo")
    process_of(rig)
    assert agent.run(["true"])[0]["code"] == 0
    agent.start(["true"], round_number=1)  # before which all descendants are killed
    agent.expect("exited", code=0, start=1)
    assert rig.failure(errand)[0] == "killed"
    assert agent.bye() == ({"type": "bye", "left": 0, "pids": []}, 0)
