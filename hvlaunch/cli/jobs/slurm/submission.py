"""A batch job as it was submitted: the script and its hosts, kept in the directory of the queue's submission until it has run."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hvlaunch.cli.arguments import parse
from hvlaunch.cli.jobs.queue_commands import enqueue, queued_job
from hvlaunch.cli.jobs.slurm.directives import (
    BatchOptions,
    GivenOption,
    batch_options,
    known_option,
    read_options,
    read_script,
)
from hvlaunch.cli.options import by_name, words_of
from hvlaunch.cli.options.settings import unknown_option
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.cli.process import complain
from hvlaunch.cli.spec import current_directory, job_spec
from hvlaunch.engine.codec import decode, encode
from hvlaunch.errors import BadUsage
from hvlaunch.job import JobSpec
from hvlaunch.outside.queue import ENVIRONMENT
from hvlaunch.owners import reason

__all__ = ["Submission", "allocation", "read_submission", "submission_of", "submit"]

_OWN = frozenset(["wait", "parsable", "test-only"])
"""Options of sbatch about the submission itself."""
_BATCH = "batch.json"
_MOST_BYTES = 400_000
_LAST_SECONDS = 20.0
"""Seconds for the agents of a batch job and of its steps to end, beyond the time of grace of each."""


class Submission(NamedTuple):
    """A batch script with its line."""

    script: str
    name: str
    """The script's path, as in messages."""
    given: tuple[GivenOption, ...]
    """Options of Slurm on the line."""
    words: tuple[str, ...]
    """Options of hvlaunch."""
    arguments: tuple[str, ...]
    cwd: str

    def options(self) -> tuple[BatchOptions, list[str]]:
        """Return what the script and the line ask for, and warnings. Raises BadUsage."""
        in_script, warnings = read_script(self.script, self.name)
        options = batch_options([*in_script, *(option for option in self.given if option.name not in _OWN)])
        if options.unused:
            warnings.append(f"{self.name}: not used here: {', '.join(options.unused)}")
        return options, warnings


def submission_of(argv: Sequence[str], environ: Mapping[str, str]) -> Submission:
    """Raises BadUsage."""
    ours = by_name(GROUPS)
    given, words, left = list[GivenOption](), list[str](), list(argv)
    while left and left[0].startswith("-") and left[0] != "-":
        if left[0] == "--":
            left = left[1:]
            break
        if known_option(left[0]):
            options, others = read_options(left, is_ours=known_option)
            given += options
            left = [*others]
            continue
        count = words_of(left, ours, lambda _name: False)
        if not count:
            raise unknown_option(left[0], [*ours], ["sbatch", *left], "hvlaunch sbatch --help")
        words += left[:count]
        left = left[count:]
    if not left:
        raise BadUsage("sbatch: no script", hint="hvlaunch sbatch -H a,b train.sh")
    name, *arguments = left
    try:
        script = Path(name).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise BadUsage(f"{name}: {reason(error)}") from None
    if len(script) > _MOST_BYTES:
        raise BadUsage(f"{name}: a script has at most {_MOST_BYTES} bytes")
    cwd = current_directory(environ)
    return Submission(script, name, tuple(given), tuple(words), tuple(arguments), cwd)


def submit(submission: Submission, options: BatchOptions, spec: JobSpec, environ: Mapping[str, str]) -> str:
    """Queue the batch job on the hosts of `spec`; return its number. Raises BadUsage, NoJobDirectory, QueueNotWritten."""
    # The worker on this machine has the script run on the first host; so a batch job is watched, stopped and taken over like any other.
    words = ["--isolated", "--detach", "--quiet", "-np", "1", "-H", "localhost", "--cwd", "/", "--"]
    command = [sys.executable, "-m", "hvlaunch", "sbatch", "--run"]
    around, _ = job_spec(parse([*words, *command], environ=environ), environ)
    around = replace(
        around,
        name=options.job_name,
        notify=spec.notify,
        notify_on=spec.notify_on,
        grace=2 * spec.grace + _LAST_SECONDS,
        env={},
    )
    most = options.array_limit
    if options.array and most is None and spec.leases is None:
        # Without leases nothing else keeps tasks apart.
        most = 1
    job = queued_job(
        spec,
        name=options.job_name or Path(submission.name).name,
        command=["sbatch", submission.name, *submission.arguments],
        most=most,
        after=options.after,
        time_limit=options.time_limit,
        is_held=options.is_held,
    )
    indexes: list[str | None] = [str(task) for task in options.array] or [None]
    about = {"submission": encode(Submission, submission), "spec": encode(JobSpec, spec)}
    return enqueue(
        indexes,
        [around] * len(indexes),
        [job] * len(indexes),
        environ,
        sync=spec.sync,
        files={_BATCH: json.dumps(about).encode()},
        # Each task of an array has a number for SLURM_JOB_ID.
        numbers=len(indexes),
    )


def read_submission(folder: Path) -> tuple[Submission, JobSpec]:
    """Return a kept submission with its hosts, and restore its environment. Raises BadUsage."""
    from hvlaunch.gloo.queued import submission_errors  # noqa: PLC0415 (a submission needs no controller)

    with submission_errors():
        about = json.loads((folder / _BATCH).read_bytes())
        environ = json.loads((folder / ENVIRONMENT).read_bytes())["environ"]
        spec: JobSpec = decode(JobSpec, about["spec"])
        submission: Submission = decode(Submission, about["submission"])
    os.environ.clear()
    os.environ.update(environ)
    return submission, spec


def allocation(
    submission: Submission, options: BatchOptions, environ: Mapping[str, str]
) -> tuple[JobSpec, list[str]]:
    """Return the hosts of the job as those of a job with a worker on each, and warnings. Raises BadUsage, Answered."""
    words = [*submission.words, "-np", str(options.node_count)]
    if options.nodelist is not None:
        words += ["-H", options.nodelist]
    if options.exclude is not None:
        words += ["--exclude", options.exclude]
    spec, warnings = job_spec(parse([*words, "--", "true"], environ=environ, warn=complain), environ)
    others = {"elastic jobs": spec.elastic, "--role": spec.roles, "a launcher": spec.mpi, "--pool": spec.pool}
    for word in (word for word, value in others.items() if value):
        raise BadUsage(f"sbatch and {word} can't be together")
    nodes, gpus, leases = options.node_count, options.gpus_per_node, spec.leases
    if leases is not None and leases.slots is None and not gpus:
        leases = None  # a script without GPUs
    if leases is None:
        if len(spec.hosts) < nodes:
            raise BadUsage(
                f"{submission.name} asks for {nodes} nodes, and there are {len(spec.hosts)} hosts",
                hint="-H a,b",
            )
        hosts = [replace(host, slots=1) for host in spec.hosts[:nodes]]
        return replace(spec, hosts=tuple(hosts), np=nodes, leases=None), warnings
    tasks = -(-options.tasks // nodes) if leases.slots is not None else 1
    hosts = [replace(host, slots=tasks) for host in spec.hosts]
    per_worker = gpus if leases.slots is None else 1
    return (
        replace(spec, hosts=tuple(hosts), np=nodes * tasks, leases=leases, gpus_per_worker=per_worker),
        warnings,
    )
