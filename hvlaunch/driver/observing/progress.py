"""Progress of a job's workers: their own reports (hvlaunch.rendezvous.worker), and the watch for hangs.

A silent job's hosts are asked for samples, peers and stacks, and the judge decides.
"""

import json
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial, wraps
from math import exp
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from hvlaunch.agent.wire.frames import mapping, number, or_null, record, text, whole
from hvlaunch.driver.observing import Observe, StacksWanted
from hvlaunch.driver.process import loud
from hvlaunch.engine import events as on
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.rendezvous.messages import LONGEST_NAME, MOST_METRICS, PROGRESS, worker_of
from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.watch.rounds import Ranks

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.driver.observing import Answer, Observers, Target
    from hvlaunch.driver.observing.observation import Observation
    from hvlaunch.telemetry.hang import Judge
    from hvlaunch.telemetry.peers import HostPeers
    from hvlaunch.telemetry.stack import ProcessStack

__all__ = ["HangWatch", "Progress", "Steps"]

_LONGEST = 1 << 13
_STEP = whole(0, 1 << 53)
_TOLD = record(
    {
        "step": _STEP,
        "total": or_null(_STEP),
        "metrics": mapping(text(LONGEST_NAME), or_null(number(-1e308, 1e308)), MOST_METRICS),
    },
    optional=("total", "metrics"),
)
_SMOOTHED = 5.0
"""Seconds over which a rate is averaged."""
_TOLD_WITHIN = 1.0
"""Seconds within which a worker reports a step."""

_Worker: TypeAlias = tuple[str, int, int]


class Steps(NamedTuple):
    """Progress of some workers."""

    moved_at: float | None
    """Time of the newest report; None without any report."""
    are_exact: bool
    """True if a worker with reports has steps left."""
    of: Mapping[_Worker, int]
    """Newest step of each worker with reports."""


class _Course:
    """Progress of a worker."""

    def __init__(self, report: Mapping[str, Any], now: float) -> None:
        self.step, self.total, self.metrics = _news(report)
        self.stepped_at = self.moved_at = now
        self.round: int | None = None
        """The newest round at its last report."""
        self.rate: float | None = None
        """Steps per second while the worker makes steps."""

    def go_on(self, report: Mapping[str, Any], now: float) -> None:
        """Record another report."""
        new = _news(report)
        if new != (self.step, self.total, self.metrics):
            self.moved_at = now
        made = report["step"] - self.step
        if made:
            # Two reports may come at the same tick of the clock.
            passed = max(now - self.stepped_at, 1e-3)
            # Exponential average: reports come at irregular times.
            share = 1.0 if self.rate is None else 1 - exp(-passed / _SMOOTHED)
            rate = self.rate or 0.0
            # Steps that go back mean a restart: the old rate says nothing of the new run.
            self.rate = rate + share * (made / passed - rate) if made > 0 else None
            self.stepped_at = now
        self.step, self.total, self.metrics = new

    def rate_at(self, now: float) -> float | None:
        """Return the rate, which decays while the worker makes no step."""
        idle = now - self.stepped_at - _TOLD_WITHIN
        return self.rate if self.rate is None or idle * self.rate <= 1 else 1 / idle


class Progress:
    """Progress of all workers. For any thread; `exists` tells if a worker of this host, slot and start ever existed.

    `note_step` gets the newest round with its first new step; `round_of` returns that round's number.
    """

    def __init__(
        self,
        server: RendezvousServer,
        exists: Callable[[str, int, int], bool],
        clock: Callable[[], float],
        round_of: Callable[[], int | None] = lambda: None,
        note_step: Callable[[int, int], None] = lambda _round, _step: None,
    ) -> None:
        self.server = server
        self.exists = exists
        self.clock = clock
        self.round_of = round_of
        self.note_step = note_step
        self._best = self._noted = -1
        """The highest step of all rounds, and the newest round with a new step."""
        self._courses: dict[_Worker, _Course] = {}
        self._lock = threading.Lock()

    def open(self) -> None:
        """Subscribe to reports until the server closes, beginning with earlier reports."""
        self.server.subscribe(PROGRESS, loud(self._heard), since=0)

    def of(self, worker: _Worker) -> Mapping[str, Any] | None:
        """Return a worker's progress as JSON, if the worker reports any."""
        now = self.clock()
        with self._lock:
            course = self._courses.get(worker)
            if course is None:
                return None
            rate = course.rate_at(now)
            news = {"step": course.step, "total": course.total, "metrics": course.metrics}
        return {**news, "rate": None if rate is None else float(f"{rate:.6g}")}

    def steps(self, workers: Iterable[_Worker]) -> Steps:
        """Return the progress of these workers."""
        with self._lock:
            courses = {worker: self._courses[worker] for worker in workers if worker in self._courses}
            return Steps(
                max((course.moved_at for course in courses.values()), default=None),
                any(course.total is None or course.step < course.total for course in courses.values()),
                {worker: course.step for worker, course in courses.items()},
            )

    def _heard(self, key: str, value: bytes | None, _version: int) -> None:
        """Take a report. Nonsense is ignored: any worker may write to the rendezvous."""
        try:
            worker = worker_of(key)
        except ValueError:
            return
        report = None if value is None or len(value) > _LONGEST else _told(value)
        # A worker can name any other in its key; unknown names would fill memory.
        if report is None or not self.exists(*worker):
            return
        now, number, step = self.clock(), self.round_of(), report["step"]
        with self._lock:
            course = self._courses.get(worker)
            # Steps that begin anew within a round are those of another epoch. In another round the worker has gone back.
            is_new = step > self._best or (
                course is not None and course.round == number and step < course.step
            )
            if course is None:
                course = self._courses[worker] = _Course(report, now)
            else:
                course.go_on(report, now)
            course.round = number
            self._best = max(self._best, step)
            is_first = is_new and number is not None and number > self._noted
            if is_first and number is not None:
                self._noted = number
        if is_first and number is not None:
            self.note_step(number, step)


def _news(report: Mapping[str, Any]) -> tuple[int, int | None, Mapping[str, float | None]]:
    """Return the newest step, the number of steps, and the metrics."""
    return report["step"], report.get("total"), report.get("metrics", {})


def _told(value: bytes) -> Mapping[str, Any] | None:
    try:
        report = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return report if _TOLD(report) else None


_SAMPLED_FOR = 0.5
"""Seconds of sampling for each look."""
_PATIENCE = 4.0
"""Seconds to wait for late hosts."""
_PEERS_WITHIN = 9.0


P = ParamSpec("P")
T = TypeVar("T")


def _harmless(
    step: "Callable[Concatenate[HangWatch, P], None]",
) -> "Callable[Concatenate[HangWatch, P], None]":
    """Keep a defect in the hang watch from ending a healthy job."""

    @wraps(step)
    def guarded(self: "HangWatch", /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            step(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 (see above)
            self.stop()
            self._say(
                f"internal error: {type(error).__name__}: {error}; hangs of this job are no longer detected"
            )

    return guarded


class HangWatch:
    """Watches a job from the start of its workers.

    `reading` returns the ranks with access to stdin. `post` puts requests and events on the driver's queue. `observers`
    makes calls at times of `clock` on several threads. A look begins when the last one has ended, so no lock is needed.
    """

    def __init__(
        self,
        timeout: float,
        links: "Iterable[HostLink]",
        ranks: Ranks,
        progress: "Progress",
        reading: Callable[[], Collection[int]],
        post: "Callable[[StacksWanted | Observe | on.Event], None]",
        observers: "Observers",
        clock: Callable[[], float],
        *,
        say: Callable[[str], None],
    ) -> None:
        self._timeout = timeout
        self._links = links
        self._ranks = ranks
        self._progress = progress
        self._reading = reading
        self._post = post
        self._observers = observers
        self._at = observers.at
        self._peers: dict[str, tuple[float, HostPeers]] = {}
        """Newest report of each host on its connections to others, and its time."""
        self._clock = clock
        self._say = say
        self._judge: Judge | None = None
        self._seen_at = 0.0
        self._commits: dict[tuple[str, int, int], int] = {}
        self._is_told = self._is_on = self._is_over = False

    def _begin(self) -> None:
        """Begin to watch at the first start of a worker."""
        if not self._is_on and self._timeout:
            self._is_on = True
            self._at(self._clock() + self._timeout / 4, self._look)

    def stop(self) -> None:
        """End the watch: the job is over."""
        self._is_over = True

    def note_input(self) -> None:
        """Record that workers get input, a sign of life. Any thread may call this."""
        self._seen_at = self._clock()

    def watch(self, event: on.Event, _actions: object, now: float) -> None:
        """Record events that are signs of life."""
        match event:
            case on.WorkerStarted():
                self._seen_at = now
                self._begin()
            case on.WorkerExited() | on.WorkerAsked() | on.HostGone():
                self._seen_at = now
            case on.WorkerBeat(host, slot, start, commit) if commit > self._commits.get(
                (host, slot, start), -1
            ):
                self._commits[host, slot, start] = commit
                self._seen_at = now
            case _:
                pass

    def _listen(self, judge: "Judge") -> None:
        """Tell the judge the time of the last sign of life. Output does not count while workers report steps."""
        steps = self._progress.steps(self._workers())
        signs = [self._seen_at] if steps.moved_at is None else [self._seen_at, steps.moved_at]
        # A worker may print for ever without making a step.
        if not steps.are_exact:
            signs += [at for link in self._links for at in list(link.last_output.values())]
        judge.heard(max(signs), by_steps=steps.are_exact)

    def _workers(self) -> list[tuple[str, int, int]]:
        """Living workers by host, slot and start."""
        return [(link.host.name, *worker) for link in self._links for worker in list(link.pids)]

    def _living(self) -> list[int]:
        """Ranks of living workers."""
        return list(self._by_rank(dict.fromkeys(self._workers())))

    def _by_rank(self, workers: "Mapping[tuple[str, int, int], T]") -> "dict[int, T]":
        return {
            rank: value
            for worker, value in workers.items()
            if (rank := self._ranks.rank_of(*worker)) is not None
        }

    @_harmless
    def _look(self) -> None:
        if self._is_over:
            return
        if self._judge is None:
            from hvlaunch.telemetry.hang import Judge  # noqa: PLC0415 (a job that is never silent needs none)

            self._judge = Judge(self._timeout, self._seen_at)
        judge = self._judge
        self._listen(judge)
        self._tell_end(judge)
        if self._clock() < judge.next_look or not self._living():
            self._at(max(judge.next_look, self._clock() + judge.pause / 2), self._look)
            return
        # The samples belong to the loop's thread: only there they are made.
        self._post(Observe(partial(self._observe, judge)))

    @_harmless
    def _observe(self, judge: "Judge", observation: "Observation") -> None:
        observation.keep_on(_SAMPLED_FOR)
        observation.when_fresh(_PATIENCE, partial(self._sampled, judge, observation))
        # Peers take longer than samples and serve the next look: nothing waits for them.
        self._observers.ask("peers", _workers_of, _PEERS_WITHIN, self._heard)

    @_harmless
    def _heard(self, answer: "Answer") -> None:
        """Record a host's report on its connections. It may come until the next look."""
        from hvlaunch.telemetry.peers import host_peers  # noqa: PLC0415 (as the judge)

        report = host_peers(answer.host, answer.value)
        if report is not None:
            self._peers[answer.host] = self._clock(), report
        # An answer in a wrong form is no report; a host without an answer keeps its last report.
        elif answer.problem is None:
            self._peers.pop(answer.host, None)

    def _known_peers(self, current_since: float = 0.0) -> "list[HostPeers]":
        """Return the reports of hosts with living workers. Collectives from before `current_since` are left out: they have moved."""
        hosts = dict.fromkeys(host for host, _, _ in self._workers())
        reports = [self._peers[host] for host in hosts if host in self._peers]
        return [report if at > current_since else report.without_collectives() for at, report in reports]

    def _tell_end(self, judge: "Judge") -> None:
        if self._is_told and not judge.has_said:
            self._is_told = False
            self._post(on.JobGoesOn())

    @_harmless
    def _sampled(self, judge: "Judge", observation: "Observation") -> None:
        from hvlaunch.telemetry.peers import operations  # noqa: PLC0415 (as the judge)

        self._listen(judge)
        needed = judge.samples(self._clock(), observation.newest())
        judge.operations(self._clock(), operations(self._known_peers()))
        if judge.is_due(self._clock()):
            self._ask(self._living(), partial(self._all_shown, judge))
        else:
            self._ask(needed, partial(self._shown, judge))

    def _ask(
        self, ranks: Iterable[int], then: "Callable[[Sequence[ProcessStack]], None]", *, native: bool = False
    ) -> None:
        """Have the stacks of these ranks taken, if the list is not empty."""
        ranges = tuple(range(rank, rank + 1) for rank in sorted(ranks))
        if ranges:
            self._post(StacksWanted(then, ranges, native=native))
        else:
            then([])

    @_harmless
    def _shown(self, judge: "Judge", stacks: "Sequence[ProcessStack]") -> None:
        judge.stacks(self._clock(), stacks)
        self._tell_end(judge)
        self._at(judge.next_look, self._look)

    @_harmless
    def _all_shown(self, judge: "Judge", stacks: "Sequence[ProcessStack]") -> None:
        judge.stacks(self._clock(), stacks)
        self._ask(judge.steady, partial(self._decide, judge, stacks), native=True)

    @_harmless
    def _decide(
        self, judge: "Judge", stacks: "Sequence[ProcessStack]", native: "Sequence[ProcessStack]"
    ) -> None:
        from hvlaunch.telemetry.hang import steps_apart  # noqa: PLC0415 (as the judge)
        from hvlaunch.telemetry.peers import agreed, behind, notes  # noqa: PLC0415 (as the judge)

        self._listen(judge)
        if judge.is_due(self._clock()):
            living = self._living()
            # A rank that has ended may be the one that the others wait for.
            ended = [rank for rank in self._ranks.places() if rank not in living]
            steps = self._by_rank(self._progress.steps(self._workers()).of)
            peers = self._known_peers(judge.got_on_at)
            verdict = judge.verdict(
                self._clock(),
                stacks,
                native,
                ended=ended,
                reading=self._reading(),
                behind=behind(peers),
                apart={**steps_apart(steps), **notes(peers)},
                agreed=agreed(peers, living),
            )
            # The engine decides what follows; the watch only reports.
            if verdict is not None:
                self._is_told = True
                self._post(on.JobHangs(round(verdict.seconds, 3), verdict.ranks, verdict.text))
        self._at(judge.next_look, self._look)


def _workers_of(target: "Target") -> "Mapping[str, object] | None":
    return {"workers": list(target.workers.items()), "scratch": target.scratch} if target.workers else None
