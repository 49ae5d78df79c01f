"""No progress, no loop: crash loops end at the third round, and slow but honest starts never do."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.hosts import HostState
from hvlaunch.engine.lifecycle import AT_WORK
from hvlaunch.engine.round import RoundState
from hvlaunch.errors import ConnectFailed
from tests.unit.gloo.elastic_history import arrive, elastic, wire
from tests.unit.gloo.history import History, lost

HOSTS = "ab"


class Loop:
    """An elastic job that needs both of its hosts, a worker on each."""

    def __init__(self, hosts: str = "a:1,b:1", *, late: str = "", **options: Any) -> None:
        self.job: History = elastic(hosts, **{"min_np": 2, "max_np": 2, "elastic_timeout": 1e6} | options)
        arrive(self.job, *(word[0] for word in hosts.split(",") if word[0] not in late))
        self.commit = -1

    @property
    def number(self) -> int:
        current = self.job.engine.round
        assert current is not None
        return current.number

    @property
    def goes_on(self) -> bool:
        return self.job.engine.phase in AT_WORK

    def asks(self, *hosts: str, cause: str | None = None) -> None:
        """Let these workers ask for a place, those that have one for the next."""
        current = self.job.engine.round
        for host in hosts:
            worker = next((one for one in self.job.engine.workers if one.host == host), None)
            last = -1 if worker is None or current is None or worker.round is None else current.number
            self.job.ask(host, 0, last, self.commit, cause)

    def await_round(self, *, asks: bool = False) -> None:
        """Let the engine wait until a round runs. With `asks` its workers ask for their places."""
        for _ in range(100):
            current = self.job.engine.round
            is_running = current is not None and current.state is RoundState.RUNNING
            # The first round runs before its workers ask, and is then formed anew.
            is_running = is_running and (not asks or bool(self.job.of(do.Assign)))
            if not self.goes_on or is_running:
                return
            workers = self.job.engine.workers
            idle = [
                worker.host for worker in workers if worker not in workers.waiting and not worker.is_ending
            ]
            if asks and idle:
                self.asks(*idle, cause="a peer is gone")
                continue
            for host in list(self.job.engine.pool):
                if host.state is HostState.CLOSING:
                    self.job.play(on.HostClosed(host.name))
                elif host.state is HostState.CONNECTING:
                    arrive(self.job, host.name)
            before = len(self.job.actions)
            wire(self.job)
            deadline = self.job.engine.deadline
            # A host that is excluded for good is waited for without end.
            if len(self.job.actions) == before and deadline is not None and deadline < math.inf:
                self.job.wait()
        raise AssertionError("no round begins")

    def live(self, seconds: float) -> None:
        """Let time pass; in-process workers beat."""
        end = self.job.now + seconds
        while self.job.now < end and self.goes_on:
            self.job.now = min(end, self.job.now + 5.0)
            for worker in list(self.job.engine.workers):
                if worker.beat_at is not None:
                    self.beat(worker.host)
            self.job.play(on.Tick())

    def beat(self, host: str) -> None:
        start = self.job.born(host, 0)[1]
        self.job.play(on.WorkerBeat(host, 0, start, self.commit, round=self.number))

    def commits(self) -> None:
        self.commit += 1
        for host in HOSTS:
            self.beat(host)

    def step(self, step: int) -> None:
        """Report a step, if it is news: the driver leaves the others out."""
        self.job.play(on.StepReached(self.number, step))

    def fails(self, host: str = "b", code: int | None = 1, signal: int | None = None, **how: Any) -> None:
        """End a worker, and then those that are stopped for it."""
        self.job.exit(host, 0, code, signal, **how)
        self.ends()

    def ends(self) -> None:
        """End the workers that are stopped."""
        for worker in list(self.job.engine.workers):
            if worker.is_ending:
                self.job.exit(worker.host, 0, None, 15)


def started_in_process(**options: Any) -> Loop:
    loop = Loop(**options)
    loop.asks(*HOSTS)
    return loop


def fails_at_once(loop: Loop) -> None:
    loop.live(1.0)
    loop.fails()


def crashes_at_once(loop: Loop) -> None:
    loop.live(5.0)
    loop.fails(code=None, signal=11)


def is_killed_by_the_kernel_while_it_loads(loop: Loop) -> None:
    loop.live(14.0)
    loop.fails(code=None, signal=9)


def finds_no_program(loop: Loop) -> None:
    number, start = loop.job.born("b", 0)
    loop.job.play(on.WorkerNotStarted("b", number, 0, 127, "no such command", start))
    loop.job.exit("a", 0, None, 15)


def loses_its_peers_at_once(loop: Loop) -> None:
    loop.live(3.0)
    loop.fails(code=1, look="consequence")
    if loop.number == loop.job.engine.round.number:  # type: ignore[union-attr]
        loop.job.exit("a", 0, 1, look="consequence")


def fails_at_the_same_step_after_an_hour(loop: Loop) -> None:
    # Only the first round has new steps: each of the others resumes from the checkpoint before the bad batch.
    if loop.number == 0:
        loop.step(0)
        loop.live(20.0)
        loop.fails()
        return
    loop.live(3600.0)
    loop.fails()


def hangs(loop: Loop) -> None:
    loop.live(70.0)
    loop.job.play(on.JobHangs(60.0, (1,), "rank 1 waits"))
    for host in HOSTS:
        loop.job.exit(host, 0, None, 15)


def in_process_without_a_commit(loop: Loop) -> None:
    loop.live(1200.0)
    loop.fails()
    if loop.goes_on:
        loop.asks("a", cause="a peer is gone")
        loop.asks("b")


def in_process_without_a_commit_in_time(loop: Loop) -> None:
    number = loop.number
    while loop.goes_on and not any(action.round == number for action in loop.job.of(do.Break)):
        loop.live(10.0)
    if loop.goes_on:
        loop.asks(*HOSTS, cause="broken")


def in_process_silence(loop: Loop) -> None:
    number = loop.number
    loop.beat("b")
    while loop.goes_on and not any(action.round == number for action in loop.job.of(do.Break)):
        loop.job.now += 5.0
        loop.beat("a")
        loop.job.play(on.Tick())
    loop.job.exit("b", 0, None, 9)
    if loop.goes_on:
        loop.asks("a", cause="broken")
        loop.asks("b")


def fresh() -> Loop:
    return Loop()


LOOPS: dict[str, tuple[Callable[[], Loop], Callable[[Loop], None], int]] = {
    "exit code at once": (fresh, fails_at_once, 3),
    "crash": (fresh, crashes_at_once, 3),
    "no memory": (fresh, is_killed_by_the_kernel_while_it_loads, 3),
    "no program": (fresh, finds_no_program, 3),
    "no peers": (fresh, loses_its_peers_at_once, 3),
    # The first round had new steps.
    "bad batch": (fresh, fails_at_the_same_step_after_an_hour, 4),
    "hang": (lambda: Loop(on_hang="restart"), hangs, 3),
    "in process, no commit": (started_in_process, in_process_without_a_commit, 3),
    "in process, no commit in time": (
        lambda: started_in_process(commit_timeout=100.0),
        in_process_without_a_commit_in_time,
        3,
    ),
    "in process, silent": (started_in_process, in_process_silence, 3),
}


@pytest.mark.parametrize("kind", LOOPS)
def test_a_crash_loop_ends_at_the_third_round(kind: str) -> None:
    begin, fail, rounds = LOOPS[kind]
    loop = begin()
    for _ in range(10):
        if loop.goes_on:
            fail(loop)
    assert not loop.goes_on
    (ending,) = loop.job.of(tell.JobEnding)
    assert isinstance(ending.cause, why.NoProgress)
    assert ending.cause.times == 3
    assert loop.number == rounds - 1
    for host in HOSTS:
        if any(worker.host == host for worker in loop.job.engine.workers):
            loop.job.exit(host, 0, None, 15)
    loop.job.close()
    assert loop.job.result.exit_code == 77
    if kind not in ("no peers", "hang", "in process, no commit in time"):
        assert ending.cause.suspect == "b"
        assert loop.job.result.failure is not None
        assert loop.job.result.failure.host == "b"


def test_a_script_that_fails_on_any_host_does_not_use_up_the_hosts() -> None:
    names = "abcdefgh"
    loop = Loop(",".join(f"{name}:1" for name in names), max_np=8, cooldown=None)
    for _ in range(40):
        if loop.goes_on:
            loop.live(1.0)
            loop.fails(loop.job.engine.round.hosts[0])  # type: ignore[union-attr]
            loop.await_round()
    assert not loop.goes_on
    assert loop.number == 4, "two hosts are excluded, and count neither way"
    assert len(loop.job.of(tell.HostExcluded)) == 2


def test_hosts_that_come_back_only_to_fail_are_no_excuse() -> None:
    loop = Loop("a:1,b:1,c:1", max_np=3, cooldown=(1.0, 1.0))
    for _ in range(60):
        if loop.goes_on:
            loop.live(2.0)
            loop.fails(loop.job.engine.round.hosts[0])  # type: ignore[union-attr]
            loop.await_round()
    assert not loop.goes_on
    assert loop.number < 12


def with_a_late_spare(cooldown: tuple[float, float] | None) -> Loop:
    """Let host b fail as long as rounds begin there, while its spare is connecting."""
    loop = Loop("a:1,b:1,c:1", late="c", spares=1, cooldown=cooldown)
    for _ in range(12):
        loop.live(1.0)
        if loop.job.engine.round.state is RoundState.RUNNING:  # type: ignore[union-attr]
            loop.fails()
        assert loop.goes_on, "the job ends before its spare is there"
    return loop


@pytest.mark.parametrize("cooldown", [None, (4.0, 60.0)])
def test_a_spare_that_connects_late_takes_the_place_of_a_bad_host(
    cooldown: tuple[float, float] | None,
) -> None:
    loop = with_a_late_spare(cooldown)
    arrive(loop.job, "c")
    loop.await_round()
    assert loop.job.engine.round is not None
    assert loop.job.engine.round.hosts == ["a", "c"]
    assert loop.goes_on


def test_a_spare_that_never_comes_ends_the_wait_for_it() -> None:
    loop = with_a_late_spare(None)
    loop.job.play(on.HostGone("c", ConnectFailed("refused", host="c").problem))
    for _ in range(20):
        if loop.goes_on:
            loop.await_round()
            loop.live(1.0)
            loop.fails()
    assert not loop.goes_on
    (ending,) = loop.job.of(tell.JobEnding)
    assert ending.cause == why.NoProgress(3, "b")


def test_a_bad_host_does_not_end_a_job_that_can_do_without_it() -> None:
    loop = Loop("a:1,b:1,c:1", min_np=2, max_np=3, cooldown=None)
    for _ in range(2):
        loop.live(1.0)
        loop.fails("b")
    assert loop.goes_on
    assert [action.host for action in loop.job.of(tell.HostExcluded)] == ["b"]


def play_slow_start(seed: int) -> None:
    """A start that takes long, with hosts that come and go and failures in between, and then gets somewhere."""
    rng = random.Random(seed)
    kind = rng.choice(("in process", "steps", "silent"))
    loop = Loop()
    step, failures = -1, 0
    for _ in range(12):
        loop.await_round(asks=kind == "in process")
        assert loop.goes_on, f"{seed}: a job that does its best is ended"
        seconds = rng.choice((3.0, 16.0, 60.0, 900.0))
        loop.live(seconds)
        # At most two failures in a row before the job gets on: the third time it is well.
        if failures < 2 and rng.random() < 0.5:
            # Workers that report nothing have their time alone.
            failures = 0 if kind == "silent" and seconds > 15 else failures + 1
            loop.fails(rng.choice(HOSTS), *rng.choice(((1, None), (None, 9))))
        elif rng.random() < 0.3:
            # A lost host says nothing of the script, however often it is lost.
            loop.job.play(lost("b"))
            loop.ends()
        elif kind == "in process":
            loop.commits()
            failures = 0
        elif kind == "steps":
            step += rng.randrange(1, 100)
            loop.step(step)
            failures = 0
    assert loop.goes_on, f"{seed}: a job that does its best is ended"


@pytest.mark.parametrize("seed", range(50))
def test_a_slow_but_honest_start_never_ends_a_job(seed: int) -> None:
    play_slow_start(seed)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_thousand_slow_but_honest_starts() -> None:
    for seed in range(10_000):
        play_slow_start(seed)
        History.all.clear()
