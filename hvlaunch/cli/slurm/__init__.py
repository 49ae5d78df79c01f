"""`hvlaunch sbatch`: submits a batch script of Slurm, and runs it on hosts without Slurm.

The job of `hvlaunch jobs` has one worker on this machine, which runs this word again with `--run`: it keeps the allocation
and starts the steps. So a batch job is stopped, watched and taken over as any other.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hvlaunch.cli.arguments import Answered
from hvlaunch.cli.process import complain, print_answer
from hvlaunch.cli.slurm.directives import BatchOptions
from hvlaunch.cli.slurm.submission import (
    Submission,
    allocation,
    batch_directory,
    forget,
    read_submission,
    spool,
    submission_of,
)

__all__ = ["run_sbatch_command"]

_USAGE = """\
usage: hvlaunch sbatch [OPTIONS] SCRIPT [ARG ...]

Run a batch script of Slurm on hosts without Slurm. OPTIONS are those of sbatch, stronger than the script's #SBATCH lines,
and those of a job of hvlaunch: -H names the hosts (--hold has no short name here), --lease-gpus shares them.

  --wait      wait for the job's end; its exit code is this command's
  --parsable  print the number alone

The output is in slurm-NUMBER.out, or where --output says, on this machine. `hvlaunch stop NUMBER` ends the job.
"""


def run_sbatch_command(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the words behind `sbatch`; return the exit code. Raises HvlaunchError."""
    match [*argv]:
        case ["--run", number, _, *task]:
            return _run(batch_directory(environ) / number, int(task[0]) if task else None)
        case ["--step", path]:
            from hvlaunch.cli.slurm.run import run_step  # noqa: PLC0415 (it connects to hosts)

            return run_step(Path(path))
        case ["-h" | "--help", *_]:
            return print_answer(_USAGE)
    submission = submission_of(argv, environ)
    options, warnings = submission.options()
    try:
        _, more = allocation(submission, options, environ)
    except Answered as answer:
        return print_answer(answer.text)
    for warning in [*warnings, *more]:
        complain(f"warning: {warning}")
    names = {option.name for option in submission.given}
    if "test-only" in names:
        return 0
    folder = spool(submission, len(options.array), environ)
    number = folder.name
    print_answer(f"{number}\n" if "parsable" in names else f"Submitted batch job {number}\n")
    if "wait" in names:
        return _run(folder, None)
    words = ["--isolated", "--detach", "--quiet", "--job-name", number, "-np", "1", "-H", "localhost", "--"]
    started = subprocess.run(
        [*_hvlaunch(), *words, *_hvlaunch(), "sbatch", "--run", number, submission.name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    return started.returncode


def _hvlaunch() -> list[str]:
    return [sys.executable, "-m", "hvlaunch"]


def _run(folder: Path, task: int | None) -> int:
    """Run a kept job, all tasks of its array or one of them; return the exit code. Raises HvlaunchError."""
    submission = read_submission(folder)
    options, _ = submission.options()
    if options.array and task is not None:
        return _run_one(folder, submission._replace(task=task), options)
    try:
        return (_run_array if options.array else _run_one)(folder, submission, options)
    finally:
        forget(folder)


def _run_one(folder: Path, submission: Submission, options: BatchOptions) -> int:
    from hvlaunch.cli.slurm.run import BatchRun  # noqa: PLC0415 (it connects to hosts)

    return BatchRun(folder, submission, options).run()


def _run_array(folder: Path, submission: Submission, options: BatchOptions) -> int:
    """Run the tasks of an array; return the first exit code that is not 0."""
    spec, _ = allocation(submission, options, os.environ)
    # Without leases nothing keeps tasks apart.
    limit = options.array_limit or (len(options.array) if spec.leases is not None else 1)
    children: list[subprocess.Popen[bytes]] = []
    is_stopped = False

    def run_one(task: int) -> int:
        if is_stopped:
            return 128 + signal.SIGTERM
        child = subprocess.Popen([*_hvlaunch(), "sbatch", "--run", folder.name, submission.name, str(task)])
        children.append(child)
        return child.wait()

    def stop(number: int, _frame: object) -> None:
        nonlocal is_stopped
        is_stopped = True
        for child in children:
            child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with ThreadPoolExecutor(limit) as running:
        codes = list(running.map(run_one, options.array))
    return next((code if code > 0 else 128 - code for code in codes if code), 0)
