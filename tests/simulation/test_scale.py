"""Many hosts: what the engine does grows with their number, and not with its square."""

import time
from collections.abc import Callable

import pytest

from hvlaunch.errors import HostLost
from hvlaunch.gloo import actions as do
from hvlaunch.gloo import events as on
from hvlaunch.gloo.engine import Engine
from hvlaunch.job import ElasticOptions, Host, JobResult, JobSpec

FEW, MANY = 125, 1000
SLOTS = 8
# As many times the hosts are 8 times the work; were any of it done for each pair of hosts, it would be 64.
MOST_TIMES = 24


class Job:
    """A job on `count` hosts, which all do their part at once, host after host or slot after slot."""

    def __init__(self, count: int, elastic: ElasticOptions | None = None) -> None:
        self.names = [f"h{number}" for number in range(count)]
        hosts = tuple(Host(name, slots=SLOTS) for name in self.names)
        spec = JobSpec(command=("train",), hosts=hosts, cwd="/", grace=5.0, elastic=elastic)
        self.engine = Engine(spec, 4711)
        self.actions: list[do.Action] = []

    def tell(self, event: on.Event) -> None:
        self.actions += self.engine.handle(event, 1.0)

    def take(self, kind: type[do.Action]) -> list[do.Action]:
        """The actions of this kind; the others are forgotten."""
        found = [action for action in self.actions if isinstance(action, kind)]
        self.actions.clear()
        return found

    def start(self) -> None:
        self.tell(on.Began())
        for number, name in enumerate(self.names):
            address = f"10.1.{number >> 8}.{number & 255}"
            facts = on.HostFacts(
                addresses={"lo": ["127.0.0.1"], "eth0": [address]},
                cpus=4,
                gpus=None,
                scratch="/tmp/x",
                beacon_port=1,
                master_port=2,
                peer_address=address,
            )
            self.tell(on.HostConnected(name))
            self.tell(on.HostReady(name, facts))
            self.tell(on.RendezvousReached(name, "10.0.0.1"))
        for probe in self.take(do.Probe):
            assert isinstance(probe, do.Probe)
            for address in (*probe.addresses, None):
                self.tell(on.HostProbed(probe.host, probe.target, address))
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
    """Half of them, one after the other, while the others' workers end."""
    job.start()
    gone = job.names[::2]
    job.names = job.names[1::2]
    for name in gone:
        job.tell(on.HostGone(name, HostLost("lost", host=name)))
    job.actions.clear()
    job.exits(0, signal=15)
    assert job.closed().exit_code == 69


def elastic(job: Job) -> None:
    """All ask, train, lose a host, ask again, and end."""
    job.start()
    job.ask(-1)
    assert len(job.take(do.Place)) == len(job.names) * SLOTS
    for commit in range(3):
        for name in job.names:
            for slot in range(SLOTS):
                job.tell(on.WorkerBeat(name, slot, 0, commit))
    job.tell(on.HostGone(job.names.pop(), HostLost("lost", host="")))
    job.ask(0)
    assert len(job.take(do.Place)) == len(job.names) * SLOTS
    job.exits(0)
    job.closed()


def seconds(course: Callable[[Job], None], count: int) -> float:
    """CPU of the least of three."""
    found = []
    for _ in range(3):
        job = Job(count, ElasticOptions(min_np=1) if course is elastic else None)
        started = time.thread_time()
        course(job)
        found.append(time.thread_time() - started)
    return min(found)


@pytest.mark.parametrize("course", [all_end_well, one_fails, hosts_are_lost])
def test_eight_times_the_hosts_are_not_sixty_four_times_the_work(course: Callable[[Job], None]) -> None:
    assert seconds(course, MANY) < MOST_TIMES * seconds(course, FEW)


def test_neither_are_they_in_an_elastic_job() -> None:
    assert seconds(elastic, MANY // 5) < MOST_TIMES * seconds(elastic, FEW // 5)
