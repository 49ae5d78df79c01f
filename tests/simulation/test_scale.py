"""Many hosts: the engine's work grows with their number, not with its square."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine.engine import Engine
from hvlaunch.errors import HostLost
from hvlaunch.job import ElasticOptions, Host, JobResult, JobSpec
from tests.simulation.play import facts

FEW, MANY = 60, 480
SLOTS = 8
# As many times the hosts are 8 times the work; were any of it done for each pair of hosts, it would be 64.
MOST_TIMES = 24


class Job:
    """A job on `count` hosts, which do their part in lockstep, host by host or slot by slot."""

    def __init__(self, count: int, elastic: ElasticOptions | None = None) -> None:
        self.names = [f"h{number}" for number in range(count)]
        hosts = tuple(Host(name, slots=SLOTS) for name in self.names)
        spec = JobSpec(command=("train",), hosts=hosts, cwd="/", grace=5.0, elastic=elastic)
        self.engine = Engine(spec, 4711)
        self.actions: list[do.Action] = []

    def tell(self, event: on.Event) -> None:
        self.actions += self.engine.handle(event, 1.0)

    def take(self, kind: type[do.Action]) -> list[do.Action]:
        """Return the actions of this kind, and forget the others."""
        chosen = [action for action in self.actions if isinstance(action, kind)]
        self.actions.clear()
        return chosen

    def start(self) -> None:
        self.tell(on.Began())
        for number, name in enumerate(self.names, 1):
            self.tell(on.HostConnected(name))
            self.tell(on.HostReady(name, facts(number)))
            self.tell(on.RendezvousReached(name, "10.1.0.1"))
        for probe in self.take(do.Probe):
            assert isinstance(probe, do.Probe)
            for address in (*probe.addresses, None):
                self.tell(on.HostProbed(probe.host, probe.target, address, probe.agent))
        assert len(self.take(do.Start)) == len(self.names)

    def exits(self, code: int, signal: int | None = None) -> None:
        for slot in range(SLOTS):
            for name in self.names:
                self.tell(
                    on.WorkerExited(
                        host=name, round=0, slot=slot, code=None if signal else code, signal=signal, at=2.0
                    )
                )

    def ask(self, last_round: int) -> None:
        for slot in range(SLOTS):
            for name in self.names:
                self.tell(on.WorkerAsked(name, slot, 0, last_round, last_round))

    def closed(self) -> JobResult:
        assert len(self.take(do.Release)) == len(self.names)
        for name in self.names:
            self.tell(on.HostClosed(name))
        (finish,) = self.take(do.Finish)
        assert isinstance(finish, do.Finish)
        return finish.result


def all_end_well(job: Job) -> None:
    job.start()
    job.exits(0)
    assert len(job.closed().exits) == len(job.names) * SLOTS


def one_fails(job: Job) -> None:
    job.start()
    job.tell(on.WorkerExited(host=job.names[0], round=0, slot=0, code=7, signal=None, at=1.5))
    assert len(job.take(do.Stop)) == len(job.names)
    job.exits(0, signal=15)
    assert job.closed().exit_code == 7


def hosts_are_lost(job: Job) -> None:
    """Lose half of the hosts, one by one, while the other workers end."""
    job.start()
    gone = job.names[::2]
    job.names = job.names[1::2]
    for name in gone:
        job.tell(on.HostGone(name, HostLost("lost", host=name).problem))
    job.actions.clear()
    job.exits(0, signal=15)
    assert job.closed().exit_code == 69


def elastic(job: Job) -> None:
    """All workers ask, train, lose a host, ask again, and end."""
    job.start()
    job.ask(-1)
    assert len(job.take(do.Assign)) == len(job.names) * SLOTS
    for commit in range(3):
        for name in job.names:
            for slot in range(SLOTS):
                job.tell(on.WorkerBeat(name, slot, 0, commit))
    job.tell(on.HostGone(job.names.pop(), HostLost("lost", host="").problem))
    job.ask(0)
    assert len(job.take(do.Assign)) == len(job.names) * SLOTS
    job.exits(0)
    job.closed()


def lines(course: Callable[[Job], None], count: int) -> int:
    """Count executed lines of Python: like time, but the same on every machine."""
    job = Job(count, ElasticOptions(min_np=1) if course is elastic else None)
    run = 0

    def trace(_frame: FrameType, _event: str, _argument: object) -> Any:
        nonlocal run
        run += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        course(job)
    finally:
        sys.settrace(before)
    return run


@pytest.mark.parametrize("course", [all_end_well, one_fails, hosts_are_lost])
def test_work_of_a_static_job_grows_linearly_with_its_hosts(course: Callable[[Job], None]) -> None:
    assert lines(course, MANY) < MOST_TIMES * lines(course, FEW)


def test_work_of_an_elastic_job_grows_linearly_with_its_hosts() -> None:
    assert lines(elastic, MANY // 5) < MOST_TIMES * lines(elastic, FEW // 5)
