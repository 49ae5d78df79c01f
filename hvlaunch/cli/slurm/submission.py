"""A batch job as it was submitted: the script with its line, kept in the user's state directory until it has run."""

import fcntl
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hvlaunch.cli.arguments import parse
from hvlaunch.cli.environment import SET_BY_HVLAUNCH
from hvlaunch.cli.options import by_name, words_of
from hvlaunch.cli.options.settings import unknown_option
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.cli.process import complain
from hvlaunch.cli.slurm.directives import (
    BatchOptions,
    GivenOption,
    batch_options,
    known_option,
    read_options,
    read_script,
)
from hvlaunch.cli.spec import current_directory, job_spec
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.variables import OUTER_RANK_VARIABLES, matcher
from hvlaunch.job import JobSpec
from hvlaunch.outside import jobs_directory
from hvlaunch.owners import make_own_directory, reason

__all__ = [
    "Submission",
    "allocation",
    "batch_directory",
    "forget",
    "read_submission",
    "spool",
    "submission_of",
    "write_private",
]

_OWN = frozenset(["wait", "parsable", "test-only"])
"""Options of sbatch about the submission itself."""
_ABOUT, _NUMBER = "batch.json", "number"
_MOST_BYTES = 400_000
_KEPT = 60 * 86400.0
"""Seconds after which a submission is a killed job's."""


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
    number: int = 0
    task: int | None = None
    """Number in an array; None for a job by itself, or for all of an array."""

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


def batch_directory(environ: Mapping[str, str]) -> Path:
    """Return the directory of batch jobs in the user's state directory. Raises NoJobDirectory."""
    return jobs_directory(environ).with_name("batch")


def spool(submission: Submission, tasks: int, environ: Mapping[str, str]) -> Path:
    """Keep the submission under a new number, of which an array has one for each task. Raises BadUsage."""
    root = batch_directory(environ)
    try:
        make_own_directory(str(root))
        for old in root.iterdir():
            if old.is_dir() and old.stat().st_mtime < time.time() - _KEPT:
                forget(old)
        descriptor = os.open(root / _NUMBER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "r+") as file:
            # Two submissions at once must not get one number.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            text = file.read().strip()
            number = int(text) + 1 if text.isdigit() else 1
            file.seek(0)
            file.truncate()
            file.write(f"{number + max(0, tasks - 1)}\n")
        folder = root / str(number)
        folder.mkdir(0o700)
        # The worker of the job gets no variables of hvlaunch's, by which options may be set.
        options = {name: value for name, value in environ.items() if name.startswith("HVLAUNCH_")}
        about = {**submission._replace(number=number)._asdict(), "environ": options}
        write_private(folder / _ABOUT, about)
    except OSError as error:
        raise BadUsage(f"{error.filename or root}: {reason(error)}") from None
    return folder


def forget(folder: Path) -> None:
    """Remove a submission that has run."""
    with suppress(OSError):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def write_private(path: Path, about: Mapping[str, Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(about, file)


def read_submission(folder: Path) -> Submission:
    """Return a kept submission, and restore its environment."""
    about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    is_ours = matcher(*SET_BY_HVLAUNCH, *OUTER_RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT")
    for name in [name for name in os.environ if is_ours(name)]:
        del os.environ[name]
    os.environ.update(about.pop("environ"))
    given = tuple(GivenOption(*option) for option in about.pop("given"))
    words, arguments = tuple(about.pop("words")), tuple(about.pop("arguments"))
    return Submission(**about, given=given, words=words, arguments=arguments)


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
    leases = leases._replace(wait=True)
    tasks = -(-options.tasks // nodes) if leases.slots is not None else 1
    hosts = [replace(host, slots=tasks) for host in spec.hosts]
    per_worker = gpus if leases.slots is None else 1
    return (
        replace(spec, hosts=tuple(hosts), np=nodes * tasks, leases=leases, gpus_per_worker=per_worker),
        warnings,
    )
