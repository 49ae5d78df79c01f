"""A successor's replay, and its first actions."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvlaunch.console.printer import Printer
from hvlaunch.driver.job_record import JOURNAL, JobRecord, Takeover, read_past
from hvlaunch.driver.links.agent_channel import AgentConnection
from hvlaunch.driver.loop import Driver
from hvlaunch.engine import events as on
from hvlaunch.job import Host
from tests.testhosts.places import wait_until
from tests.unit.gloo.test_driver import KEYS, Events, Rig

LATER = 1000.0


class Horovod:
    """A rendezvous that notes the rounds it was opened for."""

    def __init__(self) -> None:
        self.rounds: list[int] = []

    def open_to_horovod(self, sizes: Mapping[str, int], _addresses: set[str], number: int) -> None:
        assert sizes["global"] == 2
        self.rounds.append(number)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Path]:
    """Yield the journal of a job with running workers."""
    rig = Rig()
    rig.spec = replace(rig.spec, horovod=True)
    rig.rendezvous = Horovod()
    rig.record = JobRecord(tmp_path, pytest.fail)
    rig.started()
    wait_until(
        lambda: on.WorkerStarted in {type(turn.event) for turn in read_past(tmp_path / JOURNAL).turns},
        "turns",
    )
    assert rig.rendezvous.rounds == [0]
    yield tmp_path / JOURNAL
    for agent in rig.agents.values():
        agent.end_worker(0)
    rig.end()


def lost(_: Host) -> AgentConnection:
    raise AssertionError("nobody is to be reached")


def taken_over(journal: Path, rendezvous: Any, **options: Any) -> tuple[Driver, Takeover]:
    takeover = Takeover(read_past(journal), is_same_boot=True, shift=0.0)
    events: Any = Events()
    driver = Driver(
        takeover.past.begin.spec,
        events,
        Printer(BytesIO(), BytesIO()),
        rendezvous,
        KEYS,
        lost,
        stdin=-1,
        clock=takeover.clock,
        wall=takeover.wall,
        **options,
    )
    driver.take_over(takeover, lost)
    return driver, takeover


def stub(**others: Any) -> Any:
    return SimpleNamespace(port=4711, expect=lambda _: None, listen_at=lambda _: None, **others)


def test_replayed_turns_are_recorded_with_their_own_time(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = time.time()
    records: list[Mapping[str, Any]] = []
    monkeypatch.setattr(time, "time", lambda: before + LATER)
    _, takeover = taken_over(journal, stub(), write_event=records.append)
    assert {"job_started", "worker_started"} <= {record["type"] for record in records}
    latest = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(before + LATER / 2))
    assert all(record["time"] < latest for record in records)
    assert takeover.wall() == before + LATER


def test_workers_of_the_killed_drivers_last_start_may_meet(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    horovod = Horovod()
    driver, _ = taken_over(journal, stub(open_to_horovod=horovod.open_to_horovod))
    assert not horovod.rounds
    monkeypatch.setattr(driver._links, "take_up", lambda _epoch, _lost: None)
    assert driver._replay is not None
    driver._resume(driver._replay)
    assert horovod.rounds == [0]
