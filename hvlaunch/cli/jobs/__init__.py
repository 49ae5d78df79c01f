"""Commands on existing jobs (`hvlaunch jobs`, `stop`, ...): questions to a job's driver, or a look into the job's directory."""

import argparse
import json
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from importlib import import_module
from typing import Any

from hvlaunch.cli.options import BadValue
from hvlaunch.cli.options.parser import JOB_WORDS, Parser
from hvlaunch.cli.process import complain, print_answer
from hvlaunch.console.lines import aligned, visible, visible_line
from hvlaunch.console.status import ago, code_words, count, duration
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.parse import host_set
from hvlaunch.outside import (
    KnownJob,
    await_driver,
    await_end,
    choose,
    jobs_directory,
    known_jobs,
    prune,
    remove,
)
from hvlaunch.outside.control import ControlClient, DriverGone, await_ready, state_of

__all__ = ["job_record", "job_table", "listed", "parser_of", "run_job_command", "since", "state_word"]


State = Mapping[str, Any] | None
"""The driver's answer about its job; None without an answer."""

_EVENTS_WAIT = 30
_STACKS_WAIT = 30.0
"""Seconds beyond the usual limit of answers: py-spy needs some seconds for each process."""
_PATIENCE = 2.0
"""Seconds for the answer of a driver, of many jobs' drivers."""
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SPAN = re.compile(r"([0-9]{1,9})([smhd])")
_TIME = re.compile(r"[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?")
_HEAD = ("JOB", "NAME", "STATE", "ROUND", "WORKERS", "HOSTS", "BEGAN", "TOOK", "CODE", "COMMIT", "COMMAND")
_OPTIONAL = ("TOOK", "CODE", "COMMIT")
_FEW_ENDED = 5
_WIDEST = 40
"""Characters of a cell, except in the last column."""


def run_job_command(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command line that begins with a job word; return its exit code. Raises HvlaunchError."""
    word = argv[0]
    if word in _COMMANDS:
        return _late(_COMMANDS[word])(argv[1:], environ)
    if word == "translate":
        return _translate(argv[1:])
    try:
        options = parser_of(word).parse_args(argv[1:])
    except _Help as question:
        return print_answer(str(question))
    if word == "mcp":
        from hvlaunch.cli.jobs.assistant import serve  # noqa: PLC0415 (for this word alone)

        return serve(environ, allow_actions=options.allow_actions)
    if word == "presets":
        from hvlaunch.cli.presets import preset_list  # noqa: PLC0415 (for this word alone)

        return print_answer(preset_list(environ, is_json=options.json))
    if word == "practise":
        from hvlaunch.cli.jobs.practise import run_practise_command  # noqa: PLC0415 (for this word alone)

        return run_practise_command(options.fault)
    root = jobs_directory(environ)
    # Directories of ended jobs are removed by whoever comes by: no daemon does it.
    prune(root)
    options.known_jobs = partial(known_jobs, root)
    if word in _ACTS:
        return _ACTS[word](options.known_jobs(), options)
    with _what_can_be_read():
        return _late(_LATE_ACTS[word])(options.known_jobs(), options)


class _Help(Exception):
    """The help was asked for; its text is the exception's."""


# argparse's own help exits the process, and prints without our care for broken pipes.
class _AskHelp(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        raise _Help(parser.format_help())


def parser_of(name: str) -> Parser:
    """Return the parser of the words behind this word, except `pool` and `doctor`."""
    word = JOB_WORDS[name]
    parser = Parser(
        prog=f"hvlaunch {name}",
        usage=f"hvlaunch {name} {word.usage}",
        description=f"{word.help[0].upper()}{word.help[1:].replace('`', '')}.",
        add_help=False,
        allow_abbrev=False,
        hint=f"hvlaunch {name} --help",
    )
    parser.add_argument("-h", "--help", action=_AskHelp, nargs=0, help="show this")
    if name == "signal":
        parser.add_argument("signal", metavar="SIGNAL", type=_signal_name, help="such as USR1")
    if name == "translate":
        parser.add_argument(
            "line", metavar="LINE", help="the line, such as 'torchrun --nproc-per-node 2 train.py'"
        )
    elif name == "practise":
        parser.add_argument(
            "fault",
            metavar="FAULT",
            nargs="?",
            help="play this fault or all of them, and end; else type them",
        )
    elif name == "mcp":
        parser.add_argument(
            "--allow-actions",
            action="store_true",
            help="with tools that stop jobs, send signals or collect files",
        )
    elif name == "move":
        parser.add_argument("host", metavar="HOST", help="the host to be free of workers")
        text = "the host that takes them over; default: hosts with free slots"
        parser.add_argument("to", metavar="TO", nargs="?", help=text)
        text = "id or name of the job; not needed if only one job runs"
        parser.add_argument("--job", metavar="JOB", help=text)
    elif name not in ("jobs", "presets"):
        count = None if name in ("forget", "rerun", "diff") else "?"
        text = "id or name of the job, or the first letters of its id; not needed if only one job runs"
        parser.add_argument("job", metavar="JOB", nargs=count, help=text)
    match name:
        case "jobs":
            parser.add_argument(
                "-a", "--all", action="store_true", help="with all ended jobs, not only the newest five"
            )
        case "attach" | "logs":
            _add_view_options(parser, name)
        case "top":
            _add_top_options(parser)
        case "metrics":
            _add_metrics_options(parser)
        case "stacks":
            _add_ranks(parser)
            parser.add_argument("--native", action="store_true", help="with the frames of C and C++ (py-spy)")
        case "diff":
            parser.add_argument("other", metavar="JOB", help="the other job")
        case "rerun":
            parser.add_argument(
                "options", metavar="OPTIONS", nargs="*", help="options of a job, in place of the job's own"
            )
        case "collect":
            text = "pattern of paths below the workers' directory, and a directory here; default: those of --collect"
            parser.add_argument("globs", metavar="GLOB[:DIR]", nargs="*", help=text)
        case "events":
            parser.add_argument("-f", "--follow", action="store_true", help="continue until the job ends")
        case "wait":
            parser.add_argument(
                "--ready",
                action="store_true",
                help="wait for the job's service instead (--ready-port, --ready-url)",
            )
        case "stop":
            parser.add_argument(
                "--kill", action="store_true", help="kill the workers at once, as the second Ctrl-C does"
            )
    if "[--json]" in word.usage:
        parser.add_argument("--json", action="store_true", help="print objects for programs instead")
    return parser


def _add_ranks(parser: Parser) -> None:
    from hvlaunch.cli.options import values  # noqa: PLC0415 (for these words alone)

    parser.add_argument(
        "--ranks", metavar="LIST", type=_reader(values.ranks), help="show these ranks, such as 0,8-15"
    )


def _add_view_options(parser: Parser, name: str) -> None:

    _add_ranks(parser)
    if name == "attach":
        return
    parser.add_argument("-f", "--follow", action="store_true", help="continue until the job ends")
    when = partial(since, now=datetime.now().astimezone())
    parser.add_argument(
        "--since", metavar="TIME", type=_reader(when), help="from then on: 10m, 2h, 14:30, 2026-11-22T14:30"
    )


def _add_top_options(parser: Parser) -> None:
    parser.add_argument(
        "--plain", action="store_true", help="print a plain table repeatedly; the default without textual"
    )
    parser.add_argument(
        "--web", action="store_true", help="serve a page for a browser until Ctrl-C; print its address"
    )
    _add_bind(parser, "the page")


def _add_metrics_options(parser: Parser) -> None:
    from hvlaunch.cli.options import values  # noqa: PLC0415 (for this word alone)

    parser.add_argument(
        "--textfile",
        metavar="FILE",
        help="write the metrics to this file, for the textfile collector of node_exporter",
    )
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=_reader(values.seconds),
        help="with --textfile: write the file at this interval, and remove it at the end",
    )
    parser.add_argument(
        "--scrape",
        action="store_true",
        help="serve those of one job until Ctrl-C; print the address and a token",
    )
    _add_bind(parser, "them")


def _add_bind(parser: Parser, noun: str) -> None:
    parser.add_argument("--bind", metavar="ADDRESS", help=f"serve {noun} at this address, by https")
    parser.add_argument(
        "--no-tls", action="store_true", help="with --bind: by http, which others on the network can read"
    )


def _reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return read(text)
        except BadValue as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _signal_name(text: str) -> str:
    name = text.upper().removeprefix("SIG")
    if f"SIG{name}" not in signal.Signals.__members__:
        raise BadUsage(f"{text} is not a signal", hint="hvlaunch signal USR1")
    return name


@contextmanager
def _what_can_be_read() -> Iterator[None]:
    """Turn errors of files in jobs' directories into BadUsage."""
    try:
        yield
    except OSError as error:
        cause = (error.strerror or str(error)).lower()
        raise BadUsage(
            f"{error.filename or 'the output of the job'}: {cause}", hint="hvlaunch jobs"
        ) from None


def _jobs(jobs: Sequence[KnownJob], options: argparse.Namespace) -> int:

    total = len(jobs)
    if not options.all and not options.json:
        jobs = listed(jobs)
    # Drivers are asked at the same time: a driver that hangs must not delay the others.
    with ThreadPoolExecutor(max(1, len(jobs))) as asking:
        states = list(zip(jobs, asking.map(_state, jobs), strict=True))
    if options.json:
        return print_answer("".join(f"{json.dumps(job_record(job, state))}\n" for job, state in states))
    hidden = total - len(jobs)
    more = f"{count(hidden, 'more job')}, ended: hvlaunch jobs --all\n" if hidden else ""
    return print_answer((job_table(states) if jobs else "no jobs\n") + more)


def listed(jobs: Sequence[KnownJob]) -> list[KnownJob]:
    """Return the jobs of the short list: first jobs without an end, then the newest ended jobs with workers."""
    running = [job for job in jobs if job.result is None]
    ended = [job for job in jobs if job.result is not None and not job.never_ran]
    return [*reversed(running), *reversed(ended[-_FEW_ENDED:])]


def _state(job: KnownJob) -> Mapping[str, Any] | None:
    """Return the answer of the job's driver; None without one."""
    return state_of(job, _PATIENCE) if job.has_driver else None


def _events(jobs: Sequence[KnownJob], options: argparse.Namespace) -> int:
    job = choose(jobs, options.job)
    if job.result is not None:
        cause = f"job {job.id} has ended, and its events were not kept"
        raise BadUsage(cause, hint="--events FILE with the next job")
    control, number = ControlClient(job), 0
    # The driver answers as soon as there is an event, or after this time.
    wait = _EVENTS_WAIT if options.follow else 0
    while True:
        try:
            page = control.get(f"/events?since={number}&wait={wait}", wait)
        # After a first page, the driver's end is the end of the job.
        except DriverGone:
            if not number:
                raise
            return 0
        if page["missed"]:
            complain(f"{page['missed']} events are no longer kept")
        code = print_answer("".join(f"{json.dumps(event)}\n" for event in page["events"]))
        is_over = any(event.get("type") == "job_ended" for event in page["events"])
        if code or is_over or (not page["events"] and not options.follow):
            return code
        number = page["next"]


def _collect(jobs: Sequence[KnownJob], options: argparse.Namespace) -> int:
    from hvlaunch.cli.jobs.cp import run_collect_command  # noqa: PLC0415 (for this word alone)

    job = choose(jobs, options.job)
    return run_collect_command(job, options.globs, os.environ, is_json=options.json)


@_what_can_be_read()
def _stacks(jobs: Sequence[KnownJob], options: argparse.Namespace) -> int:
    """Print stacks of the job's workers, now or before they were killed."""
    from hvlaunch.telemetry.stack import from_json, tree_lines, whole_stacks  # noqa: PLC0415 (for this word alone)

    def is_selected(rank: int) -> bool:
        return options.ranks is None or any(rank in part for part in options.ranks)

    answer = _stacks_of(choose(jobs, options.job), options)
    if options.json:
        selected = [stack for stack in whole_stacks(answer) if is_selected(stack["rank"])]
        return print_answer("".join(f"{json.dumps(stack)}\n" for stack in selected))
    processes = [process for process in from_json(answer) if is_selected(process.rank)]
    lines = tree_lines(processes) if processes else ["no workers"]
    return print_answer("".join(f"{visible(line)}\n" for line in lines))


def _stacks_of(job: KnownJob, options: argparse.Namespace) -> Mapping[str, Any]:
    """Return the driver's answer, or what it kept when it killed the workers. Raises BadUsage, DriverGone, OSError."""
    from hvlaunch.driver.observing.stacks import kept_stacks  # noqa: PLC0415 (for this word alone)

    if await_driver(job):
        ranges = [f"{part.start}-{part.stop - 1}/{part.step}" for part in options.ranks or ()]
        wish = {"ranks": None if options.ranks is None else ",".join(ranges), "native": options.native}
        answer: Mapping[str, Any] = ControlClient(job).post("/stacks", wish, _STACKS_WAIT)
        return answer
    kept = list(kept_stacks(job.directory))
    if not kept:
        raise BadUsage(f"job {job.id} has ended, and no stacks were taken", hint=f"hvlaunch logs {job.id}")
    complain(f"job {job.id} has ended: its workers' stacks before they were stopped:")
    return kept[-1]


def _signal(jobs: Sequence[KnownJob], options: argparse.Namespace) -> int:
    ControlClient(_running(jobs, options.job)).post("/signal", {"signal": options.signal})
    return 0


def _move(jobs: Sequence[KnownJob], options: argparse.Namespace) -> int:
    job = _running(jobs, options.job)
    control = ControlClient(job)
    number = control.post("/move", {"host": options.host, "to": options.to})["next"]
    while True:
        try:
            page = control.get(f"/events?since={number}&wait={_EVENTS_WAIT}", _EVENTS_WAIT)
        except DriverGone:
            # A successor knows of the move by its record.
            if not await_driver(job):
                complain(f"job {job.id} has ended, and host {options.host} was not free before")
                return 1
            continue
        for event in page["events"]:
            match event:
                case {"type": "host_moved", "host": options.host, "text": str(text)}:
                    return print_answer(f"{text}\n")
                case {"type": "host_stays", "host": options.host, "was_moving": True, "text": str(text)}:
                    complain(text)
                    return 1
                case _:
                    pass
        number = page["next"]


def _stop(jobs: Sequence[KnownJob], options: argparse.Namespace) -> int:
    job = _running(jobs, options.job)
    ControlClient(job).post("/stop", {"kill": options.kill})
    result = await_end(job)
    code = "" if result is None else f", exit code {result['exit_code']}"
    return print_answer(f"job {job.id} has ended{code}\n")


def _wait(jobs: Sequence[KnownJob], options: argparse.Namespace) -> int:
    job = choose(jobs, options.job)
    if options.ready:
        if await_ready(job):
            return 0
        # The job has ended before its service was ready.
        result = await_end(job)
        return int(result["exit_code"]) or 1 if result is not None else 1
    result = await_end(job)
    if result is not None:
        return int(result["exit_code"])
    # A good end removes the directory, and a killed driver leaves it.
    if job.directory.exists():
        raise DriverGone(
            f"job {job.id}: its driver was killed", hint="the log of the program that started it"
        )
    return 0


def _forget(jobs: Sequence[KnownJob], options: argparse.Namespace) -> int:
    job = choose(jobs, options.job)
    if job.has_driver:
        raise BadUsage(f"job {job.id} runs", hint=f"hvlaunch stop {job.id}")
    remove(job.directory)
    return 0


def _translate(words: Sequence[str]) -> int:
    """Print the translation of another launcher's line, and notes about omitted options."""
    from hvlaunch.cli.foreign import translate_line  # noqa: PLC0415 (for this word alone)

    if words in ([], ["-h"], ["--help"]):
        return print_answer(parser_of("translate").format_help())
    line, notes = translate_line(words)
    for note in notes:
        complain(f"note: {note}")
    return print_answer(f"{line}\n")


def _running(jobs: Sequence[KnownJob], name: str | None) -> KnownJob:
    """Return the named job. Raises BadUsage if it has ended."""
    job = choose(jobs, name)
    if not await_driver(job):
        raise BadUsage(f"job {job.id} has ended", hint="hvlaunch jobs")
    return job


def _late(name: str) -> Callable[..., int]:
    """Import a function of this package."""
    # Each word loads its own modules alone: a question to a job is as quick as it can be.
    module, _, function = name.rpartition(".")
    command: Callable[..., int] = getattr(import_module(f"hvlaunch.cli.{module}"), function)
    return command


_COMMANDS: Mapping[str, str] = {
    "pool": "jobs.pool_commands.run_pool_command",
    "queue": "jobs.queue_commands.run_queue_command",
    "doctor": "hosts.doctor.run_doctor_command",
    "hosts": "hosts.hosts.run_hosts_command",
    "cp": "jobs.cp.run_cp_command",
    "check": "hosts.check.run_check_command",
    "bisect": "hosts.bisect.run_bisect_command",
    "sbatch": "jobs.slurm.run_sbatch_command",
}
"""Functions by word that parse the words behind it."""
_LATE_ACTS: Mapping[str, str] = {
    "attach": "jobs.output.attach",
    "logs": "jobs.output.logs",
    "top": "jobs.top.top",
    "metrics": "jobs.metrics.metrics",
    "diff": "jobs.rerun.diff",
}
"""Functions by word that get the jobs and the parsed options, in modules of their own; _ACTS has those of this module."""
_ACTS: Mapping[str, Callable[[Sequence[KnownJob], argparse.Namespace], int]] = {
    "jobs": _jobs,
    "events": _events,
    "collect": _collect,
    "stacks": _stacks,
    "signal": _signal,
    "move": _move,
    "stop": _stop,
    "wait": _wait,
    "forget": _forget,
}


def since(text: str, now: datetime) -> float:
    """Convert a time to seconds since 1970: `10m` ago, `14:30` today or else yesterday, or `2026-11-22 14:30`.

    Times are local; `now` has a time zone. Raises BadValue.
    """
    if (span := _SPAN.fullmatch(text)) is not None:
        return now.timestamp() - int(span[1]) * _SECONDS[span[2]]
    try:
        if _TIME.fullmatch(text):
            # fromisoformat() needs two digits of the hour.
            today = datetime.fromisoformat(f"{now:%Y-%m-%d} {text.zfill(len(text) + (text[1] == ':'))}")
            time_today = today.replace(tzinfo=now.tzinfo)
            return (time_today if time_today <= now else time_today - timedelta(days=1)).timestamp()
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise BadValue(
            f"{text!r} is neither a time such as 14:30 or 2026-11-22T14:30, nor 10m or 2h"
        ) from None


def job_table(jobs: Sequence[tuple[KnownJob, State]], now: float | None = None) -> str:
    """Return a table with a line for each job."""
    now = time.time() if now is None else now
    rows = [_HEAD, *(_row(job, state, now) for job, state in jobs)]
    left_out = {
        index
        for index, name in enumerate(_HEAD)
        if (name == "ROUND" and not any(job.is_elastic for job, _ in jobs))
        or (name in _OPTIONAL and all(row[index] == "-" for row in rows[1:]))
    }
    rows = [tuple(cell for index, cell in enumerate(row) if index not in left_out) for row in rows]
    return "".join(f"{line}\n" for line in aligned(rows))


def _row(job: KnownJob, state: State, now: float) -> tuple[str, ...]:
    current = None if state is None else state["round"]
    hosts = [] if state is None else [host["host"] for host in state["hosts"] if host["state"] == "ready"]
    cells = (
        job.id,
        str(job.about.get("name") or "-"),
        state_word(job, state),
        "-" if current is None or not job.is_elastic else str(current["number"]),
        "-" if state is None else str(len(state["workers"])),
        host_set(hosts) if hosts else "-",
        ago(now - job.began),
        _took(job.result),
        *(word or "-" for word in code_words(job.about.get("code"))),
    )
    command = job.about.get("command")
    # about.json may be another version's, or damaged.
    words = [str(word) for word in command] if isinstance(command, list) else []
    return (*(_cut(visible_line(cell)) for cell in cells), visible(" ".join(shlex.join(words).split())))


def _took(result: Mapping[str, Any] | None) -> str:
    """Return `2 h 10 min, 96 %, 34.7 GPU h`: what an ended job took, and the share in which it trained. `-` if unknown."""
    bill: Any = (result or {}).get("bill")
    # result.json may be another version's, or damaged.
    try:
        wall, training, hours = (
            float(bill[name] or 0.0) for name in ("wall_seconds", "training_seconds", "gpu_hours")
        )
    except (LookupError, TypeError, ValueError):
        return "-"
    share = f", {100 * training / wall:.0f} %" if wall else ""
    return f"{duration(wall)}{share}" + (f", {hours:.1f} GPU h" if hours else "")


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..."


def state_word(job: KnownJob, state: State) -> str:
    """Return the job's state, `running` or `exit code 1`, or the reason why its driver does not answer."""
    if job.result is not None:
        return f"exit code {job.result.get('exit_code')}"
    if state is not None:
        return str(state["phase"])
    # A home directory may be shared: another machine's processes can't be seen from here.
    machine = job.about.get("machine")
    if machine != os.uname().nodename:
        return f"on {machine}"
    return "no answer" if job.has_driver else "driver killed"


def job_record(job: KnownJob, state: State) -> Mapping[str, Any]:
    """Return the job as an object for programs."""
    return {**job.about, "id": job.id, "has_driver": job.has_driver, "state": state, "result": job.result}
