"""A batch script: what its `#SBATCH` lines and the options of sbatch ask for, and its submission, which the queue keeps until it has run."""

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from hvlaunch.cli.arguments import parse
from hvlaunch.cli.foreign import LAUNCHERS
from hvlaunch.cli.jobs.queue_commands import enqueue, queued_job
from hvlaunch.cli.options import by_name, words_of
from hvlaunch.cli.options.settings import unknown_option
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.cli.process import complain
from hvlaunch.cli.spec import current_directory, job_spec
from hvlaunch.engine.codec import decode, encode
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.parse import ranges_of
from hvlaunch.job import JobSpec
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.outside.queue import ENVIRONMENT
from hvlaunch.owners import reason

__all__ = [
    "BatchOptions",
    "GivenOption",
    "Submission",
    "allocation",
    "batch_options",
    "expanded",
    "read_number",
    "read_options",
    "read_script",
    "read_submission",
    "seconds_of",
    "submission_of",
    "submit",
]


class GivenOption(NamedTuple):
    """An option of Slurm."""

    name: str
    """Its long name, without dashes; a short name of an unused option."""
    value: str
    place: str
    """The beginning of a message: `train.sh, line 3: #SBATCH `; empty for the command line."""

    def error(self, cause: str, hint: str = "") -> BadUsage:
        value = f"={self.value}" if self.value else ""
        dashes = "-" if len(self.name) == 1 else "--"
        return BadUsage(f"{self.place}{dashes}{self.name}{value}: {cause}", hint=hint or None)


class BatchOptions(NamedTuple):
    """What a script asks for. None means not given."""

    nodes: int | None = None
    ntasks: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    time_limit: float | None = None
    array: tuple[int, ...] = ()
    array_limit: int | None = None
    output: str | None = None
    error: str | None = None
    appends: bool = False
    job_name: str | None = None
    chdir: str | None = None
    export: str = "ALL"
    nodelist: str | None = None
    exclude: str | None = None
    partition: str = "hvlaunch"
    after: tuple[tuple[str, str], ...] = ()
    """Jobs of the queue to end first, each with `ok` (well) or `any`."""
    is_held: bool = False
    unused: tuple[str, ...] = ()
    """Options without use here, each once."""

    @property
    def node_count(self) -> int:
        if self.nodes is not None:
            return self.nodes
        return -(-(self.ntasks or 1) // self.ntasks_per_node) if self.ntasks_per_node else 1

    @property
    def tasks(self) -> int:
        """Number of tasks of a step that names none."""
        return self.ntasks or self.node_count * (self.ntasks_per_node or 1)


SHORT = {
    "N": "nodes",
    "n": "ntasks",
    "c": "cpus-per-task",
    "G": "gpus",
    "t": "time",
    "a": "array",
    "o": "output",
    "e": "error",
    "J": "job-name",
    "D": "chdir",
    "w": "nodelist",
    "x": "exclude",
    "d": "dependency",
    "b": "begin",
    "H": "hold",
    "p": "partition",
    "l": "label",
    "m": "distribution",
    "i": "input",
    "W": "wait",
    "r": "relative",
    "K": "kill-on-bad-exit",
    "u": "unbuffered",
}
_SAME = {"tasks-per-node": "ntasks-per-node", "workdir": "chdir"}
_USED = frozenset(
    [
        *(
            "nodes",
            "ntasks",
            "ntasks-per-node",
            "cpus-per-task",
            "gres",
            "gpus",
            "gpus-per-node",
            "gpus-per-task",
        ),
        *(
            "time",
            "array",
            "output",
            "error",
            "open-mode",
            "job-name",
            "chdir",
            "export",
            "nodelist",
            "exclude",
        ),
        *("partition", "dependency", "hold"),
    ]
)
_REFUSED = {
    "begin": "jobs can't wait for a time here",
    "wrap": "the script must be a file",
    "hetjob": "an allocation of several kinds of hosts is not possible here",
    "het-group": "an allocation of several kinds of hosts is not possible here",
}
"""Options that would change the meaning of the script if they were ignored."""
_FLAGS = (
    *("requeue", "no-requeue", "parsable", "ignore-pbs", "hold", "contiguous", "spread-job", "use-min-nodes"),
    *(
        "get-user-env",
        "exclusive",
        "oversubscribe",
        "overcommit",
        "verbose",
        "quiet",
        "wait-all-nodes",
        "reboot",
    ),
    *("nvmps", "test-only", "unbuffered", "label", "kill-on-bad-exit", "pty", "disable-status", "propagate"),
)
_VALUES = (
    *("array", "export-file", "wrap", "kill-on-invalid-dep", "signal", "dependency", "begin", "open-mode"),
    *(
        "partition",
        "account",
        "qos",
        "comment",
        "nice",
        "clusters",
        "burst-buffer",
        "profile",
        "tasks-per-node",
    ),
    *("container", "segment", "constraints", "mpi", "input", "network", "cpu-freq"),
)
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_GPUS = re.compile(r"(?:[A-Za-z][\w.-]*:)?(\d+)(?:\([^)]*\))?")
_MOST_TASKS = 1000
_AFTER = re.compile(r"after(ok|any)((?::\d+(?:_\d+)?)+)")
_PATTERN = re.compile(r"%(\d*)([%AaJjNnstux])")
_SBATCH = "#SBATCH"


@cache
def _takes_value(program: str) -> Mapping[str, bool]:
    """Return the known options of srun and sbatch, and whether each has a value in `program`."""
    takes_value = {}
    for option in LAUNCHERS["srun"].options:
        for name in option.names:
            takes_value[name.lstrip("-")] = bool(option.metavars)
    takes_value |= dict.fromkeys((*_USED, *_VALUES), True) | dict.fromkeys(_FLAGS, False)
    takes_value["wait"] = program == "srun"
    return takes_value | {short: takes_value[name] for short, name in SHORT.items() if name in takes_value}


def _known_option(word: str) -> bool:
    """Return whether sbatch has an option of this name; `-H` are the hosts."""
    name = word.partition("=")[0]
    if name.startswith("--"):
        return name[2:].replace("_", "-") in _takes_value("sbatch")
    return word[1:2] in SHORT and word[1:2] != "H"


def read_options(
    words: Sequence[str],
    place: str = "",
    is_ours: Callable[[str], bool] = lambda _word: True,
    program: str = "sbatch",
) -> tuple[list[GivenOption], Sequence[str]]:
    """Return the options at the beginning of the words, up to one that is not ours, and the other words. Raises BadUsage."""
    takes_value, options, index = _takes_value(program), list[GivenOption](), 0
    while index < len(words) and words[index].startswith("-") and words[index] != "-":
        word = words[index]
        if not is_ours(word):
            break
        index += 1
        if word == "--":
            break
        name, equals, value = word[2:].partition("=")
        name = name.replace("_", "-")
        if not word.startswith("--"):
            name, value = word[1], word[2:].removeprefix("=")
            equals = value
        if name not in takes_value:
            dashes = "--" if word.startswith("--") else "-"
            close = get_close_matches(name, takes_value, n=1) if dashes == "--" else []
            hint = f"{dashes}{close[0]}" if close else None
            raise BadUsage(f"{place}{dashes}{name} is no option of {program}", hint=hint)
        if takes_value[name] and not equals:
            if index == len(words):
                raise BadUsage(f"{place}{word}: a value is missing")
            value = words[index]
            index += 1
        name = SHORT.get(name, name)
        options.append(GivenOption(_SAME.get(name, name), value, place))
    return options, words[index:]


def read_script(text: str, name: str) -> tuple[list[GivenOption], list[str]]:
    """Return the options of the `#SBATCH` lines of a script, and warnings. Raises BadUsage."""
    if not text.startswith("#!"):
        raise BadUsage(f"{name}: line 1 must name the shell", hint="#!/bin/bash")
    options, warnings, has_begun = list[GivenOption](), list[str](), False
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            has_begun = True
        if not line.startswith(_SBATCH):
            continue
        place = f"{name}, line {number}: "
        if has_begun:
            warnings.append(f"{place}{_SBATCH} after the first command has no effect, as in Slurm")
            continue
        try:
            words = shlex.split(line[len(_SBATCH) :], comments=True)
        except ValueError as error:
            raise BadUsage(f"{place}{str(error).lower()}") from None
        if words[:1] == ["hetjob"] or words == ["--hetjob"]:
            raise BadUsage(f"{place}{_SBATCH} hetjob: {_REFUSED['hetjob']}")
        given, others = read_options(words, f"{place}{_SBATCH} ")
        if others:
            raise BadUsage(f"{place}{_SBATCH}: {others[0]!r} is not an option")
        options += given
    return options, warnings


def batch_options(given: Sequence[GivenOption]) -> BatchOptions:
    """Return what the options ask for; later options are stronger. Raises BadUsage."""
    by_name = {option.name: option for option in given}
    for name, cause in _REFUSED.items():
        if name in by_name:
            raise by_name[name].error(cause)
    values: dict[str, Any] = {}
    for option in by_name.values():
        values |= _read(option)
    if (gpus := by_name.get("gpus")) is not None:
        nodes = BatchOptions(**values).node_count
        total = read_number(gpus, _last_gpus(gpus))
        if total % nodes:
            raise gpus.error(f"{total} GPUs can't be shared evenly by {nodes} nodes", "--gpus-per-node")
        values["gpus_per_node"] = total // nodes
    if "gpus_per_node" not in values and values.get("gpus_per_task"):
        options = BatchOptions(**values)
        values["gpus_per_node"] = values["gpus_per_task"] * -(-options.tasks // options.node_count)
    names = [option.name for option in given if option.name not in _USED]
    values["unused"] = tuple(dict.fromkeys(f"-{name}" if len(name) == 1 else f"--{name}" for name in names))
    return BatchOptions(**values)


def _read(option: GivenOption) -> dict[str, Any]:
    """Return the fields of BatchOptions that the option sets."""
    field = option.name.replace("-", "_")
    match option.name:
        case "nodes":
            return {"nodes": read_number(option, option.value.partition("-")[0])}
        case "ntasks" | "ntasks-per-node" | "cpus-per-task":
            return {field: read_number(option, option.value)}
        case "gpus-per-node" | "gpus-per-task":
            return {field: read_number(option, _last_gpus(option))}
        case "gres":
            gpus = [word for word in option.value.split(",") if word.split(":")[0].split("(")[0] == "gpu"]
            counts = [word.partition(":")[2] for word in gpus]
            numbers = [_GPUS.fullmatch(count) for count in counts]
            # `gpu` and `gpu:a100` are one GPU each.
            return {"gpus_per_node": sum(int(match[1]) if match else 1 for match in numbers)} if gpus else {}
        case "time":
            return {"time_limit": seconds_of(option)}
        case "array":
            return _array(option)
        case "dependency":
            return {"after": _dependency(option)}
        case "hold":
            return {"is_held": True}
        case "open-mode":
            return {"appends": option.value.startswith("a")}
        case "output" | "error" | "job-name" | "chdir" | "export" | "nodelist" | "exclude" | "partition":
            return {field: option.value}
        case _:
            return {}


def read_number(option: GivenOption, text: str) -> int:
    """Return a number above 0. Raises BadUsage."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 20):
        raise option.error("must be a number above 0")
    return int(text)


def _last_gpus(option: GivenOption) -> str:
    match = _GPUS.fullmatch(option.value)
    return match[1] if match else option.value


def seconds_of(option: GivenOption) -> float | None:
    """Return a time of Slurm in seconds; None for no limit. Raises BadUsage."""
    if option.value.upper() in ("UNLIMITED", "INFINITE", "0", "-1"):
        return None
    match = _TIME.fullmatch(option.value)
    if match is None:
        raise option.error("must be a time", "90, 1:30:00 or 2-12:00:00")
    days, *parts = (int(part) if part else None for part in match.groups())
    first, second, third = (part or 0 for part in parts)
    if days is not None or parts[2] is not None:
        hours, minutes, seconds = first, second, third
    else:
        hours, minutes, seconds = 0, first, second
    return (((days or 0) * 24 + hours) * 60 + minutes) * 60.0 + seconds or None


def _array(option: GivenOption) -> dict[str, Any]:
    text, percent, limit = option.value.partition("%")
    try:
        ranges = ranges_of(text.replace(":", "/"))
    except ValueError:
        raise option.error("must be numbers and ranges", "0-31%4") from None
    if sum(map(len, ranges)) > _MOST_TASKS:
        raise option.error(f"{_MOST_TASKS} tasks are the most")
    tasks = tuple(sorted({number for numbers in ranges for number in numbers}))
    return {"array": tasks, "array_limit": read_number(option, limit) if percent else None}


def _dependency(option: GivenOption) -> tuple[tuple[str, str], ...]:
    matches = [_AFTER.fullmatch(part) for part in option.value.split(",")]
    if not all(matches):
        raise option.error("must be afterok or afterany with jobs' numbers", "afterok:12:13")
    return tuple((name, match[1]) for match in matches if match for name in match[2].split(":")[1:])


def expanded(pattern: str, values: Mapping[str, str]) -> str:
    """Return an output file's name: `%j` and others stand for `values`, `%4j` for at least four digits."""

    def value(match: "re.Match[str]") -> str:
        width, letter = match.groups()
        text = "%" if letter == "%" else values.get(letter, "")
        return text.zfill(int(width[:2])) if width and text.isdigit() else text

    return _PATTERN.sub(value, pattern)


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
        if _known_option(left[0]):
            options, others = read_options(left, is_ours=_known_option)
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
