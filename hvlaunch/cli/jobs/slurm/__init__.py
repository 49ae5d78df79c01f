"""`hvlaunch sbatch`: puts a batch script of Slurm into the user's queue, for hosts without Slurm.

The queued job has a single worker on this machine. The worker runs this word again with `--run`, takes the allocation, and starts
the script and its steps. Stopping, watching and taking over are those of other jobs.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvlaunch.cli.arguments import Answered
from hvlaunch.cli.jobs.slurm.script import allocation, submission_of, submit
from hvlaunch.cli.process import complain, print_answer
from hvlaunch.outside.queue import Queue, queue_directory
from hvlaunch.outside.queue_server import ensure_server

__all__ = ["run_sbatch_command"]

_USAGE = """\
usage: hvlaunch sbatch [OPTIONS] SCRIPT [ARG ...]

Queue a batch script of Slurm for hosts without Slurm. OPTIONS are those of sbatch, stronger than the script's #SBATCH lines,
and those of a job of hvlaunch: -H names the hosts (--hold has no short name here), --lease-gpus shares them.

  --wait      wait for the job's end; its exit code is this command's
  --parsable  print the number alone

The output is in slurm-NUMBER.out, or where --output says, on this machine. `hvlaunch queue ls` shows the job, and
`hvlaunch queue rm NUMBER` removes or ends it.
"""
_LOOK = 0.1
_REMOVED = 1
"""Exit code of --wait for a job that was removed before it ran."""


def run_sbatch_command(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the words behind `sbatch`; return the exit code. Raises HvlaunchError."""
    match [*argv]:
        case ["--run", directory, number]:
            from hvlaunch.cli.jobs.slurm.run import BatchRun  # noqa: PLC0415 (it connects to hosts)

            return BatchRun(Queue(Path(directory)), number).run()
        case ["--step", path]:
            from hvlaunch.cli.jobs.slurm.run import run_step  # noqa: PLC0415 (it connects to hosts)

            return run_step(Path(path))
        case ["-h" | "--help", *_]:
            return print_answer(_USAGE)
    submission = submission_of(argv, environ)
    options, warnings = submission.options()
    try:
        spec, more = allocation(submission, options, environ)
    except Answered as answer:
        return print_answer(answer.text)
    for warning in [*warnings, *more]:
        complain(f"warning: {warning}")
    names = {option.name for option in submission.given}
    if "test-only" in names:
        return 0
    number = submit(submission, options, spec, environ)
    print_answer(f"{number}\n" if "parsable" in names else f"Submitted batch job {number}\n")
    return _wait(Queue(queue_directory(environ)), number) if "wait" in names else 0


def _wait(queue: Queue, number: str) -> int:
    """Wait for the end of a job, or of an array; return the first exit code that is not 0."""
    codes: dict[str, int] = {}
    reason = ""
    while True:
        jobs = queue.read().named(number)
        for job in jobs:
            # A job that waits again tells why: a host may be away.
            if job.state == "waiting" and job.reason not in ("", reason):
                reason = job.reason
                complain(f"job {job.id} waits: {reason}")
            if job.state == "ended":
                codes[job.id] = _REMOVED if job.code is None else job.code
        if all(job.state == "ended" for job in jobs):
            return next((code for code in codes.values() if code), 0)
        ensure_server(queue.directory)
        time.sleep(_LOOK)
