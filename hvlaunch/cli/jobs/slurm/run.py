"""A batch job that runs: what its script gets and writes, Slurm's variables, and the jobs of hvlaunch that its `srun`s become."""

import getpass
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import IO

from hvlaunch.agent.quick import prctl
from hvlaunch.cli.environment import SET_BY_HVLAUNCH
from hvlaunch.cli.jobs.slurm.script import (
    BatchOptions,
    GivenOption,
    expanded,
    read_number,
    read_options,
    read_submission,
)
from hvlaunch.cli.process import complain
from hvlaunch.console.status import duration
from hvlaunch.engine.codec import decode, encode
from hvlaunch.errors import EXIT_HOSTS, BadUsage, LeasesTaken
from hvlaunch.gloo.batch import Allocated, BatchJob, Body, ProgramAnswer, ProgramRequest, StepLine
from hvlaunch.gloo.queued import as_queued
from hvlaunch.hosts.local import matcher
from hvlaunch.hosts.parse import host_set, parse_hosts
from hvlaunch.hosts.templates import escaped
from hvlaunch.job import ConsoleOptions, JobSpec, LeaseOptions, QueuedAs, SyncOptions, Templates
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.outside.queue import Queue, QueueEntry, QueueNotWritten
from hvlaunch.owners import reason, write_whole

__all__ = [
    "BatchRun",
    "SlurmStep",
    "exported",
    "job_variables",
    "run_step",
    "scontrol",
    "step_of",
    "task_variables",
]

_PR_SET_PDEATHSIG = 1
_STDERR = 2


class BatchRun:
    """A batch job of the queue, or a task of an array, from the lease of its hosts to its end."""

    def __init__(self, queue: Queue, number: str) -> None:
        """Raises BadUsage, QueueNotWritten."""
        self._queue = queue
        self._number = number
        array, _, task = number.partition("_")
        self._folder = queue.directory / array
        self._submission, spec = read_submission(self._folder)
        self._options, _ = self._submission.options()
        job = queue.read().jobs[number]
        self._entry = QueueEntry(queue, number, job.job)
        self._id = int(array) + (self._options.array.index(int(task)) if task else 0)
        name = f"{self._id}" if self._options.job_name is None else f"{self._options.job_name} ({self._id})"
        queued = QueuedAs(queue.directory, number, job.job)
        spec = as_queued(spec, self._entry, queued, may_wait=not job.is_backfill)
        self._spec = replace(spec, name=name)
        cwd = self._submission.cwd
        self._cwd = str(Path(cwd, self._options.chdir or ""))
        self._job = self._job_itself(array, task)
        self._variables: dict[str, str] = {}
        self._exported: dict[str, str] = {}
        self._output = _Output()
        self._steps = 0
        self._told: set[str] = set()
        with suppress(OSError):
            # Relative names in options are of the submission's directory, if it is still there.
            os.chdir(cwd)

    def _job_itself(self, array: str, task: str) -> dict[str, str]:
        """Return the variables of the job that do not depend on its hosts."""
        submission, options = self._submission, self._options
        job = {
            "SLURM_JOB_ID": str(self._id),
            "SLURM_JOBID": str(self._id),
            "SLURM_JOB_NAME": options.job_name or Path(submission.name).name,
            "SLURM_JOB_USER": getpass.getuser(),
            "SLURM_JOB_UID": str(os.getuid()),
            "SLURM_SUBMIT_DIR": submission.cwd,
            "SLURM_SUBMIT_HOST": os.uname().nodename,
        }
        if task:
            job |= {
                "SLURM_ARRAY_JOB_ID": array,
                "SLURM_ARRAY_TASK_ID": task,
                "SLURM_ARRAY_TASK_COUNT": str(len(options.array)),
                "SLURM_ARRAY_TASK_MIN": str(options.array[0]),
                "SLURM_ARRAY_TASK_MAX": str(options.array[-1]),
            }
        return job

    def run(self) -> int:
        """Return the script's exit code, or that of the first problem of a host."""
        about = {"id": self._spec.queued and self._spec.queued.job_id, "began": time.time()}
        job = BatchJob(self._spec, about, self._begin, self._answer, self._output.write)

        def stop(*_: object) -> None:
            if cause := self._cause_of_stop():
                self._tell(cause)
            job.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        code: int | None = None
        try:
            code, problems = job.run(sys.stderr.buffer)
            for text in dict.fromkeys(map(str, problems.values())):
                self._tell(text)
            if code is None:
                code = next((problem.exit_code for problem in problems.values()), EXIT_HOSTS)
            # The queue shows this, and not that a process of this machine has failed.
            causes = [
                f"host {problem.host}: {problem.cause}" if problem.host else problem.cause
                for problem in problems.values()
            ]
            self._entry.note_failure(code, "; ".join(dict.fromkeys(causes)))
        except KeyboardInterrupt:
            code = 128 + signal.SIGTERM
            self._output.write(2, b"hvlaunch: the job was stopped before it began\n")
        finally:
            self._open_output("")
        return code

    def _tell(self, text: str) -> None:
        """Write a message into the job's log, and into the script's output."""
        complain(text)
        self._output.write(2, f"hvlaunch: {text}\n".encode(errors="backslashreplace"))

    def _cause_of_stop(self) -> str:
        """Return why the queue stops the job; empty for another's stop."""
        with suppress(QueueNotWritten):
            job = self._queue.read().jobs.get(self._number)
            if job is not None and job.is_removed:
                return "the job is stopped: it was removed from the queue"
            limit = None if job is None else job.time_limit
            if job is not None and limit is not None and time.time() >= job.since + limit:
                return f"the job is stopped: its time limit of {duration(limit)} is over"
        return ""

    def _begin(self, hosts: Sequence[Allocated]) -> Body:
        """Raises LeasesTaken, QueueNotWritten."""
        # With leases the job has begun already.
        if not self._entry.begin({}):
            raise LeasesTaken("the queue has called the job back", hint="hvlaunch queue ls")
        self._open_output(hosts[0].node)
        self._variables = job_variables(self._options, self._job, hosts)
        self._exported = exported(self._options.export, self._spec.env, os.environ)
        interpreter = self._submission.script.partition("\n")[0][2:].split(None, 1)
        return Body(
            self._submission.script,
            tuple(word.strip() for word in interpreter),
            self._submission.arguments,
            self._cwd if hosts[0].project is None else str(Path(hosts[0].project, self._options.chdir or "")),
            {**self._exported, **self._variables},
        )

    def _open_output(self, node: str) -> None:
        default = "slurm-%A_%a.out" if self._options.array else "slurm-%j.out"
        values = _patterns_of(self._job, node)
        output, error = (
            None if name is None else str(Path(self._cwd, expanded(name, values)))
            for name in (self._options.output or default, self._options.error)
        )
        self._output.open(output or "", error, appends=self._options.appends)

    def _answer(self, request: ProgramRequest, hosts: Sequence[Allocated]) -> ProgramAnswer | StepLine:
        """Return the answer to `scontrol`, or how the step of an `srun` is started."""
        environ = {**self._exported, **self._variables, **request.env}
        for name in request.removed:
            environ.pop(name, None)
        try:
            if request.program == "scontrol":
                return ProgramAnswer(scontrol(request.words, environ, self._variables))
            number, self._steps = self._steps, self._steps + 1
            step = step_of(request.words, environ, hosts, number)
        except BadUsage as error:
            return ProgramAnswer(f"{error}\n", 1)
        text = ", ".join(name for name in step.unused if name not in self._told)
        self._told.update(step.unused)
        if text:
            complain(f"srun: not used here: {text}")
        path = self._folder / f"step-{self._id}-{number}"
        leased = {host.host: host.leased for host in hosts if host.leased is not None}
        passed = {name: value for name, value in environ.items() if name not in _OF_THE_FIRST_HOST}
        if "CUDA_VISIBLE_DEVICES" in request.env:
            passed["CUDA_VISIBLE_DEVICES"] = request.env["CUDA_VISIBLE_DEVICES"]
        cwd = request.cwd if step.cwd is None else str(Path(request.cwd, step.cwd))
        about = {
            "spec": encode(
                JobSpec, replace(self._spec, sync=_synced(self._spec.sync, hosts[0].project, cwd))
            ),
            "command": step.command,
            "counts": step.counts,
            "cwd": cwd,
            "env": {**self._variables_of_job(), **exported(step.exports, passed, environ)},
            "places": {**step.variables, **task_variables(passed)},
            "given": leased if self._options.gpus_per_node and leased else None,
            "gpus": step.gpus_per_task,
            "prefix": "{rank}: " if step.is_labelled else "",
            "map_by": "node" if step.by_node else "slot",
            "stdin": bool(request.stdin),
            "name": f"{self._id}.{number}",
            "files": step.files if step.has_own_files else None,
        }
        write_whole(path, json.dumps(about).encode(), 0o600)
        line = [sys.executable, "-m", "hvlaunch", "sbatch", "--step", str(path)]
        return StepLine(line, (None, None) if step.has_own_files else step.files)

    def _variables_of_job(self) -> dict[str, str]:
        return {name: value for name, value in self._variables.items() if name not in _OF_THE_FIRST_HOST}


_OF_THE_FIRST_HOST = frozenset(["CUDA_VISIBLE_DEVICES"])
"""Variables of the script that other hosts have values of their own for."""


def _synced(sync: SyncOptions | None, project: str | None, cwd: str) -> SyncOptions | None:
    """Return the tree of a step, with the script's place in its copy as the place of the start on every host."""
    if sync is None or project is None:
        return sync
    below = os.path.normpath(Path(sync.below, os.path.relpath(cwd, project)))
    return sync if below.startswith("..") else sync._replace(below="" if below == "." else below)


class _Output:
    """The files of the script's output. For any thread."""

    def __init__(self) -> None:
        self._files: dict[int, IO[bytes]] = {}
        self._waiting: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()

    def open(self, output: str, error: str | None, *, appends: bool) -> None:
        """Open the files, and write what was written before."""
        with self._lock:
            if self._files:
                return
            mode = "ab" if appends else "wb"
            for number, name in ((1, output), (_STDERR, error)):
                if name is None:
                    self._files[number] = self._files[1]
                    continue
                try:
                    # No buffer: readers follow the file.
                    self._files[number] = Path(name).open(mode, buffering=0)  # noqa: SIM115 (for the job's time)
                except OSError as failure:
                    complain(f"{name}: {reason(failure)}; the output goes to hvlaunch logs")
                    self._files[number] = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115 (a descriptor)
            for number, data in self._waiting:
                self._put(number, data)
            self._waiting = []

    def write(self, number: int, data: bytes) -> None:
        with self._lock:
            if self._files:
                self._put(number, data)
            else:
                self._waiting.append((number, data))

    def _put(self, number: int, data: bytes) -> None:
        try:
            self._files[number].write(data)
        except OSError as failure:
            complain(f"the output of the script: {reason(failure)}")


def run_step(path: Path) -> int:
    """Run the step that the file describes; return its exit code. Raises HvlaunchError."""
    about = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    # A killed batch job takes its steps along.
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    spec: JobSpec = decode(JobSpec, about["spec"])
    shares = dict(about["counts"])
    words = [escaped(word) for word in about["command"]]
    if about["files"] is not None:
        output, error = about["files"]
        if error is None:
            words = ["/bin/sh", "-c", 'exec > "$0" 2>&1; exec "$@"', output, *words]
        else:
            opening = 'exec > "$0" 2> "$1"; shift; exec "$@"'
            words = ["/bin/sh", "-c", opening, output or "/dev/stdout", error, *words]
    hosts = {host.name: host for host in spec.hosts}
    given = about["given"]
    spec = replace(
        spec,
        command=tuple(about["command"]),
        np=sum(shares.values()),
        queued=None,
        hosts=tuple(replace(hosts[name], slots=share) for name, share in shares.items()),
        force_slots=True,
        cwd=spec.cwd if spec.sync is not None else about["cwd"],
        env=about["env"],
        templates=Templates(tuple(words), about["places"], (), {}),
        leases=None
        if given is None
        else LeaseOptions(given={name: tuple(units) for name, units in given.items()}),
        gpus_per_worker=about["gpus"],
        map_by=about["map_by"],
        stdin="all" if about["stdin"] else "none",
        console=ConsoleOptions(prefix=about["prefix"], color="never", quiet=True),
        name=about["name"],
        detach="never",
        notify=(),
    )
    from hvlaunch.gloo import run  # noqa: PLC0415 (errors come first)

    return run(spec, stdout=sys.stdout.buffer, stderr=sys.stderr.buffer).exit_code


_QUIETLY = frozenset(
    [
        *(
            "kill-on-bad-exit",
            "unbuffered",
            "mpi",
            "exact",
            "overlap",
            "cpu-bind",
            "gpu-bind",
            "mem-bind",
            "jobid",
        ),
        *(
            "wait",
            "exclusive",
            "gres",
            "gpus",
            "gpus-per-node",
            "cpus-per-task",
            "mem",
            "quiet",
            "verbose",
            "input",
        ),
    ]
)
"""Options of srun without use here that change no result."""
_REFUSED = {
    "pty": "workers have no terminal",
    "multi-prog": "a step has one command; a script can look at SLURM_PROCID",
}
_OF_A_TASK = re.compile(r"%\d*[tnN]")


class SlurmStep(NamedTuple):
    """A step: a job of hvlaunch within the allocation."""

    command: tuple[str, ...]
    counts: tuple[tuple[str, int], ...]
    """Hosts and their numbers of tasks, in the order of ranks."""
    cwd: str | None
    variables: Mapping[str, str]
    """Variables with places, for each task."""
    exports: str
    """The value of --export."""
    gpus_per_task: int | None = None
    is_labelled: bool = False
    by_node: bool = False
    files: tuple[str | None, str | None] = (None, None)
    """Files for stdout and stderr; None for the script's own."""
    has_own_files: bool = False
    """True if each task, or each host, has a file of its own: then the names have places."""
    unused: tuple[str, ...] = ()


def job_variables(
    options: BatchOptions, job: Mapping[str, str], hosts: Sequence[Allocated]
) -> dict[str, str]:
    """Return the variables of a batch script; `job` has those of the job itself, such as its number."""
    names = [host.node for host in hosts]
    tasks = _shares(options.tasks, len(hosts), options.ntasks_per_node)
    nodes = {
        "SLURM_JOB_NODELIST": host_set(names),
        "SLURM_NODELIST": host_set(names),
        "SLURM_JOB_NUM_NODES": str(len(names)),
        "SLURM_NNODES": str(len(names)),
        "SLURM_TASKS_PER_NODE": _folded(tasks),
        "SLURM_JOB_CPUS_PER_NODE": _folded([host.cpus for host in hosts]),
        "SLURM_CPUS_ON_NODE": str(hosts[0].cpus),
        "SLURMD_NODENAME": names[0],
        # The script itself is task 0 on the first node, as under Slurm.
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_CLUSTER_NAME": "hvlaunch",
        "SLURM_JOB_PARTITION": options.partition,
    }
    asked = {
        "SLURM_NTASKS": options.tasks if options.ntasks or options.ntasks_per_node else None,
        "SLURM_NTASKS_PER_NODE": options.ntasks_per_node,
        "SLURM_CPUS_PER_TASK": options.cpus_per_task,
        "SLURM_GPUS_ON_NODE": options.gpus_per_node,
        "SLURM_GPUS_PER_NODE": options.gpus_per_node,
        "SLURM_GPUS_PER_TASK": options.gpus_per_task,
    }
    variables = {**job, **nodes, **{name: str(value) for name, value in asked.items() if value is not None}}
    if "SLURM_NTASKS" in variables:
        variables["SLURM_NPROCS"] = variables["SLURM_NTASKS"]
    # For what the script itself runs; each step sets the GPUs of its own hosts.
    leased = hosts[0].leased
    if options.gpus_per_node and leased is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(leased)
    return variables


def _patterns_of(job: Mapping[str, str], node: str) -> dict[str, str]:
    """Return the values of the letters in patterns of output files."""
    return {
        "j": job["SLURM_JOB_ID"],
        "J": job["SLURM_JOB_ID"],
        "A": job.get("SLURM_ARRAY_JOB_ID", job["SLURM_JOB_ID"]),
        # The number is what Slurm writes for a job that is no array.
        "a": job.get("SLURM_ARRAY_TASK_ID", "4294967294"),
        "x": job["SLURM_JOB_NAME"],
        "u": job["SLURM_JOB_USER"],
        "N": node,
        "n": "0",
        "t": "0",
        "s": "batch",
    }


def step_of(
    words: Sequence[str], environ: Mapping[str, str], hosts: Sequence[Allocated], number: int
) -> SlurmStep:
    """Return the step of the words behind `srun`. `environ` is the script's. Raises BadUsage."""
    given, command = read_options(words, "srun: ", program="srun")
    by_name = {option.name: option for option in given}
    for name, cause in _REFUSED.items():
        if name in by_name:
            raise by_name[name].error(cause)
    if not command:
        raise BadUsage("srun: no command to run")
    chosen = _hosts(by_name, hosts)
    per_node = _number(by_name, "ntasks-per-node", environ, "SLURM_NTASKS_PER_NODE")
    asked_nodes = _number(by_name, "nodes")
    ntasks = _number(by_name, "ntasks")
    if ntasks is None and (asked_nodes or len(chosen)) == len(hosts) and "ntasks-per-node" not in by_name:
        ntasks = _number({}, "", environ, "SLURM_NTASKS")
    nodes = asked_nodes or (
        min(len(chosen), ntasks if per_node is None or "ntasks" in by_name else -(-ntasks // per_node))
        if ntasks
        else len(chosen)
    )
    if nodes > len(chosen):
        raise BadUsage(f"srun: {nodes} nodes were asked for, and the job has {len(chosen)}")
    ntasks = ntasks or nodes * (per_node or 1)
    shares = _shares(max(ntasks, nodes), nodes, per_node)
    chosen = chosen[:nodes]
    names = [host.node for host in chosen]
    variables = {
        "SLURM_PROCID": "{rank}",
        "SLURM_LOCALID": "{local_rank}",
        "SLURM_NODEID": "{node_rank}",
        "SLURMD_NODENAME": "{host}" if [host.host for host in chosen] == names else "{host_ip}",
        "SLURM_STEP_ID": str(number),
        "SLURM_STEPID": str(number),
        "SLURM_STEP_NODELIST": host_set(names),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(sum(shares)),
        "SLURM_STEP_TASKS_PER_NODE": _folded(shares),
        "SLURM_TASKS_PER_NODE": _folded(shares),
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(sum(shares)),
        "SLURM_NPROCS": str(sum(shares)),
        "SLURM_LAUNCH_NODE_IPADDR": hosts[0].address,
        "SLURM_SRUN_COMM_HOST": hosts[0].address,
    }
    files = tuple(by_name[name].value if name in by_name else None for name in ("output", "error"))
    has_own_files = any(name is not None and _OF_A_TASK.search(name) for name in files)
    output, error = (_file(name, environ, number, has_places=has_own_files) for name in files)
    unused = [option.name for option in given if option.name not in _QUIETLY and option.name not in _USED]
    return SlurmStep(
        command=tuple(command),
        counts=tuple((host.host, share) for host, share in zip(chosen, shares, strict=True)),
        cwd=by_name["chdir"].value if "chdir" in by_name else None,
        variables=variables,
        exports=by_name["export"].value if "export" in by_name else environ.get("SLURM_EXPORT_ENV", "ALL"),
        gpus_per_task=_number(by_name, "gpus-per-task", environ, "SLURM_GPUS_PER_TASK"),
        is_labelled="label" in by_name,
        by_node="distribution" in by_name and by_name["distribution"].value.startswith("cyclic"),
        files=(output, error),
        has_own_files=has_own_files,
        unused=tuple(f"--{name}" for name in dict.fromkeys(unused)),
    )


_USED = frozenset(
    [
        *(
            "nodes",
            "ntasks",
            "ntasks-per-node",
            "nodelist",
            "exclude",
            "relative",
            "chdir",
            "export",
            "label",
        ),
        *("distribution", "output", "error", "gpus-per-task", "job-name", "open-mode"),
    ]
)


def task_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the script's own values of variables that hvlaunch sets for its workers, as variables with places."""
    is_ours = matcher(*SET_BY_HVLAUNCH[1:])
    return {name: escaped(value) for name, value in environ.items() if is_ours(name)}


def scontrol(words: Sequence[str], environ: Mapping[str, str], job: Mapping[str, str]) -> str:
    """Return the output of `scontrol`. Raises BadUsage for all but its `show` of names and of the job."""
    match [word for word in words if not word.startswith("-")]:
        case ["show", "hostname" | "hostnames", *names]:
            text = names[0] if names else environ.get("SLURM_JOB_NODELIST", job.get("SLURM_JOB_NODELIST", ""))
            return "".join(f"{host.name}\n" for host in parse_hosts(text))
        case ["show", "hostlist" | "hostlistsorted", names]:
            return f"{host_set(name for name in names.split(',') if name)}\n"
        case ["show", "job" | "jobs", *_]:
            fields = {
                "JobId": "SLURM_JOB_ID",
                "JobName": "SLURM_JOB_NAME",
                "Partition": "SLURM_JOB_PARTITION",
                "NodeList": "SLURM_JOB_NODELIST",
                "NumNodes": "SLURM_JOB_NUM_NODES",
                "WorkDir": "SLURM_SUBMIT_DIR",
            }
            return " ".join(f"{name}={job.get(variable, '')}" for name, variable in fields.items()) + "\n"
        case _:
            raise BadUsage(
                f"scontrol {' '.join(words)}: only `show hostnames`, `hostlist` and `job` are here"
            )


def _hosts(by_name: Mapping[str, GivenOption], hosts: Sequence[Allocated]) -> list[Allocated]:
    """Return the hosts for --nodelist, --exclude and --relative."""
    chosen = list(hosts)
    for name in ("nodelist", "exclude"):
        if name in by_name:
            option = by_name[name]
            names = [host.name for host in parse_hosts(option.value)]
            for unknown in [text for text in names if all(text not in (h.host, h.node) for h in hosts)]:
                raise option.error(
                    f"{unknown} is no host of the job; its hosts are {host_set(h.node for h in hosts)}"
                )
            keeps = name == "nodelist"
            chosen = [h for h in chosen if (h.host in names or h.node in names) is keeps]
    if "relative" in by_name:
        option = by_name["relative"]
        if not option.value.isdigit() or int(option.value) >= len(chosen):
            raise option.error(f"must be a number below {len(chosen)}")
        chosen = chosen[int(option.value) :]
    if not chosen:
        raise by_name["exclude"].error("no host is left")
    return chosen


def _number(
    by_name: Mapping[str, GivenOption],
    name: str,
    environ: Mapping[str, str] | None = None,
    variable: str = "",
) -> int | None:
    """Return the number of an option, else of a variable, else None. Raises BadUsage."""
    if name in by_name:
        option = by_name[name]
        return read_number(option, option.value.partition("-")[0].rpartition(":")[2])
    value = (environ or {}).get(variable, "")
    return int(value) if value.isdigit() and int(value) else None


def _shares(tasks: int, nodes: int, per_node: int | None) -> list[int]:
    """Return the tasks of each node: full nodes first with a number for each node, else evenly."""
    if per_node is not None and -(-tasks // per_node) == nodes:
        return [per_node] * (nodes - 1) + [tasks - per_node * (nodes - 1)]
    return [tasks // nodes + (index < tasks % nodes) for index in range(nodes)]


def _folded(counts: Sequence[int]) -> str:
    """Return `2(x3),1` for 2, 2, 2, 1."""
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)


def _file(name: str | None, environ: Mapping[str, str], number: int, *, has_places: bool) -> str | None:
    """Return the name of an output file of a step, with places for `%t`, `%n` and `%N`."""
    if name is None:
        return None
    job = environ.get("SLURM_JOB_ID", "")
    values = {
        "j": job,
        "J": f"{job}.{number}",
        "A": environ.get("SLURM_ARRAY_JOB_ID", job),
        "s": str(number),
        "a": environ.get("SLURM_ARRAY_TASK_ID", "4294967294"),
        "x": environ.get("SLURM_JOB_NAME", ""),
        "u": environ.get("SLURM_JOB_USER", ""),
        "t": "{rank}",
        "n": "{node_rank}",
        "N": "{host}",
    }
    return expanded(escaped(name) if has_places else name, values)


def exported(value: str, base: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the value of --export: `ALL`, `NONE`, names, and NAME=VALUE."""
    words = value.split(",")
    variables = dict(base) if "ALL" in words else {}
    for word in words:
        name, equals, text = word.partition("=")
        if equals:
            variables[name] = text
        elif name in environ and name not in ("ALL", "NONE", "NIL"):
            variables[name] = environ[name]
    return variables
