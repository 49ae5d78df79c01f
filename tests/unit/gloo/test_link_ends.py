"""A link: ends of agents, failed starts, and their causes."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from hvlaunch.driver.links.agent_channel import Expected
from hvlaunch.driver.program import NO_PYTHON
from hvlaunch.engine import events as on
from hvlaunch.errors import ConnectFailed
from hvlaunch.job import Host
from tests.testhosts.places import wait_until
from tests.unit.gloo.link_rig import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.link.close()


def test_a_clean_end(rig: Rig) -> None:
    rig.ready()
    rig.link.send({"type": "bye"})
    rig.channel.frame({"type": "bye", "left": 0, "pids": []})
    rig.channel.end()
    assert rig.event() == on.HostClosed("a", 0)


def test_acknowledgement_stands_before_the_bye(rig: Rig) -> None:
    rig.ready()
    rig.settle()
    rig.link.send({"type": "bye"})
    assert rig.sent(3)[1:] == [{"type": "have", "frames": [2, 0]}, {"type": "bye"}]


def parted(rig: Rig) -> None:
    """The agent has sent bye, and output of a worker is not printed yet."""
    rig.ready()
    rig.ranks[0, 1] = 0
    rig.start(0, 1)
    rig.channel.frame({"type": "output", "stream": "stdout", "round": 0, "slot": 0, "start": 1}, b"line")
    rig.settle()
    rig.link.send({"type": "bye"})
    rig.channel.frame({"type": "bye", "left": 0, "pids": []})
    wait_until(lambda: rig.link.has_parted, "its bye")


def test_agent_after_bye_gets_its_acknowledgement_at_once(rig: Rig) -> None:
    parted(rig)
    rig.sink.dones[0](4)
    assert rig.sent(4)[2:] == [{"type": "bye"}, {"type": "have", "frames": [4, 0]}]


def test_agent_does_not_wait_for_ever_for_a_reader_of_its_output(rig: Rig) -> None:
    parted(rig)
    rig.now += 4.0
    rig.link.let_go()
    rig.link.session.ping()
    rig.now += 1.0
    rig.link.let_go()
    kinds = ["bye", "ping", "leave"]
    wait_until(lambda: [each["type"] for each in rig.sent() if each["type"] in kinds] == kinds, "it may go")


def test_an_end_with_processes_that_cannot_be_killed(rig: Rig) -> None:
    rig.ready()
    rig.link.send({"type": "bye"})
    rig.channel.frame({"type": "bye", "left": 2, "pids": [7, 8]})
    rig.channel.end()
    assert rig.event() == on.HostClosed("a", 2, (7, 8))
    assert rig.link.has_parted


def test_agent_that_says_bye_without_an_order_is_lost(rig: Rig) -> None:
    """Its workers would otherwise count as ended well."""
    rig.ready()
    rig.channel.frame({"type": "bye", "left": 0, "pids": []})
    event = rig.event()
    assert isinstance(event, on.HostGone)
    assert "bye that was not asked for" in str(event.problem)


def test_no_way_to_the_host() -> None:
    def refuse(_host: Host) -> Any:
        raise ConnectFailed("connection refused", host="a")

    event = Rig(refuse).event()
    assert isinstance(event, on.HostFailed)
    assert event.problem.kind == "ConnectFailed"


def test_defect_in_the_link_is_an_event() -> None:
    def fail(_host: Host) -> Any:
        raise RuntimeError("oops")

    event = Rig(fail).event()
    assert isinstance(event, on.HostFailed)
    assert "internal error: RuntimeError: oops" in str(event.problem)


def test_no_python(rig: Rig) -> None:
    rig.event()
    rig.channel.end(127, f"{NO_PYTHON} /opt/py/bin/python, python3\n".encode())
    event = rig.event()
    assert event.problem.kind == "NoPython"
    assert "tried /opt/py/bin/python, python3" in str(event.problem)


def test_no_python_without_a_list(rig: Rig) -> None:
    rig.event()
    rig.channel.end(127, NO_PYTHON.encode())
    assert rig.event().problem.kind == "NoPython"


def test_an_agent_whose_program_did_not_arrive_in_time(rig: Rig) -> None:
    rig.event()
    rig.channel.end(128 + signal.SIGALRM)
    assert "did not arrive within the lease; try: a longer --lease" in str(rig.event().problem)


def test_an_agent_that_does_not_start_is_quoted(rig: Rig) -> None:
    rig.event()
    rig.channel.say(b"This account is currently not available.\n")
    rig.channel.end(1)
    event = rig.event()
    assert isinstance(event, on.HostFailed)
    assert event.problem.kind == "AgentFailed"
    assert "status 1" in str(event.problem)
    assert "This account is currently not available." in str(event.problem)


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("hvlaunch agent: no place for temporary files (/tmp: no space left on device)", "try: df /tmp"),
        ("/bin/sh: 1: Cannot fork", "try: ulimit -a"),
        ("bash: fork: retry: Resource temporarily unavailable", "try: ulimit -a"),
        ("This account is currently not available.", "try: ssh a python3 --version"),
    ],
)
def test_an_agent_that_does_not_start_has_the_hint_of_its_cause(rig: Rig, said: str, hint: str) -> None:
    rig.event()
    rig.channel.end(1, f"{said}\n".encode())
    event = rig.event()
    assert event.problem.kind == "AgentFailed"
    assert hint in str(event.problem)


def test_a_killed_agent_is_named(rig: Rig) -> None:
    rig.ready()
    rig.channel.end(137, b"hvlaunch agent: killed by SIGKILL\n")
    event = rig.event()
    assert isinstance(event, on.HostGone)
    assert event.problem.kind == "HostLost"
    assert "hvlaunch agent: killed by SIGKILL" in str(event.problem)


def test_a_host_without_free_ports_is_named() -> None:
    rig = Rig(ports=[1, 2])
    rig.event()
    rig.channel.greet(master_port=None, beacon_port=None)
    event = rig.event()
    assert isinstance(event, on.HostFailed)
    assert event.problem.kind == "NoFreePort"
    assert str(event.problem).endswith(
        "too few ports of --worker-port-range are free; try: a wider --worker-port-range"
    )


def test_an_agent_that_parts_says_why(rig: Rig) -> None:
    rig.ready()
    rig.channel.frame({"type": "parting", "cause": "its guardian was killed"})
    rig.channel.end(1)
    parting, gone = rig.event(), rig.event()
    assert isinstance(parting, on.HostParting)
    assert isinstance(gone, on.HostGone)
    assert "its guardian was killed" in str(parting.problem)
    assert "its guardian was killed" in str(gone.problem)


def test_an_agents_own_error_is_one_line_and_its_traceback_apart(rig: Rig) -> None:
    rig.ready()
    rig.channel.frame(
        {"type": "fault", "cause": "RuntimeError: can't start new thread"}, b"Traceback\n  here\n"
    )
    rig.channel.end(1)
    parting, gone = rig.event(), rig.event()
    assert isinstance(parting, on.HostParting)
    assert isinstance(gone, on.HostGone)
    assert parting.traceback == "Traceback\n  here"
    for error in (parting.problem, gone.problem):
        assert "RuntimeError: can't start new thread; try: ulimit -a" in str(error)
        assert "\n" not in str(error)


def test_an_agent_that_parts_in_an_orderly_way_closes(rig: Rig) -> None:
    rig.ready()
    rig.channel.frame({"type": "parting", "cause": "got SIGTERM"})
    rig.channel.frame({"type": "bye", "left": 0, "pids": []})
    rig.channel.end(0)
    event = rig.event()
    assert isinstance(event, on.HostParting)
    assert "got SIGTERM" in str(event.problem)
    assert rig.event() == on.HostClosed("a", 0)


def test_a_broken_connection(rig: Rig) -> None:
    rig.ready()
    rig.channel.break_off(OSError("Connection reset by peer"))
    event = rig.event()
    assert isinstance(event, on.HostGone)
    assert "Connection reset by peer" in str(event.problem)


def test_garbage_in_the_channel(rig: Rig) -> None:
    rig.ready()
    rig.channel.say(*rig.channel.writer.cut(b"\xff" * 100))
    event = rig.event()
    assert isinstance(event, on.HostGone)
    assert "a frame of" in str(event.problem)


def test_another_protocol(rig: Rig) -> None:
    rig.event()
    rig.channel.greet(protocol=99)
    event = rig.event()
    assert "speaks protocol 99" in str(event.problem)


def test_close_unblocks_everything(rig: Rig) -> None:
    rig.ready()
    rig.link.close()
    assert isinstance(rig.event(), on.HostGone)


def test_an_agent_that_a_launcher_started_may_end_unasked():
    expected = Expected(lambda _slot, _start: None, window=1)
    expected.may_end()
    expected.check({"type": "bye", "left": 0, "pids": []}, b"")
