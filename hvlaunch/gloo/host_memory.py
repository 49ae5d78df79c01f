"""A job's memory of its hosts: the ledger is read at the start, verdicts are collected, and written at the end.

A verdict must speak against one host. A problem of more than half of the hosts is the network's, the script's or the
user's fault.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from signal import SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV
from typing import TYPE_CHECKING

from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.engine.actions import Action, Finish
from hvlaunch.errors import Problem
from hvlaunch.job import JobResult, WorkerExit
from hvlaunch.outside.ledger import HostRecord, Ledger, LedgerEntry
from hvlaunch.watch.rounds import Ranks

if TYPE_CHECKING:
    from hvlaunch.report.evidence import Evidence
    from hvlaunch.report.failure_report import FailureReport

__all__ = ["HostMemory", "verdict_on_worker"]

_OF_PROBLEMS: Mapping[str, str] = {
    "AgentFailed": "not started",
    "CheckFailed": "check failed",
    "ConnectFailed": "not started",
    "StartTimeout": "not started",
    "HostLost": "lost",
    "ProtocolBroken": "lost",
    "ChannelGarbled": "lost",
}
"""Verdicts by the kind of an error. Other errors, such as a refused login or an unknown name, are the user's to mend."""
_GPU_FAULT = re.compile(
    r"uncorrectable (?:ECC|NVLink) error|ECC_UNCORRECTABLE|fallen off the bus|GPU is lost|\bXid\b",
    re.IGNORECASE,
)
_NETWORK = re.compile(
    r"unhandled system error|ncclSystemError|transport retry counter exceeded|IBV_WC_\w*ERR"
)
_CRASHES = (SIGSEGV, SIGBUS, SIGILL, SIGFPE)
_MOST_NAMED = 5


def verdict_on_worker(worker: WorkerExit, evidence: "Evidence", *, lacks_file: bool = False) -> str | None:
    """Return the verdict on the host of the worker with the first failure; None for an error of the script.

    `lacks_file`: other hosts have the file or module that the worker did not find.
    """
    from hvlaunch.report.diagnosis import kind  # noqa: PLC0415 (after a failure)

    words = "\n".join(evidence.lines)
    if _GPU_FAULT.search(words):
        return "gpu fault"
    if worker.oom_killed:
        return "memory"
    if worker.stopped or worker.look == "consequence":
        return None
    if _NETWORK.search(words):
        return "network error"
    if worker.signal is not None:
        return "crash" if worker.signal in _CRASHES else "killed" if worker.signal == SIGKILL else None
    match kind(worker, evidence):
        case "disk full":
            return "disk full"
        case "missing module" | "missing file" if lacks_file:
            return "lacks a file"
        case _:
            return None


class HostMemory:
    """A watcher, for the loop's thread. `say` prints a message."""

    def __init__(self, ledger: Ledger, job_id: str, hosts: Sequence[str], say: Callable[[str], None]) -> None:
        self._ledger = ledger
        self._job_id = job_id
        self._hosts = hosts
        self._say = say
        self._ranks = Ranks()
        self._suspects: Mapping[str, HostRecord] = {}
        self._greeted: set[str] = set()
        self._machines: dict[str, str] = {}
        self._seen: set[str] = {*hosts}
        """Names of all hosts of the job so far."""
        self._verdicts: dict[tuple[str, str], str] = {}
        """Details by host and verdict."""
        self._excluded: dict[str, str] = {}
        """Newest failure on each host that an elastic job has excluded for its workers."""
        self._hang: tuple[str, str] | None = None

    def greet(self, *, avoids: bool) -> None:
        """Name suspects among the job's hosts, in a single line. `avoids`: the job uses them last."""
        self._suspects = self._ledger.suspects(time.time())
        self._name([host for host in self._hosts if host in self._suspects], avoids=avoids)

    def _name(self, hosts: Sequence[str], *, avoids: bool = True) -> None:
        if not hosts:
            return
        self._greeted.update(hosts)
        records = [f"{host} ({self._suspects[host].why})" for host in hosts[:_MOST_NAMED]]
        more = f" and {len(hosts) - _MOST_NAMED} more" if len(hosts) > _MOST_NAMED else ""
        hint = "" if avoids else "; try: --avoid-suspects, which uses such hosts last"
        self._say(f"failed in earlier jobs (hvlaunch hosts): {', '.join(records)}{more}{hint}")

    def watch(self, event: on.Event, actions: Sequence[Action], _now: float) -> None:
        """Take note of a turn."""
        match event:
            case on.HostReady(host, facts):
                self._seen.add(host)
                self._machines[host] = facts.machine_id or ""
                # A host that joins later, such as one of a discovery script.
                self._name([host] if host in self._suspects.keys() - self._greeted else [])
            case on.HostFailed(host, problem):
                self._note_problem(problem)
            case on.JobHangs(_, ranks, text):
                places = self._ranks.places()
                hosts = {places[rank][0] for rank in ranks if rank in places}
                self._hang = (hosts.pop(), text) if len(hosts) == 1 else None
            case on.JobGoesOn():
                self._hang = None
            case _:
                pass
        if actions:
            self._ranks.update(actions)
            for action in actions:
                self._note_action(action)

    def _note_action(self, action: Action) -> None:
        match action:
            case tell.HostNotUsable(problem) | tell.HostSkipped(problem):
                self._note_problem(problem)
            case tell.HostExcluded(_, _, why.HostProblem(problem)):
                self._note_problem(problem)
            case tell.HostSlow(host, _, _, evidence):
                self._verdicts[host, "slow"] = evidence
            case tell.HostExcluded(host, _, why.WorkersFail(cause)):
                self._excluded[host] = _words(cause)
            case tell.RoundEnding(_, why.WorkerHangs(_, host) as cause) | tell.WorkerKilled(
                why.WorkerHangs(_, host) as cause
            ):
                self._verdicts[host, "hang"] = _words(cause)
            case tell.RoundEnding(_, why.NotMet(_, (host,), _) as cause):
                self._verdicts[host, "hang"] = _words(cause)
            case Finish(result) if result.error is not None:
                for problem in result.error.errors or (result.error,):
                    self._note_problem(problem)
            case _:
                pass

    def _note_problem(self, problem: Problem) -> None:
        if problem.host is None:
            return
        self._seen.add(problem.host)
        if verdict := _OF_PROBLEMS.get(problem.kind):
            self._verdicts[problem.host, verdict] = problem.cause

    def keep(self, result: JobResult, report: "Callable[[JobResult], FailureReport]") -> None:
        """Write to the ledger at the job's end. A defect costs the entries, and not the job."""
        try:
            if result.exit_code != 0 or self._excluded:
                self._note_failures(report(result))
            self._write(result)
        except Exception as error:  # noqa: BLE001 (see above)
            self._say(
                f"internal error: {type(error).__name__}: {error}; nothing of this job's hosts is remembered"
            )

    def _note_failures(self, report: "FailureReport") -> None:
        """Note a verdict on the host of each round's first failure."""
        from hvlaunch.engine.round import cause_of  # noqa: PLC0415 (after a failure)

        for failed_round in report.rounds:
            ends = dict(failed_round.failures)
            first = cause_of(ends)
            if first is not None:
                self._note_worker(first, ends[first])
        if (cause := report.cause) is not None:
            lacks_file = cause.missing is not None and bool(cause.missing.having)
            self._note_worker(cause.worker, cause.evidence, lacks_file=lacks_file)

    def _note_worker(self, worker: WorkerExit, evidence: "Evidence", *, lacks_file: bool = False) -> None:
        verdict = verdict_on_worker(worker, evidence, lacks_file=lacks_file)
        if verdict is not None:
            self._verdicts[worker.host, verdict] = next(reversed(evidence.lines), "")

    def _write(self, result: JobResult) -> None:
        now = time.time()
        if self._hang is not None:
            host, text = self._hang
            self._verdicts[host, "hang"] = text
        # The other hosts did better with the same script, so it was the host. Without a good end nobody knows.
        if result.exit_code == 0:
            self._verdicts.update({(host, "workers fail"): text for host, text in self._excluded.items()})
        shared = {machine for machine, number in Counter(self._machines.values()).items() if number > 1}
        machines = {host: "" if machine in shared else machine for host, machine in self._machines.items()}
        self._ledger.note_machines(machines, self._job_id, now)
        self._ledger.append(
            LedgerEntry(now, host, machines.get(host, ""), verdict, self._job_id, detail)
            for host, verdict, detail in self._counting()
        )

    def _counting(self) -> Iterator[tuple[str, str, str]]:
        """Return host, verdict and detail, except for problems of more than half of the hosts."""
        numbers = Counter(verdict for _, verdict in self._verdicts)
        for (host, verdict), detail in self._verdicts.items():
            number = numbers[verdict]
            if number == 1 or 2 * number <= len(self._seen):
                yield host, verdict, detail


def _words(cause: why.Cause) -> str:
    from hvlaunch.watch.sentences import because  # noqa: PLC0415 (after a failure)

    return because(cause)
