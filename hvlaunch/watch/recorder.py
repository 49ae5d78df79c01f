"""The recorder of a job's events as objects, for --events and other programs; docs/interfaces/events.md describes them for users."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from hvlaunch import __version__
from hvlaunch.engine import actions as do
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.causes import Cause
from hvlaunch.errors import Problem
from hvlaunch.job import JobResult, JobSpec
from hvlaunch.report.bill import Bill
from hvlaunch.report.text import signal_name
from hvlaunch.watch.sentences import because, sentence

__all__ = ["Recorder", "result_record"]

Record = dict[str, object]


class Recorder:
    """Passes a record of each event, and of each action with a meaning for users, to `write`. A watcher.

    No record has the command, environment or keys: records contain no secret. `rank_of` returns the rank of a worker, by
    host, slot and start. `wall` returns the time in seconds since 1970.
    """

    def __init__(
        self,
        spec: JobSpec,
        job_id: str,
        write: Callable[[Mapping[str, object]], None],
        rank_of: Callable[[str, int, int], int | None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._spec = spec
        self._job_id = job_id
        self._write = write
        self._wall = wall
        self._rank_of = rank_of
        self._started_at: float | None = None
        """The time of the first workers' start."""

    def watch(self, event: on.Event, actions: Sequence[do.Action], now: float) -> None:
        """Record an event at `now` and its actions."""
        # One time for all records of a turn: they happened at once.
        stamp = {"time": _utc(self._wall()), "job": self._job_id}
        for record in self._of_event(event):
            self._write(stamp | record)
        for action in actions:
            for record in self._of_action(action, now):
                self._write(stamp | record)

    def _of_event(self, event: on.Event) -> Iterator[Record]:
        match event:
            case on.Began():
                hosts = [host.name for host in self._spec.hosts]
                yield {"type": "job_started", "version": __version__, "np": self._spec.np, "hosts": hosts}
            case on.HostConnected(host):
                yield {"type": "host_connected", "host": host}
            case on.HostReady(host, facts):
                machine = {"python": facts.python, "cpus": facts.cpus, "gpus": facts.gpus}
                yield {"type": "host_ready", "host": host, **machine}
            case on.HostFailed(host, error):
                yield {"type": "host_failed", "host": host, **_error(error)}
            case on.HostGone(host, error):
                yield {"type": "host_lost", "host": host, **_error(error)}
            case on.HostParting(host, error):
                yield {"type": "host_parting", "host": host, **_error(error)}
            case on.HostClosed(host, left):
                yield {"type": "host_closed", "host": host, "left": left}
            case on.HostNoise(host, text):
                yield {"type": "host_noise", "host": host, "text": text}
            case on.HostAway(host, cause):
                yield {"type": "host_away", "host": host, "cause": cause}
            case on.HostBack(host, seconds):
                yield {"type": "host_back", "host": host, "seconds": round(seconds, 3)}
            case on.RendezvousReached(host, address, tried, relay_port):
                way = {"address": address, "tried": list(tried), "relayed": relay_port is not None}
                yield {"type": "rendezvous_reached", "host": host, **way}
            case on.HostProbed(host, target, address):
                yield {"type": "host_probed", "host": host, "target": target, "address": address}
            case on.HostsDiscovered(hosts):
                pool = [{"host": host.name, "slots": host.slots} for host in hosts]
                yield {"type": "hosts_discovered", "hosts": pool}
            case on.DiscoveryFailed(error):
                yield {"type": "discovery_failed", **_error(error)}
            case on.WorkerStarted() | on.WorkerNotStarted() | on.WorkerExited() | on.WorkerSuspended():
                yield self._of_worker(event)
            case on.WorkerAsked(host, slot, start, number, commit, cause):
                worker = {"host": host, "rank": self._rank_of(host, slot, start), "slot": slot}
                reason = {"after_round": number, "commit": commit, "cause": cause}
                yield {"type": "worker_asked", **worker, **reason}
            case on.Interrupted(number):
                yield {"type": "interrupted", "signal": signal_name(number)}
            case on.ThreadFailed(problem):
                yield {"type": "thread_failed", **_error(problem)}
            case on.UserSignal(number):
                yield {"type": "user_signal", "signal": signal_name(number)}
            # No meaning for users: the clock, and stages of the status line.
            case on.Tick() | on.HostStage() | on.HostPreparing() | on.MoveWanted() | on.HostJudged():
                pass

    def _of_worker(
        self, event: on.WorkerStarted | on.WorkerNotStarted | on.WorkerExited | on.WorkerSuspended
    ) -> Record:
        rank = self._rank_of(event.host, event.slot, event.start)
        worker = {
            "host": event.host,
            "rank": rank,
            "slot": event.slot,
            "start": event.start,
            "round": event.round,
        }
        match event:
            case on.WorkerStarted():
                return {"type": "worker_started", **worker, "pid": event.pid}
            case on.WorkerSuspended():
                return {"type": "worker_suspended", **worker}
            case on.WorkerNotStarted():
                return {"type": "worker_not_started", **worker, "code": event.code, "cause": event.cause}
            case _:
                return {
                    "type": "worker_exited",
                    **worker,
                    "code": event.code,
                    "signal": None if event.signal is None else signal_name(event.signal),
                    "elapsed": round(event.at - (self._started_at or event.at), 3),
                    "max_rss": event.max_rss,
                    "oom_killed": event.oom_killed,
                    "port_taken_by": event.port_taken_by,
                    "look": event.look,
                }

    def _of_action(self, action: do.Action, now: float) -> Iterator[Record]:
        match action:
            case do.Start():
                # Times of exits count from the first start of the job, not from that of their round.
                self._started_at = now if self._started_at is None else self._started_at
                yield {
                    "type": "workers_starting",
                    "host": action.host,
                    "round": action.round,
                    "ranks": [launch.place.rank for launch in action.launches],
                    "master_addr": action.network.master_addr,
                    "master_port": action.network.master_port,
                    "interface": action.network.interface,
                }
            case do.Assign(number, launch):
                place = launch.place
                worker = {"host": place.host, "rank": place.rank, "slot": launch.slot, "start": launch.start}
                yield {"type": "worker_placed", **worker, "round": number, "size": place.size}
            case do.Leave(host, slot, start, cause):
                rank = self._rank_of(host, slot, start)
                worker = {"host": host, "rank": rank, "slot": slot, "start": start}
                yield {"type": "worker_dismissed", **worker, **_cause(cause)}
            case do.Break(number, cause):
                yield {"type": "round_broken", "round": number, **_cause(cause)}
            case do.Change(number, cause):
                yield {"type": "round_changing", "round": number, **_cause(cause)}
            case do.GroupState(state, number):
                yield {"type": "group_state", "state": state, "round": number}
            case do.Stop(host, steps, slots):
                orders = [{"signal": signal_name(step.signal), "after": step.after} for step in steps]
                which = None if slots is None else list(slots)
                yield {"type": "workers_stopping", "host": host, "slots": which, "steps": orders}
            case do.Finish(result):
                yield {"type": "job_ended", **result_record(result)}
            case do.Connect() | do.Probe() | do.Signal() | do.TakeStacks() | do.Release() | do.Abandon():
                pass
            # Facts have their message and their fields as a record, without a table of their own.
            case _:
                yield {"type": _name(action), **_fields(action), "text": sentence(action)}


def result_record(result: JobResult, bill: Bill | None = None) -> Record:
    """Return the end of a job as an object, with what the job took if that is known."""
    failure, victim, interrupted = result.failure, result.first_victim, result.interrupted
    return {
        "exit_code": result.exit_code,
        "has_run": has_run(result),
        "elapsed": round(result.elapsed, 3),
        "rank": None if failure is None else failure.rank,
        "host": None if failure is None else failure.host,
        "first_victim": None if victim is None else victim.rank,
        "interrupted": None if interrupted is None else signal_name(interrupted),
        **(_error(result.error) if result.error is not None else {"error": None}),
        **({} if bill is None else {"bill": bill._asdict()}),
    }


def has_run(result: JobResult) -> bool:
    """Return whether a worker of the last round was started."""
    failed = sum(1 for worker in result.exits if worker.not_started is not None)
    return result.size > len(result.never_started) + failed


def _error(problem: Problem) -> Record:
    return {"error": problem.kind, "cause": problem.cause, "hint": problem.hint}


_KEYS = {"feature": "what"}
"""Keys of docs/interfaces/events.md that are not named as the fields."""


def _fields(fact: tell.Fact | Cause) -> Record:
    """Return the fields by name. A field with fields of its own, a cause or a problem, contributes these."""
    record: Record = {}
    for field, value in zip(fact._fields, fact, strict=True):
        name = _KEYS.get(field, field)
        # The order matters: a problem and a cause are tuples too.
        match value:
            case Problem():
                record |= {"host": value.host} if value.host is not None else {}
                record |= _error(value)
            case _ if name == "cause":
                record |= _cause(cast("Cause | None", value))
            case tuple() if hasattr(value, "_fields"):
                record |= _fields(cast("Cause", value))
            case int() if name == "signal":
                record[name] = signal_name(value)
            case tuple():
                record[name] = list(value)
            case _:
                record[name] = value
    return record


def _cause(cause: Cause | None) -> Record:
    """Return a cause in words, and as data."""
    if cause is None:
        return {"cause": None, "reason": None}
    return {"cause": because(cause), "reason": {"kind": _name(cause), **_fields(cause)}}


def _name(fact: tell.Fact | Cause) -> str:
    """Return the record's type: `host_excluded` for HostExcluded."""
    return re.sub("(?<!^)([A-Z])", r"_\1", type(fact).__name__).lower()


def _utc(seconds: float) -> str:
    """Return the time as RFC 3339, to the millisecond."""
    whole, milliseconds = divmod(int(seconds * 1000), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{milliseconds:03}Z"
