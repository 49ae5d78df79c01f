"""A batch job that runs: what its script gets and writes, and the jobs of hvlaunch that its `srun`s become."""

import getpass
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from hvlaunch.agent.quick import prctl
from hvlaunch.cli.jobs.slurm.directives import expanded
from hvlaunch.cli.jobs.slurm.steps import (
    exported,
    job_variables,
    patterns_of,
    scontrol,
    step_of,
    task_variables,
)
from hvlaunch.cli.jobs.slurm.submission import read_submission
from hvlaunch.cli.process import complain
from hvlaunch.console.status import duration
from hvlaunch.engine.codec import decode, encode
from hvlaunch.errors import EXIT_HOSTS, BadUsage, LeasesTaken
from hvlaunch.gloo.batch import Allocated, BatchJob, Body, ProgramAnswer, ProgramRequest, StepLine
from hvlaunch.gloo.queued import as_queued
from hvlaunch.hosts.templates import escaped
from hvlaunch.job import ConsoleOptions, JobSpec, LeaseOptions, QueuedAs, SyncOptions, Templates
from hvlaunch.outside.queue import Queue, QueueEntry, QueueNotWritten
from hvlaunch.owners import reason, write_whole

__all__ = ["BatchRun", "run_step"]

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
        values = patterns_of(self._job, node)
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
