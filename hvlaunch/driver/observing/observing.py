"""The loop's access to observing: samples, stacks, progress and the hang watch of a job's hosts.

Most jobs take no stacks and no samples; the modules for both are loaded when first needed.
"""

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hvlaunch.agent.wire.frames import number, or_null, record, several, text, whole
from hvlaunch.driver.links.links import HostLinks
from hvlaunch.driver.observing import Answer, Inquiry, Observe, Observers, StacksWanted, Target
from hvlaunch.driver.observing.progress import HangWatch, Progress
from hvlaunch.driver.process import loud
from hvlaunch.engine import events as on
from hvlaunch.engine.actions import Action, TakeStacks
from hvlaunch.engine.engine import Engine
from hvlaunch.engine.events import Event
from hvlaunch.job import ElasticOptions, JobSpec
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.rendezvous.messages import KEPT
from hvlaunch.rendezvous.serving import RendezvousServer
from hvlaunch.watch.rounds import Ranks

if TYPE_CHECKING:
    from hvlaunch.driver.observing.bindings import Bindings
    from hvlaunch.driver.observing.copies import Copies
    from hvlaunch.driver.observing.observation import Observation
    from hvlaunch.driver.observing.slow_watch import SlowWatch
    from hvlaunch.driver.observing.stacks import Stacks
    from hvlaunch.engine.events import HostFacts
    from hvlaunch.report.failure_report import Memory, Missing
    from hvlaunch.telemetry.sample import HostSample
    from hvlaunch.telemetry.stack import ProcessStack

__all__ = ["Clues", "Observing", "Suspect"]

_LACK = (b"No module named", b"No such file", b"can't open file")
_MEMORY = (b"out of memory", b"OutOfMemory", b"MemoryError", b"bad_alloc", b"allocate memory")
_SIGKILL = 9
_SAMPLED_FOR = 0.5
_LAST_WORDS = 2000
_ENERGY = "energy.json"
"""File of the job's directory with the energy so far."""


class Suspect(NamedTuple):
    """The worker that seems to have caused a failure."""

    rank: int
    end: on.WorkerExited
    sought: tuple[Literal["module", "file"], str] | None
    """The missing module or file, by the worker's own words."""


class Clues:
    """Collects clues, for the loop's thread.

    `rank_of` returns the rank of a worker, `tail` its last stderr, `observation` the samples of hosts.
    """

    def __init__(
        self,
        rank_of: Callable[[str, int, int], int | None],
        tail: Callable[[int], bytes],
        observation: "Callable[[], Observation]",
    ) -> None:
        self._rank_of = rank_of
        self._tail = tail
        self._observation = observation
        self._failed: list[on.WorkerExited] = []
        self._suspect: Suspect | None = None
        self._sample: HostSample | None = None
        """Sample of the suspect's host from before its end."""
        self._is_sampled = False

    def record_event(self, event: object) -> None:
        """Record an event, before its actions are carried out."""
        if isinstance(event, on.WorkerExited) and event.code != 0:
            self._failed.append(event)

    def find_suspect(self) -> Suspect | None:
        """Find the cause of a failure, just before other workers are killed for it, and have its host's memory measured."""
        failed, self._failed = self._failed, []
        # Workers that failed because of another worker look like consequences: the cause is among the others.
        end = next(
            (candidate for candidate in failed if candidate.look == "cause"), failed[0] if failed else None
        )
        rank = None if end is None else self._rank_of(end.host, end.slot, end.start)
        if end is None or rank is None:
            return self._suspect
        words = self._tail(rank)[-_LAST_WORDS:]
        sought = None
        # A cheap test first: the parser of tracebacks is loaded for these failures only.
        if any(mark in words for mark in _LACK):
            from hvlaunch.report.diagnosis import sought as sought_by  # noqa: PLC0415 (few failures are of this kind)

            sought = sought_by(words.decode(errors="replace"))
        self._suspect = Suspect(rank, end, sought)
        if end.oom_killed or end.signal == _SIGKILL or any(mark in words for mark in _MEMORY):
            self._is_sampled = True
            observation = self._observation()
            # Memory is free again once the process is gone, so an older sample says more than a new one.
            self._sample = next(
                (candidate for candidate in observation.newest() if candidate.host == end.host), None
            )
            observation.keep_on(_SAMPLED_FOR)
        return self._suspect

    def missing(self, has: Mapping[str, bool]) -> "Missing | None":
        """Describe the missing file or module of the suspect; `has` maps hosts to true or false.

        None if the suspect's host has the file after all.
        """
        suspect = self._suspect
        if suspect is None or suspect.sought is None or has.get(suspect.end.host):
            return None
        from hvlaunch.report.failure_report import Missing  # noqa: PLC0415 (as above)

        # Sorted, so that the report does not depend on the order of answers.
        others = sorted(host for host in has if host != suspect.end.host)
        having = tuple(host for host in others if has[host])
        return Missing(*suspect.sought, having, tuple(host for host in others if not has[host]))

    def memory(self) -> "tuple[Memory, ...]":
        """Return the memory in use on the suspect's host and its GPUs. A sample from before its end is preferred."""
        suspect = self._suspect
        if suspect is None or not self._is_sampled:
            return ()
        from hvlaunch.report.failure_report import Memory  # noqa: PLC0415 (as above)

        host = suspect.end.host
        sample = self._sample or next(
            (candidate for candidate in self._observation().newest() if candidate.host == host), None
        )
        if sample is None:
            return ()
        when = sample.time - suspect.end.at
        used = next((worker.gpus for worker in sample.workers if worker.rank == suspect.rank), ())
        gpus = [gpu for gpu in sample.gpus if gpu.index in used or not used]
        return (
            Memory(f"host {host}", sample.memory_used, sample.memory_total, when),
            *(
                Memory(f"GPU {gpu.index} of host {host}", gpu.memory_used, gpu.memory_total, when)
                for gpu in gpus
            ),
        )


_VERSIONS_AFTER = 1.0
"""Seconds after workers were started: a shorter job is not worth the question."""
_VERSIONS_WITHIN = 30.0
_VERSIONS = record(
    {
        **dict.fromkeys(("kernel", "machine"), text(200)),
        **dict.fromkeys(("driver", "executable", "python", "torch", "cuda", "nccl"), or_null(text(200))),
        "gpus": several(text(200), 64),
    }
)


class Versions:
    """Asks hosts once for the versions of their workers' programs."""

    def __init__(self, observers: Observers, clock: Callable[[], float]) -> None:
        self._observers = observers
        self._clock = clock
        self.call: Callable[[Mapping[str, Mapping[str, Any]]], None] | None = None
        """Gets the answers by host, in any thread; an empty mapping with the question."""
        self._asked: set[str] = set()
        self._is_due = False

    def ask_soon(self) -> None:
        """Ask hosts with workers in a second, each host for the first time."""
        if self.call is not None and not self._is_due:
            self._is_due = True
            self._observers.at(self._clock() + _VERSIONS_AFTER, self._ask)

    def _tell(self, answers: Mapping[str, Mapping[str, Any]]) -> None:
        call = self.call  # read once: the job may end in another thread
        if call is not None:
            call(answers)

    def _ask(self) -> None:
        self._is_due = False
        answers: dict[str, Mapping[str, Any]] = {}
        lock = threading.Lock()
        unanswered = 1

        def answered(answer: Answer | None) -> None:
            nonlocal unanswered
            with lock:
                unanswered -= 1
                if answer is not None and answer.problem is None and _VERSIONS(answer.value):
                    answers[answer.host] = answer.value
                is_complete = not unanswered
            if is_complete:
                self._tell(answers)

        def question(target: Target) -> Mapping[str, Any] | None:
            nonlocal unanswered
            if target.host in self._asked or not target.workers:
                return None
            self._asked.add(target.host)
            with lock:
                unanswered += 1
            return {"workers": list(target.workers.items())}

        self._tell({})
        self._observers.ask("versions", question, _VERSIONS_WITHIN, answered)
        answered(None)


_PREPARE_AFTER = 5.0
"""Seconds after the first workers were started. Shorter jobs use only the stack tools that their hosts have."""


def _bindings(
    spec: JobSpec, observers: Observers, clock: Callable[[], float], say: Callable[[str], None]
) -> "Bindings | None":
    if not spec.is_bound:
        return None
    from hvlaunch.driver.observing.bindings import Bindings  # noqa: PLC0415 (few jobs bind their workers)

    return Bindings(spec.bind, observers, clock, say, is_verbose=spec.verbose)


_LONGEST_COST = 1 << 10
_COST = record(
    {
        "step": whole(0, 1 << 53),
        "total": or_null(whole(0, 1 << 53)),
        "metrics": record({"delayed": number(0, 1e12), "whole": number(0, 1e12)}),
    }
)


class _Kept:
    """The copies of commits, whose code is loaded with the first commit, and the costs of commits."""

    def __init__(
        self,
        options: ElasticOptions,
        links: HostLinks,
        engine: Engine,
        rendezvous: RendezvousServer,
        say: Callable[[str], None],
        exists: Callable[[str, int, int], bool],
    ) -> None:
        self._options = options
        self._links = links
        self._engine = engine
        self._rendezvous = rendezvous
        self._say = say
        self._exists = exists
        self._costs: dict[str, Mapping[str, Any]] = {}
        """The newest report of each worker."""
        self._copies: Copies | None = None
        self._loading = threading.Lock()

    def open(self) -> None:
        # From the beginning: a successor finds the messages to its predecessor.
        self._rendezvous.subscribe(KEPT, loud(self._heard), since=0)
        if self._options.save_to is not None:
            # At once: a directory that can't be written is to be known before the training has lasted for hours.
            self._loaded_copies()

    def _heard(self, key: str, value: bytes | None, _version: int) -> None:
        if value is not None and key.startswith("cost."):
            self._take_cost(key.partition(".")[2], value)
        elif value is not None and not key.startswith("done."):
            self._loaded_copies().receive(key, value)

    def _take_cost(self, name: str, value: bytes) -> None:
        """Take a report on costs. Nonsense is ignored: any worker may write to the rendezvous."""
        from hvlaunch.rendezvous.messages import worker_of  # noqa: PLC0415 (few workers commit)

        try:
            # Unknown names would fill memory.
            is_known = self._exists(*worker_of(name)) and len(value) <= _LONGEST_COST
            cost: Any = json.loads(value) if is_known else None
        except (ValueError, RecursionError):
            return
        if _COST(cost):
            self._costs[name] = cost

    def costs(self) -> Mapping[str, Any]:
        """Return the costs of commits so far."""
        costs = list(self._costs.values())
        return {
            "commits": sum(cost["step"] for cost in costs),
            "delayed": sum(cost["metrics"]["delayed"] for cost in costs),
            "whole": max((cost["metrics"]["whole"] for cost in costs), default=0.0),
            "saves": () if self._copies is None else self._copies.save_times(),
            "trouble": None if self._copies is None else self._copies.save_trouble(),
        }

    def _loaded_copies(self) -> "Copies":
        with self._loading:
            if self._copies is None:
                from hvlaunch.driver.observing.copies import Copies  # noqa: PLC0415 (few jobs keep commits)

                links, options = self._links, self._options
                save = options.save_to, options.save_every
                self._copies = Copies(
                    self._rendezvous, lambda: list(links), self._facts, options.replicas, self._say, save
                )
            return self._copies

    def _facts(self, host: str) -> "HostFacts | None":
        entry = self._engine.pool.get(host)
        return None if entry is None else entry.facts

    def stop(self) -> None:
        if self._copies is not None:
            self._copies.stop()


class Observing:
    """Observes a job, for the loop's thread. `post` puts events and requests on the loop's queue.

    `reading` returns the ranks with access to stdin, `tail` the last stderr of a rank. `say` prints a message.
    """

    def __init__(
        self,
        spec: JobSpec,
        links: HostLinks,
        ranks: Ranks,
        engine: Engine,
        rendezvous: RendezvousServer,
        directory: Path | None,
        post: Callable[[Event | Inquiry | Observe | StacksWanted], None],
        clock: Callable[[], float],
        *,
        reading: Callable[[], Collection[int]],
        tail: Callable[[int], bytes],
        say: Callable[[str], None],
    ) -> None:
        self._cwd = spec.cwd
        self._directory = directory
        self._engine = engine
        self._post = post
        self._clock = clock
        # Only an elastic job says at once what its workers did before they were stopped: other jobs have a report for it.
        self._say = None if spec.elastic is None else say
        self._observers = Observers(lambda: links, ranks.rank_of, clock)
        self.clues = Clues(ranks.rank_of, tail, lambda: self.observation)
        self.progress = Progress(
            rendezvous,
            lambda *worker: ranks.rank_of(*worker) is not None,
            clock,
            # Only an elastic job has other rounds.
            self._number_of_round if spec.elastic is not None else lambda: None,
            lambda number, step: post(on.StepReached(number, step)),
        )
        self.hang_watch = HangWatch(
            spec.hang_timeout,
            links,
            ranks,
            self.progress,
            reading,
            post,
            self._observers,
            clock,
            say=say,
        )
        self.slow_watch = _slow_watch(spec, links, post, self._observers, clock)
        self.bindings = _bindings(spec, self._observers, clock, say)
        self.copies = (
            None
            if spec.elastic is None
            else _Kept(
                spec.elastic,
                links,
                engine,
                rendezvous,
                say,
                lambda *worker: ranks.rank_of(*worker) is not None,
            )
        )
        self._stacks: Stacks | None = None
        self._is_prepared = False
        self._versions = Versions(self._observers, clock)

    @cached_property
    def observation(self) -> "Observation":
        """The samples of the hosts; no host is asked before the first subscriber."""
        from hvlaunch.driver.observing.observation import Observation  # noqa: PLC0415 (for jobs that are watched)

        return Observation(self._observers, self._cwd, self._clock, self._energy_file)

    @property
    def _energy_file(self) -> Path | None:
        return None if self._directory is None else self._directory / _ENERGY

    def _number_of_round(self) -> int | None:
        current = self._engine.round
        return None if current is None else current.number

    def take_stacks(self, request: StacksWanted) -> None:
        """Take the stacks of workers as requested, and pass them to its `answer`."""
        self._loaded_stacks().take(request.ranks, request.answer, native=request.native)

    def when_asked(self, call: Callable[[Mapping[str, Mapping[str, Any]]], None]) -> None:
        """Call when hosts are asked for versions, and with their answers by host; in any thread."""
        self._versions.call = call

    def stop(self) -> None:
        """End the watch for hangs; answers that come after the job's end are recorded no more."""
        self.hang_watch.stop()
        if self.slow_watch is not None:
            self.slow_watch.stop()
        if self.copies is not None:
            self.copies.stop()
        self._versions.call = None

    def prepare(self) -> None:
        """Have hosts prepared to take stacks soon, and asked for their versions, once workers are being started."""
        self._versions.ask_soon()
        if not self._is_prepared:
            self._is_prepared = True
            prepare = Inquiry(lambda _state: self._loaded_stacks().prepare())
            # The agenda's thread must not touch the stacks: the request brings the call back to the loop.
            self._observers.at(self._clock() + _PREPARE_AFTER, lambda: self._post(prepare))

    def take_stacks_before_kill(self, event: Event, actions: Sequence[Action]) -> None:
        """Take the stacks of workers before a kill, if the actions order a kill."""
        self.clues.record_event(event)
        # The kill waits for these stacks, a fraction of a second at most.
        takes = [action for action in actions if isinstance(action, TakeStacks)]
        if takes:
            suspect = self.clues.find_suspect()
            sought = None if suspect is None else suspect.sought
            self._loaded_stacks().take_before_kill(
                takes, self._engine.workers, self._post, self._say_summary, sought
            )

    def stacks_before_kill(self) -> "Sequence[ProcessStack]":
        """Return the stacks of the workers that were killed last for a failure."""
        return () if self._stacks is None else self._stacks.before_kill()

    def missing(self) -> "Missing | None":
        """Return the missing module or file of the last failure, with the hosts that have it."""
        return None if self._stacks is None else self.clues.missing(self._stacks.has)

    def memory(self) -> "tuple[Memory, ...]":
        """Return the memory that hosts had at the last failure."""
        return self.clues.memory()

    def slow_hosts(self) -> Mapping[str, str]:
        """Return the causes of slow hosts by host, in words."""
        return {host.name: host.slow for host in self._engine.pool if host.slow}

    def energy(self) -> tuple[float, float]:
        """Return the joules that samples have counted, and the seconds of GPUs for which they have."""
        # No sample is taken for this: a job in peace costs nothing. A driver before this one may have counted.
        file = self._energy_file
        is_counted = "observation" in self.__dict__ or (file is not None and file.exists())
        return self.observation.energy() if is_counted else (0.0, 0.0)

    def commit_costs(self) -> Mapping[str, Any] | None:
        """Return the costs of commits so far; None if none is reported."""
        costs = None if self.copies is None else self.copies.costs()
        return costs if costs is not None and costs["commits"] else None

    def overview(self) -> Mapping[str, Any]:
        """Return the state of the job now, as data."""
        from hvlaunch.watch.overview import overview  # noqa: PLC0415 (for jobs that are asked)

        return overview(self._engine, self._clock(), self.progress.of)

    def _loaded_stacks(self) -> "Stacks":
        if self._stacks is None:
            from hvlaunch.driver.observing.stacks import Stacks  # noqa: PLC0415 (for jobs whose stacks are taken)

            self._stacks = Stacks(self._observers, self._directory)
        return self._stacks

    def _say_summary(self, stacks: "Sequence[ProcessStack]") -> None:
        if self._say is not None and stacks:
            from hvlaunch.telemetry.stack import summary  # noqa: PLC0415 (after a failure)

            self._say(f"before they were stopped: {summary(stacks)}")


def _slow_watch(
    spec: JobSpec,
    links: HostLinks,
    post: Callable[[Event | Observe], None],
    observers: Observers,
    clock: Callable[[], float],
) -> "SlowWatch | None":
    """Return the watch for a slow host; None for a job on a single host."""
    if spec.elastic is None and len(spec.hosts) < 2:  # noqa: PLR2004 (two hosts)
        return None
    from hvlaunch.driver.observing.slow_watch import SlowWatch  # noqa: PLC0415 (not for a local job)

    return SlowWatch(spec, links, post, observers.at, clock)
