"""`hvlaunch pool up|down|status`: making, ending and listing warm pools."""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvlaunch.cli.arguments import Answered, options_of_word
from hvlaunch.cli.options import BadValue, values
from hvlaunch.cli.options.parser import Parser
from hvlaunch.cli.options.table import SSH
from hvlaunch.cli.process import complain, print_answer, run_detached
from hvlaunch.cli.spec import job_spec
from hvlaunch.console.status import duration
from hvlaunch.errors import BadUsage, HostsFailed, HvlaunchError, Problem
from hvlaunch.hosts.parse import host_set
from hvlaunch.job import LONG_LEASE, JobSpec
from hvlaunch.outside import await_end, has_driver, jobs_directory, known_jobs, remove
from hvlaunch.outside.control import ControlClient
from hvlaunch.outside.pools import KnownPool, PoolGone, ask, known_pools, pools_directory
from hvlaunch.report.text import describe

__all__ = ["run_pool_command"]

_HINT = "hvlaunch pool --help"
_USAGE = """\
usage: hvlaunch pool up NAME -H HOSTS [--idle-timeout TIME] [--skip-bad-hosts] [--foreground] [options of hosts and of SSH]
       hvlaunch pool down NAME [--kill]
       hvlaunch pool status [NAME] [--json]

Keep connections to hosts, so that jobs there start sooner: `hvlaunch --pool NAME -np N COMMAND`.

  --idle-timeout TIME  end it after so long without a job (default 8h): 90s, 10m, 8h, 2d
  --skip-bad-hosts     keep it even if some hosts can't be reached now; hvlaunch keeps trying them
  --foreground         do not leave the terminal; end with stdin's end
  --kill               stop the jobs that use it first
  --json               an object for each pool, on its own line
"""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_IDLE = 8 * 3600.0
_END_PATIENCE = 15.0
_LOOK = 0.02
_TAKEN = frozenset(
    [
        *(option.name for option in SSH.options),
        *("hosts", "hostfile", "force_slots", "no_scheduler", "skip_bad_hosts"),
        *("lease", "color", "quiet", "verbose", "config_file", "profile", "isolated", "command"),
    ]
)
"""Options of a job that a pool takes too; others are for jobs on the pool."""
_TAKEN_IF_TYPED = frozenset(["slots_per_host", "nnodes", "include", "exclude"])
"""Options for the pool if typed here; from a file or a variable they are for jobs."""


def run_pool_command(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the words behind `pool`; return the exit code. Raises HvlaunchError."""
    if not argv or {"-h", "--help"} & {*argv}:
        if not argv:
            raise BadUsage("pool: up, down or status is missing", hint=_HINT)
        return print_answer(_USAGE)
    act = _ACTS.get(argv[0])
    if act is None:
        raise BadUsage(f"pool: {argv[0]!r} is not one of up, down, status", hint=_HINT)
    return act(argv[1:], environ)


def _up(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    if not argv or argv[0].startswith("-"):
        raise BadUsage("pool up: the name comes first", hint="hvlaunch pool up NAME -H HOSTS")
    name = _name(argv[0])
    parser = _parser("up")
    parser.add_argument("--idle-timeout", type=_span, default=_IDLE)
    parser.add_argument("--foreground", action="store_true")
    pool_options, words = parser.parse_known_args(argv[1:])
    try:
        options = options_of_word("pool up", words, environ, _TAKEN, _TAKEN_IF_TYPED, complain)
    except Answered as answer:
        return print_answer(answer.text)
    for file, names in options.found().items():
        if not options.quiet:
            complain(f"options of {file}: {', '.join(names)}")
    spec, warnings = job_spec(options, environ)
    if spec.allocation is None and not options.given.keys() & {"hosts", "hostfile"}:
        raise BadUsage("pool up: no hosts are named", hint=f"hvlaunch pool up {name} -H HOSTS")
    if spec.visible_gpus or spec.elastic is not None:
        raise BadUsage("pool up: numbers of GPUs and limits of hosts are for jobs", hint=_HINT)
    hosts = [replace(host, slots=host.slots or spec.slots_per_host) for host in spec.hosts]
    lease = spec.lease if "lease" in options.given else LONG_LEASE
    spec = replace(spec, hosts=tuple(hosts), lease=lease)
    for warning in () if options.quiet else warnings:
        complain(f"warning: {warning}")
    root = pools_directory(environ)

    def hold(tell: Callable[[str], None] | None) -> int:
        return _hold(root, name, spec, pool_options.idle_timeout, tell)

    # A pool outlives its terminal; in the foreground it ends with stdin, for service managers.
    return hold(None) if pool_options.foreground else run_detached(hold)


def _hold(
    root: Path, name: str, spec: JobSpec, idle_timeout: float, tell: Callable[[str], None] | None
) -> int:
    """Run the pool's process; `tell` reports the pool's start to the process that waits for it."""
    from hvlaunch.driver.process import leave_terminal  # noqa: PLC0415 (errors come first)
    from hvlaunch.pool import hold_pool, printed_status  # noqa: PLC0415 (errors come first)

    def on_ready(problems: list[Problem]) -> None:
        if problems:
            _show(problems)
        if tell is None:
            print_answer(f"{name}\n")
            return
        # The pool must not end with its terminal.
        leave_terminal()
        # A working directory on a mounted file system would keep it busy.
        os.chdir("/")
        tell(name)

    try:
        hold_pool(
            root,
            name,
            spec,
            idle_timeout=idle_timeout,
            on_ready=on_ready,
            owner=0 if tell is None else None,
            on_status=printed_status(spec.console, sys.stderr.buffer),
        )
    except HostsFailed as error:
        _show(error.errors)
        return error.exit_code
    return 0


def _show(problems: Sequence[Problem]) -> None:
    complain("\n".join(describe(HostsFailed(problems).problem)).replace("hvlaunch: ", ""))


def _down(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = _parser("down")
    parser.add_argument("name", metavar="NAME", type=str)
    parser.add_argument("--kill", action="store_true")
    pool_options = parser.parse_args(argv)
    pool = _pool_named(pools_directory(environ), pool_options.name)
    if pool.is_up:
        if pool_options.kill:
            _stop_jobs(pool, environ)
        _end(pool)
    with suppress(OSError):
        # A killed process leaves its directory behind.
        remove(pool.directory)
    return print_answer(f"pool {pool.name} is down\n")


def _stop_jobs(pool: KnownPool, environ: Mapping[str, str]) -> None:
    """Stop jobs on the pool, and wait for their ends."""
    users = _users(ask(pool, {"what": "hosts"}))
    for job in known_jobs(jobs_directory(environ)):
        if job.id in users and job.has_driver:
            # The job may have ended just now.
            with suppress(HvlaunchError):
                ControlClient(job).post("/stop", {"kill": True})
            await_end(job)


def _end(pool: KnownPool) -> None:
    deadline = time.monotonic() + _END_PATIENCE
    while True:
        try:
            ask(pool, {"what": "down"})
        except PoolGone:
            pass
        except BadUsage as error:
            # `down` is refused while a job uses the pool.
            if time.monotonic() < deadline and not _users(ask(pool, {"what": "hosts"})):
                # A job that was just ending: ask again.
                continue
            error.hint = f"hvlaunch jobs, hvlaunch stop JOB, or hvlaunch pool down {pool.name} --kill"
            raise
        break
    while has_driver(pool.directory):
        if time.monotonic() > deadline:
            raise PoolGone(
                f"pool {pool.name}: its process (pid {pool.about.get('pid')}) does not end",
                hint=f"kill -9 {pool.about.get('pid')}",
            )
        time.sleep(_LOOK)


def _status(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = _parser("status")
    parser.add_argument("name", metavar="NAME", nargs="?")
    parser.add_argument("--json", action="store_true")
    pool_options = parser.parse_args(argv)
    root = pools_directory(environ)
    pools = known_pools(root) if pool_options.name is None else [_pool_named(root, pool_options.name)]
    records = [_record(pool) for pool in pools]
    if pool_options.json:
        return print_answer("".join(f"{json.dumps(record)}\n" for record in records))
    return print_answer("".join(map(_lines, records)) or "no pools\n")


def _record(pool: KnownPool) -> dict[str, Any]:
    record: dict[str, Any] = {"name": pool.name, "state": "killed", "hosts": {}, "idle": None}
    record |= {key: pool.about.get(key) for key in ("machine", "pid", "version", "began")}
    if not pool.is_up:
        return record
    try:
        answer = ask(pool, {"what": "hosts"}, timeout=5.0)
    except HvlaunchError:
        return {**record, "state": "no answer"}
    return {**record, "state": "up", "hosts": answer["hosts"], "idle": answer["idle"]}


def _lines(record: Mapping[str, Any]) -> str:
    hosts: Mapping[str, Mapping[str, Any]] = record["hosts"]
    if record["state"] != "up":
        hint = f"; try: hvlaunch pool down {record['name']}"
        return f"{record['name']}: {'its process was killed' if record['state'] == 'killed' else 'no answer'}{hint}\n"
    users = _users(record)
    used = f"jobs {', '.join(users)}" if users else f"no job for {duration(record['idle'])}"
    lines = [f"{record['name']}: {len(hosts)} hosts, {used}"]
    by_state: dict[tuple[str, str], list[str]] = {}
    for name, facts in hosts.items():
        why = f" ({facts['problem']})" if facts["problem"] else ""
        by_state.setdefault((facts["state"], why), []).append(name)
    lines += [f"  {state}: {host_set(names)}{why}" for (state, why), names in by_state.items()]
    return "\n".join(lines) + "\n"


def _users(record: Mapping[str, Any]) -> list[str]:
    """Return ids of jobs on the pool."""
    return sorted({job for facts in record["hosts"].values() for job in facts["jobs"]})


def _pool_named(root: Path, name: str) -> KnownPool:
    pool_of_name = next((pool for pool in known_pools(root) if pool.name == name), None)
    if pool_of_name is None:
        raise BadUsage(f"there is no pool {name}", hint="hvlaunch pool status")
    return pool_of_name


def _parser(word: str) -> Parser:
    return Parser(prog=f"hvlaunch pool {word}", add_help=False, allow_abbrev=False, hint=_HINT)


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise BadUsage(f"pool {text!r}: a name has letters, digits, dots, - and _, 64 at most")
    return text


def _span(text: str) -> float:
    try:
        return values.span(text)
    except BadValue as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_ACTS: Mapping[str, Callable[[Sequence[str], Mapping[str, str]], int]] = {
    "up": _up,
    "down": _down,
    "status": _status,
}
