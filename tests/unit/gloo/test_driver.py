"""The driver's loop with played agents, on a clock moved by the test."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from hvlaunch.console.printer import Printer
from hvlaunch.driver.job_record import JobRecord
from hvlaunch.driver.links.agent_channel import CommandConnection
from hvlaunch.driver.links.links import patience_alone
from hvlaunch.driver.loop import Driver, Item, Watcher
from hvlaunch.driver.program import Keys
from hvlaunch.driver.turn import Arrival, Turn
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import replay
from hvlaunch.engine.lifecycle import Phase
from hvlaunch.errors import ConnectFailed
from hvlaunch.job import ElasticOptions, Host, JobResult, JobSpec
from hvlaunch.watch.journal import ReplayJournal, entries
from tests.testhosts.places import wait_until
from tests.unit.gloo.played import PlayedAgent

LEASE = 30.0
KEYS = Keys.new()
PULSE = 5.0
PATIENCE = 60.0


class Events:
    """The driver's queue, with a list of every entry so far."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._queue: SimpleQueue[Item] = SimpleQueue()
        self.get = self._queue.get
        self.get_nowait = self._queue.get_nowait

    def put(self, item: Item) -> None:
        self.items.append(item)
        self._queue.put(item)

    @property
    def seen(self) -> list[Any]:
        return [item.event if isinstance(item, Arrival) else item for item in self.items]

    def of(self, *kinds: type) -> list[Any]:
        return [event for event in self.seen if isinstance(event, kinds)]


class Rig:
    """A job of one worker on each of the hosts `a` and `b`."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.agents = {"a": PlayedAgent("10.0.0.1"), "b": PlayedAgent("10.0.0.2")}
        hosts = tuple(Host(name, slots=1) for name in self.agents)
        self.spec = JobSpec(command=("train",), hosts=hosts, cwd="/", lease=LEASE)
        self.watchers: list[Watcher] = []
        self.record: JobRecord | None = None
        self.was_asked = False
        """True if the rendezvous has had a client."""
        self.rendezvous: Any = None
        """Further parts of the rendezvous."""
        self.events = Events()
        self.stderr = BytesIO()
        self._printer = Printer(BytesIO(), self.stderr)
        self._results: list[JobResult] = []
        self.connect: Callable[[Host], Any] = lambda host: CommandConnection(self.agents[host.name])

    def begin(self) -> None:
        rendezvous: Any = SimpleNamespace(
            port=4711, expect=lambda _: None, listen_at=lambda _: None, was_asked=self.was_asked
        )
        rendezvous.subscribe = lambda *_, **__: None
        rendezvous.open_to_horovod = getattr(self.rendezvous, "open_to_horovod", None)
        self.driver = Driver(
            self.spec,
            self.events,  # type: ignore[arg-type]
            self._printer,
            rendezvous,
            KEYS,
            self.connect,
            stdin=-1,
            watchers=self.watchers,
            record=self.record,
            clock=lambda: self.now,
        )
        self._thread = threading.Thread(target=lambda: self._results.append(self.driver.run()))
        self._thread.start()

    def started(self) -> "Rig":
        """Begin, and wait until both workers run."""
        self.begin()
        wait_until(lambda: len(self.events.of(on.WorkerStarted)) == len(self.spec.hosts), "the workers")
        return self

    def pulse(self, *alive: str) -> None:
        """Move the clock to the next pings, and wait for the answers of `alive`."""
        pings = {name: self.agents[name].got["ping"] for name in alive}
        self.now += PULSE
        self.events.put(on.Tick())

        def answered(name: str) -> bool:
            heard = self.driver._links[name].last_heard
            return self.agents[name].got["ping"] > pings[name] and heard == self.now

        wait_until(lambda: all(map(answered, alive)), "pings and their answers")

    def silence(self, name: str) -> None:
        """Let the host be silent for the lease and a second; the others answer."""
        self.agents[name].is_silent = True
        others = self.agents.keys() - {name}
        for _ in range(int(LEASE / PULSE) + 2):
            self.pulse(*others)
        wait_until(self.agents[name].closed.is_set, f"the end of the connection to {name}")

    def end(self) -> JobResult:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the driver does not end"
        self._printer.close()
        return self._results[0]

    def give_up(self) -> None:
        """End the threads, also of a failed test."""
        for agent in self.agents.values():
            agent.close()
        self._thread.join(PATIENCE)
        self._printer.close()


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.give_up()


def test_a_job_that_goes_well(rig: Rig) -> None:
    rig.started()
    for agent in rig.agents.values():
        agent.end_worker(0)
    result = rig.end()
    assert (result.exit_code, len(result.exits)) == (0, 2)
    assert all(agent.got["bye"] == 1 and agent.closed.is_set() for agent in rig.agents.values())


def test_a_silent_host_is_lost_once_and_its_connection_closed(rig: Rig) -> None:
    rig.started().silence("b")
    wait_until(lambda: rig.agents["a"].got["stop"], "the end of the other worker")
    result = rig.end()
    (gone,) = rig.events.of(on.HostGone, on.HostFailed)
    assert gone.host == "b"
    assert result.exit_code == 69
    assert str(result.error).startswith("host b: lost: silent for 30 s (--lease); try: ping b")
    assert rig.agents["b"].got["bye"] == 0


def test_lost_host_is_posted_once_while_others_end(rig: Rig) -> None:
    rig.started()
    rig.agents["a"].unanswered.add("stop")  # its worker takes its time
    rig.silence("b")
    pings = rig.agents["b"].got["ping"]
    for _ in range(3):
        rig.pulse("a")
    assert [gone.host for gone in rig.events.of(on.HostGone)] == ["b"]
    assert rig.agents["b"].got["ping"] == pings
    rig.agents["a"].end_worker(0)
    assert rig.end().exit_code == 69


def test_frames_of_a_lost_host_change_nothing(rig: Rig) -> None:
    rig.started()
    lost = rig.agents["b"]
    lost.last = lambda: lost.end_worker(0, 3)
    rig.silence("b")
    result = rig.end()
    assert result.exit_code == 69
    assert [end.host for end in result.exits if end.code is not None] == []
    assert [event.host for event in rig.events.of(on.WorkerExited)] == ["a"]


def test_stopped_driver_gives_no_host_up(rig: Rig) -> None:
    rig.started()
    for agent in rig.agents.values():
        agent.is_silent = True
    rig.now += 10 * LEASE
    before = rig.agents["b"].got["ping"]
    rig.events.put(on.Tick())
    wait_until(lambda: rig.agents["b"].got["ping"] > before, "a ping")
    for agent in rig.agents.values():
        agent.is_silent = False
        agent.say({"type": "pong", "at": 1.0})
    rig.pulse("a", "b")
    assert rig.events.of(on.HostGone) == []
    for agent in rig.agents.values():
        agent.end_worker(0)
    assert rig.end().exit_code == 0


def test_hosts_are_not_late_where_the_driver_was_stopped(rig: Rig) -> None:
    """The start timeout is over before the driver can read that the hosts are ready."""
    may_go_on = threading.Event()
    connect = rig.connect

    def connect_later(host: Host) -> Any:
        assert may_go_on.wait(PATIENCE)
        return connect(host)

    rig.connect = connect_later
    seen: list[on.Event] = []
    rig.watchers = [lambda event, _actions, _at: seen.append(event)]
    rig.begin()
    wait_until(lambda: on.Began() in seen, "the beginning")
    rig.now += rig.spec.start_timeout + 10.0
    rig.events.put(on.Tick())
    wait_until(
        lambda: any(isinstance(one, on.DriverStopped) for one in seen),
        "that the driver sees that it was stopped",
    )
    may_go_on.set()
    wait_until(lambda: len(rig.events.of(on.WorkerStarted)) == len(rig.agents), "the workers")
    for agent in rig.agents.values():
        agent.end_worker(0)
    assert rig.end().exit_code == 0


@pytest.mark.parametrize("elastic", [None, ElasticOptions(min_np=2, worker_timeout=8 * PULSE)])
def test_engine_hears_of_quiet_hosts(rig: Rig, elastic: ElasticOptions | None) -> None:
    rig.spec = replace(rig.spec, elastic=elastic)
    rig.started()
    rig.pulse("a", "b")
    rig.agents["b"].is_silent = True
    rig.pulse("a")

    def of_b() -> list[on.Event]:
        """On a busy machine host a may be late too."""
        return [one for one in rig.events.of(on.HostQuiet, on.HostAnswers, on.HostGone) if one.host == "b"]

    while not of_b():  # its last answer may have been on the way
        rig.pulse("a")
    assert of_b() == [on.HostQuiet("b")]
    pings = [agent.got for agent in rig.agents.values()]
    wait_until(lambda: pings[0]["ping"] == pings[1]["ping"], "that b has all pings that it does not answer")
    rig.agents["b"].is_silent = False
    for _ in range(2):
        rig.pulse("a", "b")
    heard = [on.HostQuiet("b"), on.HostAnswers("b")]
    wait_until(lambda: of_b() == heard, "that b answers")
    for agent in rig.agents.values():
        agent.end_worker(0)
    assert rig.end().exit_code == 0


def test_a_connection_that_fails_gives_its_cause(rig: Rig) -> None:
    def connect(host: Host) -> Any:
        if host.name == "b":
            raise ConnectFailed("connection refused", host="b", hint="ssh b")
        return CommandConnection(rig.agents[host.name])

    rig.connect = connect
    rig.begin()
    result = rig.end()
    assert result.exit_code == 69
    assert str(result.error) == "host b: connection refused; try: ssh b"
    assert rig.agents["a"].got["start"] == 0
    assert rig.agents["a"].closed.is_set()


def test_connection_without_an_agent_quotes_the_host(rig: Rig) -> None:
    rig.agents["b"].refusal = (1, b"This account is currently not available.\n")
    rig.begin()
    result = rig.end()
    assert result.exit_code == 69
    assert "host b: its agent did not start (status 1); the host printed: This account" in str(result.error)


def test_a_journal_is_written_ahead_replays_and_has_no_key(rig: Rig, tmp_path: Path) -> None:
    journal = ReplayJournal(tmp_path / "journal", pytest.fail)
    journal.begin(rig.spec, "j", 4711)
    started: list[int] = []

    def see(event: on.Event, actions: Sequence[do.Action], now: float) -> None:
        journal.watch(event, actions, now)
        if any(isinstance(action, do.Start) for action in actions):
            started.append(sum(len(agent.slots) for agent in rig.agents.values()))

    rig.watchers = [see]
    rig.started()
    for agent in rig.agents.values():
        agent.end_worker(0)
    assert rig.end().exit_code == 0
    assert started[0] == 0
    found = list(entries(tmp_path / "journal"))
    assert replay(found).phase is Phase.DONE
    text = json.dumps(found)
    assert KEYS.token not in text
    assert KEYS.probe_key not in text
    assert KEYS.beacons not in text


def test_agents_hear_when_no_successor_is_possible(rig: Rig, tmp_path: Path) -> None:
    rig.spec = replace(rig.spec, detach="at start", reconnect_timeout=LEASE)
    rig.record = JobRecord(tmp_path, lambda _: None)
    rig.started()
    rig.pulse("a", "b")
    assert rig.agents["a"].got["patience"] == 0
    rig.record.lose("the disk is full")
    rig.pulse("a", "b")
    assert rig.agents["a"].got["patience"] == rig.agents["b"].got["patience"] == 1
    for agent in rig.agents.values():
        agent.end_worker(0)
    assert rig.end().exit_code == 0


@pytest.mark.parametrize(
    ("detach", "reconnect", "patience"),
    [("never", 5.0, None), ("never", 30.0, None), ("at start", 30.0, 5.0), ("at start", 12.0, None)],
)
def test_patience_of_agents_without_a_possible_successor(detach, reconnect, patience) -> None:
    spec = replace(Rig().spec, detach=detach, reconnect_timeout=reconnect, lease=30.0)
    assert patience_alone(spec) == patience


def test_watchers_see_only_recorded_turns(rig: Rig, tmp_path: Path) -> None:
    """A successor would show the turns again."""

    class Noted(JobRecord):
        def write(self, turns: Sequence[Turn], hellos: Mapping[int, Mapping[str, Any]]) -> None:
            super().write(turns, hellos)
            written.extend(turn.arrival.event for turn in turns)

    def see(event: on.Event, _actions: Sequence[do.Action], now: float) -> None:
        told.append((event, event in written or isinstance(event, on.HostStage)))
        times.append(now)

    written: list[on.Event] = []
    told: list[tuple[on.Event, bool]] = []
    times: list[float] = []
    rig.record = Noted(tmp_path, pytest.fail)
    rig.watchers = [see]
    rig.started()
    for _ in range(5):
        rig.now += 0.001
        rig.events.put(on.HostNoise("a", "a line"))
        rig.events.put(on.HostStage("a", "connect"))
    wait_until(lambda: len(written) and on.HostNoise("a", "a line") in written, "the record")
    for agent in rig.agents.values():
        agent.end_worker(0)
    assert rig.end().exit_code == 0
    assert times == sorted(times)
    assert sum(isinstance(event, on.HostStage) for event, _ in told) >= 5
    assert not any(isinstance(event, on.HostStage) for event in written)
    assert [event for event, was_written in told if not was_written] == []
    assert any(isinstance(event, on.WorkerStarted) for event, _ in told)


def test_unrecorded_frames_are_not_acknowledged(rig: Rig, tmp_path: Path) -> None:
    class Stuck(JobRecord):
        def write(self, turns: Sequence[Turn], hellos: Mapping[int, Mapping[str, Any]]) -> None:
            if any(isinstance(turn.arrival.event, on.WorkerStarted) for turn in turns):
                may_write.wait(PATIENCE)
            super().write(turns, hellos)

    may_write = threading.Event()
    rig.record = Stuck(tmp_path, pytest.fail)
    rig.started()
    arrivals = [item for item in rig.events.items if isinstance(item, Arrival)]
    started = next(item for item in arrivals if isinstance(item.event, on.WorkerStarted))
    link: Any = started.source
    wait_until(lambda: started.frame + 1 in link.session.acked, "the line behind it is printed")
    assert link.session.acked.prefix == started.frame - 1
    may_write.set()
    wait_until(lambda: link.session.acked.prefix > started.frame, "it is in the journal")
    for agent in rig.agents.values():
        agent.end_worker(0)
    assert rig.end().exit_code == 0


@pytest.mark.parametrize("was_asked", [False, True])
def test_workers_that_never_met_are_reported_unless_a_client_used_the_rendezvous(
    was_asked: bool, rig: Rig
) -> None:
    rig.was_asked = was_asked
    rig.started()
    for agent in rig.agents.values():
        agent.say({"type": "alone", "round": 0, "slot": 0, "start": 0, "library": "torch"})
        agent.end_worker(0)
    assert rig.end().exit_code == 0
    assert (b"may have been 2 single jobs" in rig.stderr.getvalue()) is not was_asked


@pytest.mark.parametrize(
    ("hosts", "remote", "is_kept", "has_session"),
    [
        (1, None, False, False),  # a job on this machine alone, which ends with its driver
        (1, None, True, True),
        (2, None, False, True),
        (1, "10.0.0.1", False, True),
    ],
)
def test_agent_has_a_session_if_its_connection_may_be_lost(
    rig: Rig, tmp_path: Path, hosts: int, remote: str | None, is_kept: bool, has_session: bool
) -> None:
    rig.spec = replace(rig.spec, hosts=rig.spec.hosts[:hosts])
    rig.record = JobRecord(tmp_path, pytest.fail) if is_kept else None
    rig.started()
    connection = CommandConnection(PlayedAgent(""), lambda _: PlayedAgent(""))
    connection.remote_address = connection.local_address = remote
    hello = rig.driver._links._hello(Host("a"), 7, connection)
    assert (hello["session"] == KEYS.session(7)) is has_session
    assert (hello["session"] is None) is not has_session
