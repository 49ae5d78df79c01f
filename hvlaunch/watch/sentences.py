"""Facts, causes and details in English: messages about a job's events are written only here."""

import shlex
import signal
from collections.abc import Mapping, Sequence

from hvlaunch.console.status import count
from hvlaunch.engine import actions as do
from hvlaunch.engine import causes as why
from hvlaunch.engine import events as on
from hvlaunch.engine import facts as tell
from hvlaunch.errors import EXIT_NO_PROGRESS, GaveUp, JobHung
from hvlaunch.hosts.parse import fold_hosts
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.report.text import signal_name
from hvlaunch.watch import assumed, starting

__all__ = ["because", "detail", "launcher_advice", "sentence", "span", "start_detail"]


_ALONE = {
    "torch": "does the script call init_process_group()? (transformers on a CPU: use_cpu=True in TrainingArguments)",
    "mpi4py": "MPI's processes meet only if mpirun starts them (--mpi)",
    "tensorflow": "TensorFlow's strategies take their cluster from TF_CONFIG (docs/reference/environment.md)",
}
"""Probable reasons, by the library that workers have loaded."""


def sentence(fact: tell.Fact) -> str:
    """Return the message for a fact."""
    # By subject, since mypy then checks that every fact has a message.
    match fact:
        case tell.PoolEmpty() | tell.KeepingHosts() | tell.SlotsLacking():
            return _of_pool(fact)
        case tell.SlotsAssumed():
            return assumed(fact)
        case (
            tell.RoundStarting()
            | tell.RoundFormed()
            | tell.RoundEnding()
            | tell.WorkerEndedEarly()
            | tell.WorkerKilled()
            | tell.WorkerStartFailed()
            | tell.WorkerRestarting()
        ):
            return _of_round(fact)
        case tell.Interrupting(number, grace):
            return _interrupted(number, grace)
        case tell.WorkersAlone(workers, libraries):
            return f"{_alone(workers)}: {'; '.join(_ALONE[library] for library in libraries)}"
        case tell.JobHanging(seconds, _, text):
            return JobHung(seconds, text).cause
        case tell.JobGoingOn():
            return "the job is no longer hung, and continues"
        case tell.JobEnding(why.NoProgress() | why.StartsFailed() as cause):
            return f"the job ends: {because(cause)}; do not start it again unchanged (exit code {EXIT_NO_PROGRESS})"
        case tell.JobEnding(cause):
            return f"the job ends: {because(cause)}"
        case _:
            return _of_host(fact)


def _of_host(
    fact: tell.HostNotUsable
    | tell.HostSkipped
    | tell.HostExcluded
    | tell.HostSlow
    | tell.MoveBeginning
    | tell.HostMoving
    | tell.HostMoved
    | tell.HostStays
    | tell.HostSetAside
    | tell.HostTakenIn
    | tell.HostLostAtEnd
    | tell.HostNotClosing
    | tell.HostLeftOver
    | tell.KernelLacks
    | tell.RendezvousUnreachable
    | tell.SharedMachine
    | tell.NetworkChosen,
) -> str:
    match fact:
        case tell.HostNotUsable(problem, retry_in, goes_on):
            effect = "the job continues without it" if goes_on else "the other hosts have too few slots"
            return f"{problem}; {effect}" + ("" if retry_in is None else f"; trying again in {retry_in:g} s")
        case tell.HostSkipped(problem):
            return f"host {problem.host} is skipped: {problem._replace(host=None)}"
        case tell.HostExcluded(host, seconds, cause):
            how_long = "the rest of the job" if seconds is None else f"{seconds:g} s"
            return f"host {host} is excluded for {how_long}: {_of_excluded(host, cause)}"
        case tell.HostSlow(host, factor, kind, evidence):
            times = "" if factor is None else f", {factor:g} times as long as the others"
            return f"host {host} is slow ({kind}{times}): {evidence}"
        case tell.MoveBeginning() | tell.HostMoving() | tell.HostMoved() | tell.HostStays():
            return _of_move(fact)
        case tell.HostSetAside(host, seconds):
            return f"host {host}: no sign of life for {seconds:g} s; the others go on without it, and it may return"
        case tell.HostTakenIn(host):
            return f"host {host}: answers again; its workers may take part in the next round"
        case tell.HostLostAtEnd(problem):
            return str(problem)
        case tell.HostNotClosing(host):
            return f"host {host}: does not answer; its agent still stops the processes that are left there"
        case tell.HostLeftOver(host, left, pids):
            which = f": {', '.join(map(str, pids))}" if pids else ""
            if left == 1:
                return f"host {host}: 1 process of the job can't be killed (it belongs to another user, is frozen, or is stuck in the kernel){which}"
            return f"host {host}: {left} processes of the job can't be killed (they belong to another user, are frozen, or are stuck in the kernel){which}"
        case tell.KernelLacks(host, feature):
            return f"host {host}: {feature}"
        case tell.RendezvousUnreachable(host, tried, port):
            addresses = ", ".join(f"{address}:{port}" for address in tried)
            return f"host {host}: can't reach the driver's rendezvous (tried {addresses}); HVLAUNCH_RENDEZVOUS is not set on it"
        case tell.SharedMachine(hosts):
            return f"{fold_hosts(hosts)} are the same machine, and each uses all of its slots"
        case tell.NetworkChosen(_, reasons):
            return f"--nccl auto: {'; '.join(reasons)}"


def _of_move(fact: tell.MoveBeginning | tell.HostMoving | tell.HostMoved | tell.HostStays) -> str:
    match fact:
        case tell.MoveBeginning(host, to, reason):
            place = "another host" if to is None else f"host {to}"
            return (
                f"host {host} is to move to {place} ({reason or 'hvlaunch move'}): workers start there first"
            )
        case tell.HostMoving(host, to):
            return f"host {host}: its workers leave at their next commit, for {fold_hosts(to)}"
        case tell.HostMoved(host, number, seconds):
            return f"host {host} is free after {seconds:.1f} s: round {number} runs without it"
        case tell.HostStays(host, reason, _):
            return f"host {host} is not moved: {reason}"


def _of_excluded(host: str, cause: why.Cause) -> str:
    """Return the cause of an exclusion, without the host's name: the message begins with the name."""
    # because() would name the host again.
    if isinstance(cause, why.HostProblem) and cause.problem.host == host:
        return cause.problem.cause
    return because(cause)


def _of_pool(fact: tell.PoolEmpty | tell.KeepingHosts | tell.SlotsLacking) -> str:
    match fact:
        case tell.PoolEmpty(keeps_hosts):
            if keeps_hosts:
                return "the pool is empty now: keeping the current hosts"
            return "no hosts in the pool yet: waiting for the first"
        # The words of a discovery script stand on lines of their own, behind the message.
        case tell.KeepingHosts(problem):
            cause, colon, its_words = str(problem).partition(":\n")
            return f"{cause}; keeping the current hosts{colon}{its_words}"
        case tell.SlotsLacking(least, available, seconds):
            needs = f"{count(least, 'slot')} (--min-np)"
            are = "there is" if available == 1 else "there are"
            return f"waiting for {needs}, for {seconds:g} s at most: {are} {available}"


def _of_round(
    fact: tell.RoundStarting
    | tell.RoundFormed
    | tell.RoundEnding
    | tell.WorkerEndedEarly
    | tell.WorkerKilled
    | tell.WorkerStartFailed
    | tell.WorkerRestarting,
) -> str:
    match fact:
        case tell.WorkerRestarting(end, workers, delay):
            soon = f" in {delay:g} s" if delay else ""
            if workers == 1:
                return f"{because(end)}: it starts again{soon}"
            role = end.role.partition(":")[0]
            return f"{because(end)}: all {workers} workers of {role} start again{soon}"
        case tell.RoundStarting():
            return starting(fact)
        case tell.RoundFormed(number, workers, hosts, cause):
            after = "" if cause is None else f" ({because(cause)})"
            return f"round {number}: {count(workers, 'worker')} on {count(len(hosts), 'host')}{after}"
        case tell.RoundEnding(number, cause):
            return f"round {number} ends: {because(cause)}"
        case tell.WorkerEndedEarly(rank, host):
            return f"rank {rank} on host {host} ended with exit code 0 before its training was done, which ends the job"
        case tell.WorkerKilled(cause):
            return f"{because(cause)}: it is killed"
        case tell.WorkerStartFailed(end, _, retry_in):
            return f"{because(end)} before it got a rank; another worker starts in its slot in {retry_in:g} s"


def _alone(workers: int) -> str:
    return (
        f"none of the {workers} workers contacted another, at MASTER_PORT or at the rendezvous. They may"
        f" have been {workers} single jobs"
    )


def _interrupted(number: int, grace: float) -> str:
    """Return the message for a signal to hvlaunch. SIGPIPE, from hvlaunch's own stdout, comes only once."""
    # No user sends SIGPIPE, and there is no second one to kill with.
    if number == signal.SIGPIPE:
        return f"the reader of the output is gone: workers have {grace:g} s to end"
    another = "SIGTERM" if number == signal.SIGHUP else "a second one"  # see driver/process.py
    return f"got {signal_name(number)}: workers have {grace:g} s to end; {another} kills them at once"


def because(cause: why.Cause) -> str:
    """Return a cause in words, for use after a colon or in parentheses, and in messages to workers."""
    match cause:
        case why.WorkerEnded() | why.WorkerHangs() | why.WorkerLeft():
            return _of_worker(cause)
        case why.WorkersFail(last):
            return f"its workers fail ({because(last)})"
        case why.NoCommit(seconds):
            return f"no commit for {seconds:g} s"
        case why.JobHung(seconds, text):
            return JobHung(seconds, text).cause
        case why.NotMet(ranks, hosts, seconds):
            workers = f"{span('rank', ranks)} on {fold_hosts(hosts)}"
            return f"{workers} did not meet the other workers of the round within {seconds:g} s"
        case why.HostProblem(problem):
            host = f"host {problem.host}: " if problem.host is not None else ""
            return f"{host}{problem.cause}"
        case why.HostSilent(host, seconds):
            return f"host {host} has given no sign of life for {seconds:g} s"
        case why.RankDone(rank, host):
            return f"rank {rank} on host {host} is done (--end-with-rank)"
        case why.RoleDone(role):
            return f"role {role} is done (--end-with-role)"
        case why.TrainingDone():
            return "training is done"
        case why.NewTraining():
            return "its training is done, and another training begins"
        case why.SlotGone(host):
            return f"host {host} has left the pool, or has fewer slots"
        case why.WorkersMoved():
            return "its workers had moved to another host, and the job needs it again"
        case why.WorkersToLeave(hosts):
            return f"workers on {fold_hosts(hosts)} have to leave"
        case why.MoreWorkers(workers):
            return f"{workers} more worker" if workers == 1 else f"{workers} more workers"
        case why.RestartsUsedUp(limit):
            return GaveUp(restarts=limit).cause
        case why.NoProgress(times, suspect):
            return GaveUp(times=times, suspect=suspect).cause
        case why.StartsFailed(times):
            return f"the worker of a slot failed {times} times in a row before it got a rank"


def _of_worker(cause: why.WorkerEnded | why.WorkerHangs | why.WorkerLeft) -> str:
    worker = f"rank {cause.rank} on host {cause.host}"
    if isinstance(cause, why.WorkerEnded) and cause.role:
        worker = f"{cause.role} (rank {cause.rank}) on host {cause.host}"
    match cause:
        case why.WorkerEnded(not_started=str(reason)):
            return f"{worker} could not be started: {reason}"
        case why.WorkerEnded(signal=int(number)):
            return f"{worker} was killed by {signal_name(number)}"
        case why.WorkerEnded(code=code):
            return f"{worker} ended with exit code {code}"
        case why.WorkerHangs(how="silent", seconds=float(seconds)):
            return f"{worker} has been silent for {seconds:g} s"
        case why.WorkerHangs(how="stopped"):
            return f"{worker} is stopped"
        case why.WorkerHangs():
            return f"{worker} has not left the round in time"
        case why.WorkerLeft(words=words):
            return f"{worker} has left the round" + (f": {words}" if words else "")


# With --verbose


def detail(event: on.Event, elapsed: float) -> str | None:
    """Return the message of --verbose for an event, `elapsed` seconds into the job; None for most events."""
    match event:
        case on.HostConnected(host):
            return f"host {host}: connected after {elapsed:.2f} s"
        case on.HostReady(host, facts):
            gpus = "" if facts.gpus is None else f", {count(facts.gpus, 'GPU')}"
            has = f"Python {facts.python}, {count(facts.cpus, 'CPU')}{gpus}"
            return f"host {host}: ready after {elapsed:.2f} s: {has}"
        case on.RendezvousReached(host, address, tried, relay_port) if relay_port is not None:
            reason = f" (can't reach it at {', '.join(tried)})" if tried else ""
            return f"host {host}: its agent relays to the rendezvous, at {address}:{relay_port}{reason}"
        case on.RendezvousReached(host, address) if address is not None:
            return f"host {host}: reaches the rendezvous at {address}"
        case on.HostProbed(host, target, address) if address is not None:
            return f"host {host}: reaches host {target} at {address}"
        case on.HostParting(host, traceback=traceback) if traceback:
            return "\n".join(f"host {host}: | {line}" for line in traceback.splitlines())
        case on.HostClosed(host):
            return f"host {host}: closed"
        case _:
            return None


def start_detail(start: do.Start) -> str:
    """Return the message of --verbose about the network of a host's workers."""
    network = start.network
    interface = f" on {network.interface}" if network.interface else ""
    chosen = "".join(f", {name}={value}" for name, value in (network.variables or {}).items())
    master = f"MASTER_ADDR={network.master_addr} MASTER_PORT={network.master_port}{interface}{chosen}"
    if network.rendezvous is None:
        return f"host {start.host}: {master}, no rendezvous"
    address, port = network.rendezvous
    return f"host {start.host}: {master}, rendezvous at {address}:{port}"


def span(noun: str, numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-3`, `pids 12,14`."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    # A range is shorter, and the usual case: ranks of a host are consecutive.
    if list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{noun}s {numbers[0]}-{numbers[-1]}"
    return f"{noun}s {','.join(map(str, numbers))}"


class _Launcher(NamedTuple):
    flag: str = ""
    """The option of hvlaunch in place of the launcher, if any."""
    meant: tuple[str, ...] = ()
    """Beginnings of options that ask for a launcher on each host."""


_TORCHRUN = _Launcher(meant=("--nnodes", "--node", "--rdzv"))
_MPIRUN = _Launcher("--mpi ")
_LAUNCHERS: Mapping[str, _Launcher] = {
    "torchrun": _TORCHRUN,
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCHRUN,
    "accelerate": _Launcher(meant=("--num_machines", "--machine_rank")),
    "deepspeed": _Launcher(meant=("--no_ssh", "--node_rank", "--hostfile")),
    "mpirun": _MPIRUN,
    "mpiexec": _MPIRUN,
    "horovodrun": _Launcher("--horovod "),
    "srun": _Launcher("--srun "),
}


def launcher_advice(command: Sequence[str]) -> str | None:
    """Return advice about a command that is a launcher itself; None for other commands."""
    # Each worker would start a job of its own. With options for one launcher on each host, that is meant.
    # Scripts of launchers are started by path, by name, or by `python -m`.
    name = command[0].rpartition("/")[2]
    if name.startswith("python") and command[1:2] == ("-m",):
        name = "".join(command[2:3])
    launcher = _LAUNCHERS.get(name)
    if launcher is None or (name == "accelerate" and command[1:2] != ("launch",)):
        return None
    if any(word.startswith(launcher.meant) for word in command[1:] if launcher.meant):
        return None
    scripts = [number for number, word in enumerate(command) if number and word.endswith(".py")]
    script = f"python {shlex.join(command[scripts[0] :])}" if scripts else "python train.py"
    return f"{name} starts a job of its own in each worker; write: hvlaunch … {launcher.flag}{script}"
