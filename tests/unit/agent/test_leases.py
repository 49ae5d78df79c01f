"""Leases on a real agent: who keeps a lock, and what gives it back."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvlaunch.agent.errands import leases
from hvlaunch.agent.errands.leases import STATE
from hvlaunch.agent.errands.observer import nvml
from hvlaunch.agent.leases import TICKET, AgentLeases, is_locked, open_directory, open_lock
from hvlaunch.agent.quick import dumps
from hvlaunch.driver.links.errands import Limits
from tests.testhosts.places import wait_until
from tests.unit.agent.errand_rig import ErrandRig
from tests.unit.agent.harness import AgentProcess, Hunt
from tests.unit.agent.test_gpus import library
from tests.unit.agent.test_rejoin import KEY, Again

NOTE = dumps({"job": "mine", "since": 1.5})


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "leases")


@pytest.fixture
def mine(place: str) -> Iterator[AgentLeases]:
    yield AgentLeases()


def hold(agent: AgentProcess, place: str, *names: str) -> list[str]:
    """Have the agent hold exactly these; return those that it holds."""
    agent.send("hold", directory=place, names=list(names), note=NOTE)
    answer: list[str] = agent.expect("held")[0]["names"]
    return answer


def order(place: str, *names: str, note: str = NOTE) -> dict[str, Any]:
    return {"directory": place, "names": list(names), "note": note}


def is_held(place: str, name: str) -> bool:
    folder = open_directory(place)
    fd = open_lock(folder, name)
    try:
        return is_locked(fd)
    finally:
        os.close(fd)
        os.close(folder)


def look(place: str, slots: int = 4) -> dict[str, Any]:
    state: dict[str, Any] = leases._LeaseLook(place, slots).state()
    assert STATE(state)
    return state


def test_an_agent_holds_what_it_was_told_and_another_gets_all_or_nothing(
    agent: AgentProcess, launch: Any, place: str
) -> None:
    assert hold(agent, place, "slot-0", "slot-1") == ["slot-0", "slot-1"]
    other = launch()
    other.hello()
    assert hold(other, place, "slot-2", "slot-1") == []
    assert not is_held(place, "slot-2")
    assert hold(other, place, "slot-2") == ["slot-2"]
    # What it has had before stays if something new can't be had.
    assert hold(other, place, "slot-2", "slot-3", "slot-0") == ["slot-2"]
    assert hold(agent, place, "slot-1") == ["slot-1"]
    assert hold(other, place, "slot-2", "slot-3", "slot-0") == ["slot-0", "slot-2", "slot-3"]


@pytest.mark.parametrize("victim", ["agent", "guardian", "driver"])
def test_a_lease_ends_with_the_agent_and_no_orphan_keeps_it(
    agent: AgentProcess, place: str, hunt: Hunt, victim: str
) -> None:
    hold(agent, place, "slot-0")
    agent.start(["/bin/sh", "-c", "setsid sleep $0 & wait", hunt.mark])
    agent.expect("started")
    # The worker's shell, and a program outside its session.
    hunt.wait_for("sh", "sleep")
    files = [str(fd.readlink()) for pid in hunt.pids() for fd in Path(f"/proc/{pid}/fd").iterdir()]
    assert not [path for path in files if place in path]
    if victim == "driver":
        agent.hang_up()
    else:
        getattr(agent, victim).kill()
    wait_until(lambda: not is_held(place, "slot-0"), "the end of the lease")
    wait_until(lambda: not hunt.pids(), "the end of the workers")


def test_a_lease_outlives_a_connection_and_its_driver(launch: Any, place: str) -> None:
    agent = launch(lease=60.0, reconnect=60.0)
    hello = agent.hello(session=KEY)
    assert hold(agent, place, "slot-0") == ["slot-0"]
    agent.hang_up()
    successor = Again(hello["scratch"])
    assert successor.resume([1, 0], epoch=2)[0]["type"] == "resumed"
    assert is_held(place, "slot-0")
    # The successor needs no more leases, and gives one back.
    successor.send("hold", directory=place, names=[], note=NOTE)
    wait_until(lambda: not is_held(place, "slot-0"), "the end of the lease")
    successor.send("bye")
    successor.until("bye")
    successor.close()


def test_a_host_shows_holders_tickets_and_nothing_else(place: str, mine: AgentLeases) -> None:
    assert [unit["is_free"] for unit in look(place)["units"]] == [True] * 4
    assert list(Path(place).iterdir()) == []  # to look makes no file
    assert mine.hold(order(place, "slot-1"))["cause"] is None
    mine.hold(order(place, "slot-1", TICKET + "j1", note=dumps({"job": "j1", "since": time.time()})))
    state = look(place)
    assert [unit["is_free"] for unit in state["units"]] == [True, False, True, True]
    holder = state["units"][1]["holder"]
    assert (holder["user"], holder["job"], holder["since"]) == (
        "root" if not os.geteuid() else holder["user"],
        "mine",
        1.5,
    )
    assert holder["pid"] in (os.getpid(), None)
    assert [(ticket["job"], ticket["is_mine"]) for ticket in state["tickets"]] == [("j1", True)]
    mine.hold(order(place))
    assert look(place)["tickets"] == []
    assert all(unit["is_free"] for unit in look(place)["units"])


def test_a_ticket_is_at_most_an_hour_older_than_its_file(place: str, mine: AgentLeases) -> None:
    mine.hold(order(place, TICKET + "old", note=dumps({"job": "old", "since": 1.0})))
    [ticket] = look(place)["tickets"]
    assert time.time() - 3700 < ticket["since"] < time.time() - 3500
    # Clocks of hosts differ, and the order must be the same on all of them.
    mine.hold(order(place, TICKET + "new", note=dumps({"job": "new", "since": 4e9})))
    assert [ticket["since"] for ticket in look(place)["tickets"]] == [4e9]


def test_a_killed_agents_ticket_has_no_claim_and_is_removed(place: str, mine: AgentLeases) -> None:
    mine.hold(order(place, "slot-0"))
    path = Path(place, TICKET + "dead")
    path.write_text(dumps({"job": "dead", "since": time.time()}))
    assert look(place)["tickets"] == []
    assert path.exists()  # perhaps its agent is just about to lock it
    os.utime(path, (1, 1))
    look(place)
    assert not path.exists()


def test_a_watching_errand_tells_changes_alone(agent: AgentProcess, place: str, mine: AgentLeases) -> None:
    rig = ErrandRig(agent)
    arguments = {"directory": place, "slots": 2, "watch": True, "every": None, "keep": None}
    data = bytearray()
    errand = rig.errands.start("leases", arguments, Limits(None, None, None), on_data=data.extend)
    rig.until(lambda: data.count(b"\n") == 1, "the first state")
    begin = time.monotonic()
    mine.hold(order(place, "slot-1"))
    rig.until(lambda: data.count(b"\n") == 2, "a change")
    assert time.monotonic() - begin < 5.0
    errand.close_input()
    assert rig.result(errand) == {}
    assert data.count(b"\n") == 2


def test_gpus_with_processes_or_memory_in_use_are_not_free(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = library(tmp_path)
    monkeypatch.setattr(nvml, "_LIBRARY", path)
    monkeypatch.setattr(nvml.Library.__init__, "__defaults__", (path,))
    state = leases._LeaseLook(place, None).state()
    assert state["cause"] is None
    assert [unit["name"] for unit in state["units"]] == ["GPU-0", "GPU-1"]
    assert not any(unit["is_free"] for unit in state["units"])
    assert [process["pid"] for process in state["units"][0]["processes"]] == [100, 200]
    for unit in state["units"]:
        unit["processes"] = []
    assert STATE(state)


def test_a_holder_notes_when_its_gpus_were_at_work(
    launch: Any, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the two GPUs of the stand-in the first is always at work, the other never."""
    path = library(tmp_path)
    agent = launch(env={"LD_LIBRARY_PATH": str(tmp_path), "PATH": os.environ["PATH"]})
    agent.hello()
    assert hold(agent, place, "GPU-0", "GPU-1") == ["GPU-0", "GPU-1"]
    monkeypatch.setattr(nvml.Library.__init__, "__defaults__", (path,))

    def busy() -> list[float | None]:
        units = leases._LeaseLook(place, None).state()["units"]
        return [unit["holder"]["busy_at"] for unit in units]

    assert busy() == [None, None]
    rig = ErrandRig(agent)
    arguments = {"directory": place, "slots": None, "watch": True, "every": None, "keep": 0.05}
    lines: list[bytes] = []
    errand = rig.errands.start("leases", arguments, Limits(None, None, None), on_data=lines.append)
    errand.close_input()
    first = rig.until(lambda: all(busy()) and busy(), "the first notes")
    # A note that is being written says nothing for a moment.
    rig.until(lambda: (busy()[0] or 0.0) > first[0] + 0.2, "a later time of the first GPU")
    assert rig.until(lambda: busy()[1], "a note that is whole") == first[1]
    # The first GPU works all the time: the job's GPUs are not idle.
    told = json.loads(b"".join(lines).splitlines()[-1])
    assert leases.IDLE(told)
    assert told["idle"] < 0.1
    assert look(place, 1)["cause"] is None
    note = Path(place, f"GPU-0.{os.geteuid()}")
    monkeypatch.setattr(leases, "_FRESH", -100.0)
    assert busy() == [None, None]  # an old look says nothing
    assert '"job": "mine"' in note.read_text()


def test_a_host_without_gpus_says_so(place: str) -> None:
    state = leases._LeaseLook(place, None).state()
    assert state["units"] == []
    assert state["cause"].startswith("no GPUs: libnvidia-ml.so.1")


def test_an_agents_answer_names_the_cause(tmp_path: Path) -> None:
    place = tmp_path / "plain"
    place.mkdir(mode=0o755)
    answer = AgentLeases().hold(order(str(place), "slot-0"))
    assert answer == {"names": [], "cause": f"{place}: its mode is 755 and must be 1777"}
    assert list(place.iterdir()) == []
