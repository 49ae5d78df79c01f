"""The phases of a job and its end: workers are stopped, hosts are closed, the result is made. Pure."""

import signal
from collections.abc import Iterable
from enum import Enum
from math import inf

from hvlaunch.engine import actions as do
from hvlaunch.engine import facts as tell
from hvlaunch.engine.actions import Action, Finish, GroupState, Step
from hvlaunch.engine.causes import Ending, NoProgress, RankDone, RestartsUsedUp, RoleDone, StartsFailed
from hvlaunch.engine.hosts import HostState, Pool, PoolHost
from hvlaunch.engine.round import Round, RoundState, cause_of, first_failed
from hvlaunch.engine.rounds import Rounds
from hvlaunch.engine.workers import AT_ONCE, InvalidTransition, WorkerState, gently, passing_on
from hvlaunch.errors import EXIT_NO_PROGRESS, GaveUp, Problem
from hvlaunch.job import JobResult, JobSpec

__all__ = ["AT_WORK", "WITH_WORKERS", "GroupStates", "Lifecycle", "Phase", "final_state", "outcome"]


def outcome(
    ending: Ending,
    last: Round | None,
    interrupted: int | None,
    elapsed: float,
    *,
    last_ranks: Iterable[int] = (),
) -> JobResult:
    """Return the result of a job with its last round, `last`. `interrupted` is a signal's number.

    If the job ends with `last_ranks`, the ends of other workers after theirs do not count.
    """
    exits = last.exits if last is not None else {}
    # Other workers often fail because the last ranks have left them.
    ends = [exits.get(rank) for rank in last_ranks]
    until = max((end.when if end is not None and end.ok else inf for end in ends), default=inf)
    counting = [other for other in exits.values() if other.when <= until]
    failed, first = cause_of(counting) or ending.failure, first_failed(counting)
    error = ending.error
    if error is None and failed is None:
        error = _gave_up(ending)
    if interrupted is not None:
        code, failure = 128 + interrupted, None
    elif error is not None:
        code, failure = error.exit_code, None  # workers that failed then lost their peers: no causes
    else:
        code, failure = failed.exit_code if failed is not None else 0, failed
        if failed is not None and failed.stopped and first is not None:
            code = first.exit_code  # the signal was ours
        # A scheduler may start the job again for other codes.
        if isinstance(ending.cause, NoProgress | StartsFailed) and code != 0:
            code = EXIT_NO_PROGRESS
    return JobResult(
        exit_code=code,
        elapsed=elapsed,
        exits=tuple(exits[rank] for rank in sorted(exits)),
        failure=failure,
        first_victim=first if failure is not None and first is not failure else None,
        never_started=last.never_started if last is not None else (),
        error=error,
        interrupted=interrupted,
    )


def _gave_up(ending: Ending) -> Problem | None:
    match ending.cause:
        case RestartsUsedUp(limit):
            return GaveUp(restarts=limit).problem
        case NoProgress(times, suspect):
            return GaveUp(times=times, suspect=suspect).problem
        case _:
            return None


class GroupStates:
    """Reports each change of an elastic job's state, in the words of torch.distributed.elastic."""

    def __init__(self) -> None:
        self._told: tuple[str, int | None] = ("", None)

    def add_to(
        self, actions: list[Action], final: str | None, current: Round | None, *, has_workers: bool
    ) -> None:
        """Add the state to a turn's actions if it changed. Finish stays the last action."""
        state = final or _group_state(current, has_workers=has_workers)
        if self._told != (state, None if current is None else current.number):
            self._told = state, None if current is None else current.number
            # Finish ends the job: no action may follow.
            is_over = bool(actions) and isinstance(actions[-1], Finish)
            actions.insert(len(actions) - is_over, GroupState(*self._told))


def _group_state(current: Round | None, *, has_workers: bool) -> str:
    """Return the state of a job that has not ended."""
    if current is None:
        return "INIT"
    if not has_workers:
        return "STOPPED"
    if current.state is not RoundState.BROKEN:
        return "HEALTHY"
    return "UNKNOWN" if current.is_unknown else "UNHEALTHY"


def final_state(result: JobResult) -> str:
    """Return the state of a job that has ended."""
    if result.interrupted is not None:
        return "STOPPED"
    return "SUCCEEDED" if result.exit_code == 0 else "FAILED"


_NOT_TYPED = (signal.SIGHUP, signal.SIGPIPE)
"""Signals not typed by a user: they do not express impatience."""
_KILLING_TIME = 2.0
"""Seconds after the first SIGKILL before another interrupt ends the waiting."""
_CLOSING_TIME = 25.0
"""Seconds in which an idle agent kills remaining processes, and ends."""


class Phase(Enum):
    CONNECTING = "connecting to the hosts"
    RUNNING = "running"
    FINISHING = "waiting for the other workers, since the first one has ended with 0"
    STOPPING = "stopping the workers"
    CLOSING = "closing the hosts"
    DONE = "done"


AT_WORK = (Phase.CONNECTING, Phase.RUNNING)
WITH_WORKERS = (Phase.RUNNING, Phase.FINISHING, Phase.STOPPING)


class Lifecycle:
    """The phases of a job. Each phase may go straight to CLOSING."""

    def __init__(self, spec: JobSpec, pool: Pool, rounds: Rounds) -> None:
        self._spec = spec
        self._elastic = spec.elastic
        self._pool = pool
        self._rounds = rounds
        self.phase = Phase.CONNECTING
        self.has_begun = False
        self.ending = Ending()
        """Reason for an early end of the job."""
        self.final: str | None = None
        """The workers' final state, in the words of torch.distributed.elastic."""
        self._interrupted: int | None = None
        self._killing_since: float | None = None
        """Time of the user's first wish to kill the workers."""
        self._ended_at = 0.0

    def release(self, host: PoolHost, now: float) -> list[Action]:
        self._pool.closes(host, now + _CLOSING_TIME)
        self._rounds.changed()
        return [do.Release(host.name)]

    def parting(self, host: PoolHost, now: float) -> None:
        """Note a parting agent: it stops its workers first, within their grace."""
        self._pool.parts(host, now + self._spec.grace + _CLOSING_TIME)
        self._rounds.changed()

    def let_go(self, hosts: Iterable[PoolHost], now: float) -> list[Action]:
        """Release the hosts, and drop unready hosts."""
        actions: list[Action] = []
        for host in hosts:
            if host.has_agent:
                actions += self.release(host, now)
            elif host.state is HostState.CONNECTING:
                self._pool.gone(host)
                actions.append(do.Abandon(host.name))
        return actions

    def end_for(self, problem: Problem, now: float) -> list[Action]:
        """End the job for a defect of hvlaunch: in order if possible, otherwise by leaving it to the agents."""
        if self.phase in (*AT_WORK, Phase.FINISHING):
            try:
                return self.end_early(Ending(error=problem), now)
            # The defect may be in the records that an end in order needs.
            except InvalidTransition:
                pass
        self.ending = Ending(error=problem)
        return self.leave_to_agents(now)

    def hosts_with_workers(self) -> list[str]:
        """Return the hosts with workers of the job."""
        if self.phase not in WITH_WORKERS:
            return []
        current = self._rounds.round
        names = dict.fromkeys([*(current.hosts if current is not None else ()), *self._rounds.workers.hosts])
        return [name for name in names if self._pool[name].has_agent]

    def end_early(self, ending: Ending, now: float) -> list[Action]:
        """End the job early."""
        self.ending = ending
        actions: list[Action] = [] if ending.cause is None else [tell.JobEnding(ending.cause)]
        if self.phase is Phase.CONNECTING:
            return actions + self.close(now)
        return actions + self._stop_for(ending, now) + self.close_if_over(now)

    def _stop_for(self, ending: Ending, now: float) -> list[Action]:
        """Take the workers' stacks before they are stopped for a failure. Hanging workers are being killed already."""
        steps = gently(self._spec.grace)
        # The job went well: nobody needs stacks.
        if isinstance(ending.cause, RankDone | RoleDone):
            return self.stop(steps, now)
        self.phase = Phase.STOPPING
        # A second order would give hanging workers another grace.
        workers = [worker for worker in self._rounds.workers if worker.state is not WorkerState.HANGING]
        return self._rounds.stacks.stop(workers, steps, now)

    def stop(self, steps: tuple[Step, ...], now: float) -> list[Action]:
        hosts = self.hosts_with_workers()
        self.phase = Phase.STOPPING
        self._rounds.stacks.cancel()
        self._rounds.workers.stop(list(self._rounds.workers), steps, now)
        return [do.Stop(host, steps) for host in hosts]

    def interrupt(self, number: int, now: float) -> list[Action]:
        grace = self._spec.grace
        match self.phase:
            case Phase.CONNECTING:
                self._interrupted = number
                return self.close(now)
            case Phase.RUNNING | Phase.FINISHING:
                self._interrupted = number
                stop = self.stop(passing_on(number, grace), now)
                return [tell.Interrupting(number, grace), *stop, *self.close_if_over(now)]
            case Phase.STOPPING:
                # A second Ctrl-C is often typed by an impatient hand; it must not skip the kill.
                if self._killing_since is not None and now >= self._killing_since + _KILLING_TIME:
                    return self.leave_to_agents(now)
                self._killing_since = now if self._killing_since is None else self._killing_since
                return self.stop(AT_ONCE, now)
            # A terminal that closes sends SIGHUP, which must not leave hosts unclosed.
            case Phase.CLOSING if number not in _NOT_TYPED:
                return self.give_up_closing(list(self._pool.open))
            case _:
                return []

    def leave_to_agents(self, now: float) -> list[Action]:
        """Stop waiting. Agents end whatever is left (such as output without a reader) when their connections close."""
        self._ended_at = now
        self.phase = Phase.CLOSING
        self.final = final_state(self._result())
        return self.give_up_closing(list(self._pool.open))

    def close_if_over(self, now: float) -> list[Action]:
        if self._rounds.workers.size or self.phase not in WITH_WORKERS:
            return []
        if self.phase is Phase.RUNNING and (self._elastic is not None or self._rounds.restarting):
            return []
        return self.close(now)

    def close(self, now: float) -> list[Action]:
        """Release every host, and drop unready hosts."""
        self._ended_at = now
        self.phase = Phase.CLOSING
        self.final = final_state(self._result())
        # Hosts without a hello may have no agent that could answer a release.
        unready = [name for name in sorted(self._pool.open) if name in self._pool.connecting]
        dropped: list[Action] = [do.Abandon(name) for name in unready]
        for name in unready:
            self._pool.gone(self._pool[name])
        released: list[Action] = []
        for name in sorted(self._pool.open):
            if self._pool[name].has_agent:
                released += self.release(self._pool[name], now)
        return dropped + released + self.finish_if_closed()

    def give_up_closing(self, names: Iterable[str]) -> list[Action]:
        late = sorted(names)
        for name in late:
            self._pool.gone(self._pool[name])
        actions: list[Action] = [tell.HostNotClosing(host) for host in late]
        return [*actions, *(do.Abandon(host) for host in late), *self.finish_if_closed()]

    def finish_if_closed(self) -> list[Action]:
        if self.phase is not Phase.CLOSING or self._pool.open:
            return []
        self.phase = Phase.DONE
        result, last = self._result(), self._rounds.round
        actions: list[Action] = []
        if result.exit_code == 0 and last is not None and 1 < last.size == len(last.alone):
            actions = [tell.WorkersAlone(last.size, tuple(sorted(set(last.alone.values()))))]
        return [*actions, do.Finish(result)]

    def _last_ranks(self) -> Iterable[int]:
        """Return the ranks whose ends end the job."""
        if self._spec.end_with_role is not None:
            from hvlaunch.hosts.roles import ranks_of  # noqa: PLC0415 (few jobs have roles)

            return ranks_of(self._spec.roles, self._spec.end_with_role)
        return () if self._spec.end_with_rank is None else (self._spec.end_with_rank,)

    def _result(self) -> JobResult:
        began_at = self._rounds.workers.began_at
        return outcome(
            self.ending,
            self._rounds.round,
            self._interrupted,
            0.0 if began_at is None else self._ended_at - began_at,
            last_ranks=self._last_ranks(),
        )
