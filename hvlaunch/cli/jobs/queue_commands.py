"""`hvlaunch queue add|ls|rm|top|hold|release`: the user's queue of jobs."""

import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hvlaunch.cli.arguments import Answered, parse
from hvlaunch.cli.options import BadValue, Option, OptionGroup, Value, values
from hvlaunch.cli.options.parser import Parser
from hvlaunch.cli.options.settings import Options
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.cli.process import complain, print_answer
from hvlaunch.cli.spec import job_spec
from hvlaunch.console.lines import aligned, visible_line
from hvlaunch.console.status import ago, count
from hvlaunch.engine.codec import encode
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.parse import host_set
from hvlaunch.job import JobSpec, SyncOptions
from hvlaunch.outside import ABOUT
from hvlaunch.outside.queue import (
    ACTIVE,
    ENVIRONMENT,
    SPECS,
    Added,
    Event,
    Held,
    Moved,
    Queue,
    QueuedJob,
    QueueEntry,
    QueueNotWritten,
    Released,
    Removed,
    Schedule,
    queue_directory,
)
from hvlaunch.outside.queue_server import ensure_server, machine_elsewhere
from hvlaunch.owners import make_own_directory, write_whole

__all__ = [
    "QUEUE_OPTIONS",
    "enqueue",
    "queue_parser",
    "queue_rows",
    "queued_job",
    "run_queue_command",
    "submit",
]

_HINT = "hvlaunch queue --help"
_USAGE = """\
usage: hvlaunch queue add [--array LIST[%N]] [--after JOBS] [--after-any JOBS] [--time-limit TIME] [--hold] [options of a job] COMMAND
       hvlaunch queue ls [--all] [--json]
       hvlaunch queue rm|top|hold|release JOB...

Jobs that start one after the other, as soon as their GPUs are free, also after you have logged out.

  --array LIST[%N]   a job for each number, such as 0-31%4: at most 4 at a time; {array} is the number, and so is HVLAUNCH_ARRAY
  --after JOBS       start when these jobs (12, or 12,13) have ended well
  --after-any JOBS   start when these jobs have ended
  --time-limit TIME  stop it after so long: 90s, 10m, 8h, 2d; such a job may pass jobs that it does not delay
  --hold             keep it in the queue until `hvlaunch queue release`

  rm       remove jobs; those that run are stopped
  top      let jobs start before all others
  hold     keep jobs in the queue
  release  let jobs start that are held, or that wait for a job that has failed

  --all    with all ended jobs that are kept
  --json   an object for each job, on its own line
"""
_ARRAY = "{array}"
_WORDS = ("add", "ls", "rm", "top", "hold", "release")
_MOST_TASKS = 1000
_FEW_ENDED = 5
_HEAD = ("ID", "NAME", "STATE", "SINCE", "HOSTS", "COMMAND")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _tasks(text: str) -> tuple[tuple[int, ...], int | None]:
    """Convert `0-31%4` to numbers and the most jobs at a time."""
    numbers, percent, most = text.partition("%")
    tasks = tuple(dict.fromkeys(number for part in values.ranks(numbers) for number in part))
    if len(tasks) > _MOST_TASKS:
        raise BadValue(f"{text} has {len(tasks)} jobs, and the most is {_MOST_TASKS}")
    return tasks, values.count(most) if percent else None


QUEUE_OPTIONS = OptionGroup(
    "queue",
    (
        Option(
            "array", ("--array",), "a job for each number", Value(("LIST",), _tasks), source="command line"
        ),
        Option(
            "after",
            ("--after",),
            "start when these jobs have ended well",
            Value(("JOBS",), _names),
            source="command line",
        ),
        Option(
            "after_any",
            ("--after-any",),
            "start when these jobs have ended",
            Value(("JOBS",), _names),
            source="command line",
        ),
        Option(
            "time_limit",
            ("--time-limit",),
            "stop it after so long",
            Value(("TIME",), values.span),
            source="command line",
        ),
        Option("hold", ("--hold",), "keep it in the queue", source="command line"),
    ),
)
_GROUPS = (*GROUPS, QUEUE_OPTIONS)


def run_queue_command(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the words behind `queue`; return the exit code. Raises HvlaunchError."""
    if not argv or argv[0] in ("-h", "--help") or (argv[0] != "add" and {"-h", "--help"} & {*argv}):
        if not argv:
            raise BadUsage(f"queue: one of {', '.join(_WORDS)} is missing", hint=_HINT)
        return print_answer(_USAGE)
    if argv[0] == "add":
        return _add(argv[1:], environ)
    if argv[0] == "ls":
        return _list(argv[1:], environ)
    return _change(argv[0], argv[1:], environ)


def _add(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    try:
        options = parse(argv, _GROUPS, environ=environ, warn=complain)
    except Answered:
        return print_answer(_USAGE)
    # As typed: each task of an array reads the line again, with its own number.
    words = list(argv[: len(argv) - len(options.command)])
    if words[-1:] == ["--"]:
        words.pop()
    number = _submit(words, options.command, environ)
    if not options.quiet:
        complain(f"queued as {number}; hvlaunch queue ls, and hvlaunch logs -f {number} once it runs")
    return print_answer(f"{number}\n")


def submit(
    options: Sequence[str],
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    name: str | None = None,
    array: str | None = None,
    after: Sequence[str] = (),
    after_any: Sequence[str] = (),
    hold: bool = False,
    time_limit: float | None = None,
) -> str:
    """Queue a job, and return its number. `options` are words of `queue add`, where `{array}` is replaced too.

    Raises BadUsage, NoJobDirectory, QueueNotWritten.
    """
    given = {
        "--job-name": name,
        "--array": array,
        "--after": ",".join(after),
        "--after-any": ",".join(after_any),
        "--time-limit": None if time_limit is None else f"{time_limit:.0f}s",
    }
    more = [word for flag, value in given.items() if value for word in (flag, value)]
    return _submit([*options, *more, *(["--hold"] if hold else [])], command, environ)


def _submit(words: Sequence[str], command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Queue a job by the words of `queue add`; return its number. Raises BadUsage, NoJobDirectory, QueueNotWritten."""
    options = _options(words, command, environ)
    numbers, most = options.given.get("array", ((), None))
    indexes: list[str | None] = [str(number) for number in numbers] or [None]
    specs: list[JobSpec] = []
    # All tasks are read now: a mistake in the last one must not show itself tomorrow.
    for index in indexes:
        spec, warnings = _task(words, command, index, environ)
        for warning in () if options.quiet or specs else warnings:
            complain(f"warning: {warning}")
        specs.append(spec)
    jobs = [
        queued_job(
            spec,
            most=most,
            after=(
                *((name, "ok") for name in options.given.get("after", ())),
                *((name, "any") for name in options.given.get("after_any", ())),
            ),
            time_limit=options.given.get("time_limit"),
            is_held=bool(options.given.get("hold")),
        )
        for spec in specs
    ]
    return enqueue(indexes, specs, jobs, environ, sync=specs[0].sync)


def enqueue(
    indexes: Sequence[str | None],
    specs: Sequence[JobSpec],
    jobs: Sequence[QueuedJob],
    environ: Mapping[str, str],
    *,
    sync: SyncOptions | None = None,
    files: Mapping[str, bytes] = MappingProxyType({}),
    numbers: int = 1,
) -> str:
    """Put the tasks of an array, or one job with the index None, into the queue; return the number.

    `sync` is the tree of which the queue keeps a copy; `files` are kept until the last job has ended; the next job has a number higher
    by `numbers`. Raises BadUsage, NoJobDirectory, QueueNotWritten.
    """
    queue = Queue(queue_directory(environ))
    if (machine := machine_elsewhere(queue.directory)) is not None:
        file = queue.directory / "machine"
        hint = f"queue it there, or, if that machine is gone: rm {shlex.quote(str(file))}"
        raise BadUsage(f"the queue is served on {machine}", hint=hint)
    # Hidden until the list has the job: a killed command leaves nothing that could start.
    making = queue.directory / f".{os.urandom(4).hex()}"
    number = ""
    try:
        make_own_directory(str(making))
        _keep_tree(sync, making, environ)
        for name, data in files.items():
            write_whole(making / name, data, 0o600)

        def add(schedule: Schedule) -> list[Event]:
            nonlocal number
            number = str(schedule.next)
            ids = [number if index is None else f"{number}_{index}" for index in indexes]
            _check_after(schedule, jobs[0])
            _keep_jobs(making, dict(zip(ids, specs, strict=True)), environ)
            place = queue.directory / number
            # A process killed between this and the list leaves one behind.
            shutil.rmtree(place, ignore_errors=True)
            making.rename(place)
            tasks = tuple(job._replace(id=id_) for id_, job in zip(ids, jobs, strict=True))
            return [Added(tasks, schedule.next + numbers)]

        queue.change(add)
    except OSError as error:
        raise QueueNotWritten(
            f"the job is not queued: {error.filename or making}: {(error.strerror or str(error)).lower()}"
        ) from None
    finally:
        shutil.rmtree(making, ignore_errors=True)
    ensure_server(queue.directory)
    return number


def _options(words: Sequence[str], command: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Return the options of a queued job: detached, and with leases. Raises BadUsage."""
    line = [*words, "--detach", "--", *command]
    options = parse(line, _GROUPS, environ=environ)
    if options.dry_run:
        raise BadUsage("queue add can't print a plan", hint="the same without queue add")
    if not options.lease_gpus and options.lease_slots is None:
        if "lease_gpus" in options.given:
            raise BadUsage("a queued job needs leases", hint="--lease-gpus, or --lease-slots N")
        # Only leases tell the queue when GPUs are free, and keep two jobs apart.
        options = parse(["--lease-gpus", *line], _GROUPS, environ=environ)
    return options


def _task(
    words: Sequence[str], command: Sequence[str], index: str | None, environ: Mapping[str, str]
) -> tuple[JobSpec, list[str]]:
    """Return one job, with its number of an array in place of `{array}`, and warnings. Raises BadUsage."""
    if index is not None:
        words = [word if word.startswith("--array=") else word.replace(_ARRAY, index) for word in words]
        command = [word.replace(_ARRAY, index) for word in command]
    options = _options(words, command, environ)
    queue_names = {option.name for option in QUEUE_OPTIONS.options}
    settings = {name: group for name, group in options.settings.items() if name not in queue_names}
    spec, warnings = job_spec(Options(settings, GROUPS, is_marked=True), environ)
    env = dict(spec.env) if index is None else {**spec.env, "HVLAUNCH_ARRAY": index}
    return replace(spec, env=env), warnings


def _keep_tree(sync: SyncOptions | None, directory: Path, environ: Mapping[str, str]) -> None:
    """Keep a copy of the working tree. Raises BadUsage, OSError."""
    if sync is None:
        return
    from hvlaunch.sync.snapshot import cache_directory, take_snapshot  # noqa: PLC0415 (few jobs have it)
    from hvlaunch.sync.tree import Commit  # noqa: PLC0415 (as above)

    commit = Commit(sync.root)
    with closing(take_snapshot(sync.root, cache_directory(environ), sync.limit)) as snapshot:
        snapshot.save(directory)
        words = {"code": {**commit.facts(), "hash": snapshot.hash}}
        write_whole(directory / ABOUT, json.dumps(words).encode(), 0o600)


def _keep_jobs(directory: Path, specs: Mapping[str, JobSpec], environ: Mapping[str, str]) -> None:
    """Write the jobs, and the variables of hvlaunch and the workers. Raises OSError."""
    # Without variables, which may be secrets: these are in a file of their own.
    words = {job: encode(JobSpec, replace(spec, env={})) for job, spec in specs.items()}
    write_whole(directory / SPECS, json.dumps(words).encode(), 0o600)
    variables = {"environ": dict(environ), "workers": {job: dict(spec.env) for job, spec in specs.items()}}
    write_whole(directory / ENVIRONMENT, json.dumps(variables).encode(), 0o600)


def _check_after(schedule: Schedule, job: QueuedJob) -> None:
    for name, _ in job.after:
        if not schedule.named(name):
            raise BadUsage(f"there is no job {name} in the queue", hint="hvlaunch queue ls --all")


def queued_job(
    spec: JobSpec,
    *,
    name: str | None = None,
    command: Sequence[str] = (),
    most: int | None = None,
    after: tuple[tuple[str, str], ...] = (),
    time_limit: float | None = None,
    is_held: bool = False,
) -> QueuedJob:
    """Return the job for the list, as yet without an id. `spec` has its hosts and leases."""
    return QueuedJob(
        id="",
        name=name or spec.name or "",
        command=shlex.join(command or spec.command),
        added=time.time(),
        # Without leases the job waits for no host, and no job for it.
        hosts=() if spec.leases is None else tuple(dict.fromkeys(host.name for host in spec.hosts)),
        workers=spec.np or sum(host.slots or 0 for host in spec.hosts),
        per_worker=spec.gpus_per_worker or 1,
        noun="GPU" if spec.leases is None or spec.leases.slots is None else "slot",
        fair_wait=600.0 if spec.leases is None else spec.leases.fair_wait,
        time_limit=time_limit,
        after=after,
        most=most,
        is_held=is_held,
        since=time.time(),
    )


def _list(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    options = queue_parser("ls").parse_args(argv)
    queue = Queue(queue_directory(environ))
    # For a queue whose processes were killed, or after a boot.
    ensure_server(queue.directory)
    if (machine := machine_elsewhere(queue.directory)) is not None:
        complain(f"the queue is served on {machine}")
    schedule, now = queue.read(), time.time()
    rows = [*queue_rows(queue, schedule, now)]
    if options.json:
        return print_answer("".join(f"{json.dumps(row)}\n" for row in rows))
    ended = [row for row in rows if row["state"] == "ended"]
    ended.sort(key=lambda row: row["since"], reverse=True)
    shown = [row for row in rows if row["state"] != "ended"] + (ended if options.all else ended[:_FEW_ENDED])
    hidden = len(rows) - len(shown)
    more = f"{count(hidden, 'more job')}, ended: hvlaunch queue ls --all\n" if hidden else ""
    table = aligned([_HEAD, *(_cells(row, now) for row in shown)]) if shown else ["the queue is empty"]
    return print_answer("".join(f"{line}\n" for line in table) + more)


def queue_rows(queue: Queue, schedule: Schedule, now: float) -> Iterator[dict[str, Any]]:
    """Yield an object for each job, in the order of their starts; ended jobs come last."""
    order = schedule.in_order()
    running = [job for job in order if job.state == "running"]
    waiting = [job for job in order if job.state != "running"]
    ended = [job for job in schedule.jobs.values() if job.state == "ended"]
    for job in (*running, *waiting, *ended):
        words, promise = _state_words(queue, schedule, job, now)
        yield {
            "id": job.id,
            "name": job.name or None,
            "state": job.state,
            "text": words,
            "since": job.since,
            "added": job.added,
            "hosts": [*(job.units or job.hosts)],
            "workers": job.workers,
            "gpus_per_worker": job.per_worker,
            "time_limit": job.time_limit,
            "after": [name for name, _ in job.after],
            "is_held": job.is_held,
            "starts_by": promise,
            "job": job.job or None,
            "exit_code": job.code,
            "command": job.command,
        }


def _state_words(queue: Queue, schedule: Schedule, job: QueuedJob, now: float) -> tuple[str, float | None]:
    """Return the state in words, and the latest start of a job without GPUs, if known."""
    if job.state == "ended":
        return ("done" if job.ended_well else job.outcome or "ended"), None
    if job.is_removed:
        return "stops", None
    if job.state == "running":
        return "running", None
    if job.state == "waiting":
        return f"waits: {schedule.waits_for(job, now) or 'starts soon'}", None
    wait = QueueEntry(queue, job.id, job.job).wait
    if wait is None:
        return "starts", None
    free, needed = wait["free"], count(job.workers * job.per_worker, job.noun)
    words = f"waits: {needed}, {sum(free.values())} of {wait['total']} free on {host_set(free)}"
    promise = schedule.promise(job, now, free)
    is_known = now < promise < float("inf")
    by = f", by {time.strftime('%d %b %H:%M', time.localtime(promise))}" if is_known else ""
    return f"{words}{by}", promise if is_known else None


def _cells(row: Mapping[str, Any], now: float) -> tuple[str, ...]:
    cells = (
        row["id"],
        row["name"] or "-",
        row["text"],
        ago(now - row["since"]),
        host_set(row["hosts"]),
        row["command"],
    )
    return tuple(visible_line(str(cell)) for cell in cells)


def _change(word: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    options = queue_parser(word).parse_args(argv)
    queue = Queue(queue_directory(environ))
    events = queue.change(partial(_events, word, options.jobs))
    ensure_server(queue.directory)
    schedule = queue.read()
    for event in events:
        job = schedule.jobs.get(getattr(event, "id", ""))
        if job is not None and job.is_removed and job.state in ACTIVE:
            complain(f"{job.id} is being stopped: hvlaunch queue ls")
    return 0


def _events(word: str, names: Sequence[str], schedule: Schedule) -> list[Event]:
    """Return the events of a command on the named jobs. Raises BadUsage."""
    events: list[Event] = []
    for name in names:
        jobs = schedule.named(name) or [job for job in schedule.jobs.values() if name == job.name]
        if not jobs:
            raise BadUsage(f"there is no job {name} in the queue", hint="hvlaunch queue ls --all")
        usable = [job for job in jobs if job.state != "ended" and (word == "rm" or job.state != "running")]
        if not usable:
            state = "runs" if any(job.state == "running" for job in jobs) else "has ended"
            raise BadUsage(f"job {name} {state}", hint="hvlaunch queue ls")
        # The last event makes the first job: the tasks of an array keep their order.
        usable = usable[::-1] if word == "top" else usable
        events += [_CHANGES[word](job.id) for job in usable]
    return events


_CHANGES: Mapping[str, Callable[[str], Event]] = {
    "rm": lambda name: Removed(name, time.time()),
    "top": Moved,
    "hold": Held,
    "release": Released,
}


def queue_parser(word: str) -> Parser:
    """Return the parser of the words behind `queue ls`, `queue rm` and others, except `queue add`. Raises BadUsage."""
    if word not in _WORDS:
        raise BadUsage(f"queue: {word!r} is not one of {', '.join(_WORDS)}", hint=_HINT)
    parser = Parser(prog=f"hvlaunch queue {word}", add_help=False, allow_abbrev=False, hint=_HINT)
    if word == "ls":
        parser.add_argument("-a", "--all", action="store_true")
        parser.add_argument("--json", action="store_true")
    else:
        parser.add_argument("jobs", metavar="JOB", nargs="+")
    return parser
