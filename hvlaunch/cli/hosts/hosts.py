"""`hvlaunch hosts`: the hosts in the ledger with the verdicts on them; or the GPUs of hosts that several users share, and whose they are."""

import json
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvlaunch.cli.arguments import Answered, options_of_word
from hvlaunch.cli.options import Option, OptionGroup
from hvlaunch.cli.options.parser import Parser
from hvlaunch.cli.options.settings import Options
from hvlaunch.cli.options.table import GROUPS, SSH
from hvlaunch.cli.process import complain, print_answer
from hvlaunch.cli.spec import job_spec
from hvlaunch.console.lines import aligned, visible_line
from hvlaunch.console.status import ago, count, duration
from hvlaunch.errors import BadUsage, Problem
from hvlaunch.hosts.parse import parse_hosts
from hvlaunch.job import JobSpec, LeaseOptions
from hvlaunch.outside.ledger import HostRecord, Ledger, ledger_directory

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.engine.events import HostFacts

__all__ = ["GPU_OPTIONS", "gpu_table", "hosts_parser", "ledger_table", "run_hosts_command"]

_USAGE = """\
usage: hvlaunch hosts [--clear HOSTS] [--json]
       hvlaunch hosts -H HOSTS | --hostfile FILE [--watch] [--max-idle TIME] [--json] [options of SSH]

Show the hosts of which jobs have remembered something, the worst first. A suspect is used last by jobs with
--avoid-suspects. What is remembered fades: it counts half after a week.

  --clear HOSTS  forget what is remembered of these hosts, such as after a repair
  --json         an object for each host, on its own line

With -H or --hostfile the hosts are visited: whose their GPUs are, for which job and how long, what runs on them, and how
long leases have been idle. --lease-slots N shows hosts without GPUs.

  --watch              go on until Ctrl-C
  --max-idle TIME      name leases that have been idle for longer, such as 2h
"""
_NAME_HOSTS = ("-H", "--hosts", "--hostfile", "--host", "-hostfile")
_LEDGER_HEAD = ("HOST", "RECORD", "LAST", "JOB", "WHY")


def hosts_parser() -> Parser:
    """Return the parser of the words behind `hosts`, without options of jobs."""
    parser = Parser(prog="hvlaunch hosts", add_help=False, allow_abbrev=False, hint="hvlaunch hosts --help")
    parser.add_argument("--clear", metavar="HOSTS")
    parser.add_argument("--json", action="store_true")
    return parser


def run_hosts_command(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the words behind `hosts`; return the exit code. Raises BadUsage."""
    if {"-h", "--help"} & {*argv}:
        return print_answer(_USAGE)
    if any(word.startswith(_NAME_HOSTS) for word in argv):
        return _run_gpus_command(argv, environ)
    options = hosts_parser().parse_args(argv)
    ledger, now = Ledger(ledger_directory(environ), complain), time.time()
    if options.clear is not None:
        return _clear(ledger, options.clear, now)
    records = ledger.records(now)
    if options.json:
        return print_answer("".join(f"{json.dumps(_as_json(record))}\n" for record in records))
    return print_answer(ledger_table(records, now) if records else "no host has a record\n")


def _clear(ledger: Ledger, hosts: str, now: float) -> int:
    names = [host.name for host in parse_hosts(hosts)]
    cleared = ledger.clear(names, "", now)
    if not cleared:
        raise BadUsage(f"no record of {hosts}", hint="hvlaunch hosts")
    return print_answer(f"cleared: {', '.join(cleared)}\n")


def ledger_table(records: Iterable[HostRecord], now: float) -> str:
    """Return a table with a line for each host."""
    lines = aligned([_LEDGER_HEAD, *(_ledger_row(record, now) for record in records)])
    return "".join(f"{line}\n" for line in lines)


def _ledger_row(record: HostRecord, now: float) -> tuple[str, ...]:
    last = record.entries[-1]
    cells = (
        record.hosts[-1],
        "suspect" if record.is_suspect else "watched",
        ago(now - last.when),
        last.job or "-",
    )
    return (*map(visible_line, cells), visible_line(record.why))


def _as_json(record: HostRecord) -> dict[str, object]:
    return {
        "hosts": record.hosts,
        "score": round(record.score, 3),
        "weight": round(record.weight, 3),
        "is_suspect": record.is_suspect,
        "verdicts": [entry._asdict() for entry in record.entries],
    }


GPU_OPTIONS = OptionGroup(
    "hosts",
    (
        Option("json", ("--json",), "an object for each host, on its own line", source="command line"),
        Option("watch", ("--watch",), "go on until Ctrl-C", source="command line"),
    ),
)
_TAKEN = frozenset(
    [
        *(option.name for option in (*SSH.options, *GPU_OPTIONS.options)),
        *(
            "hosts",
            "hostfile",
            "no_scheduler",
            "start_timeout",
            "lease",
            "lease_directory",
            "lease_slots",
            "max_idle",
        ),
        *("config_file", "profile", "isolated", "command", "quiet", "verbose"),
    ]
)
_GPU_HEAD = ("HOST", "GPU", "USER", "JOB", "FOR", "USE", "MEMORY", "IDLE")
_EVERY = 2.0
_LAST_WORDS = 1.0
_CLEAR = "\x1b[H\x1b[2J"
_GB = 1e9


def _run_gpus_command(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the words behind `hosts` with hosts among them; return the exit code. Raises HvlaunchError."""
    groups = (*GROUPS, GPU_OPTIONS)
    try:
        options = options_of_word("hosts", argv, environ, _TAKEN, warn=complain, groups=groups)
    except Answered as answer:
        return print_answer(answer.text)
    # A look takes no leases, so these are no options of a job here.
    given = {"lease_directory", "lease_slots", "max_idle"}
    names = {name: settings for name, settings in options.settings.items() if name not in given}
    spec, warnings = job_spec(Options(names, groups, is_marked=True), environ)
    for warning in () if options.quiet else warnings:
        complain(f"warning: {warning}")
    leases = LeaseOptions(**options.fields("leases"))
    return _Screen(spec, leases, options).run()


class _Screen:
    """Shows the newest states of the hosts."""

    def __init__(self, spec: JobSpec, leases: LeaseOptions, options: Options) -> None:
        self._spec = spec
        self._options = options
        self._is_watching = bool(options.watch)
        self._arguments = {
            "directory": leases.directory,
            "slots": leases.slots,
            "every": _EVERY if self._is_watching else None,
            "keep": None,
            "watch": self._is_watching,
        }
        self._states: dict[str, Mapping[str, Any]] = {}
        self._changed = threading.Condition()

    def run(self) -> int:
        """Visit the hosts; return the exit code."""
        from hvlaunch.console.printer import Printer  # noqa: PLC0415 (the ledger needs none)
        from hvlaunch.gloo.visit import visit_hosts  # noqa: PLC0415 (errors come first)

        printer = Printer(sys.stderr.buffer, sys.stderr.buffer, options=self._spec.console)
        problems: Mapping[str, Problem] = {}
        try:
            problems = visit_hosts(self._spec, printer, self._look)
        except KeyboardInterrupt:
            if not self._is_watching:
                raise
        finally:
            printer.status(None)
            printer.close(_LAST_WORDS)
        code = self._show() if self._states and not self._is_watching else 0
        for text in dict.fromkeys(map(str, problems.values())):
            complain(text)
        return code or next((problem.exit_code for problem in problems.values()), 0)

    def _look(self, link: "HostLink", _facts: "HostFacts") -> None:
        """Raises HostError."""
        from hvlaunch.gloo.leasing import Looks  # noqa: PLC0415 (as above)

        looks = Looks(link, self._arguments, self._changed)
        state = None
        try:
            while (state := looks.wait_after(state)) is not None:
                with self._changed:
                    self._states[link.host.name] = state
                    if not self._is_watching:
                        return
                    self._show()
        finally:
            looks.errand.stop()

    def _show(self) -> int:
        states = {
            host.name: self._states[host.name] for host in self._spec.hosts if host.name in self._states
        }
        if self._options.json:
            lines = [json.dumps({"host": name, **state}) for name, state in states.items()]
            return print_answer("".join(f"{line}\n" for line in lines))
        table = gpu_table(states, time.time(), self._options.given.get("max_idle"))
        return print_answer(f"{_CLEAR if self._is_watching and sys.stdout.isatty() else ''}{table}")


def gpu_table(states: Mapping[str, Mapping[str, Any]], now: float, max_idle: float | None = None) -> str:
    """Return a table of GPUs or slots by states of the errand `leases`, and a line about those that are idle for too long."""
    rows: list[tuple[str, ...]] = [_GPU_HEAD]
    idle: list[str] = []
    for host, state in states.items():
        for unit in state["units"]:
            rows.append(_gpu_row(host, unit, state["at"]))
            holder = unit["holder"]
            if holder and max_idle is not None and (_idle(holder, state["at"]) or 0.0) > max_idle:
                idle.append(f"{host} {unit['index']} of {holder['user']}")
    lines = aligned(rows)
    units = [unit for state in states.values() for unit in state["units"]]
    lines.append(f"free: {sum(unit['is_free'] for unit in units)} of {len(units)}")
    tickets = {
        (ticket["since"], ticket["job"], ticket["user"])
        for state in states.values()
        for ticket in state["tickets"]
    }
    lines += [
        f"waits for {duration(max(0.0, now - since))}: {visible_line(user)}, job {visible_line(job)}"
        for since, job, user in sorted(tickets)
    ]
    if idle:
        lines.append(
            f"idle for more than {duration(max_idle or 0.0)}: {count(len(idle), 'lease')}: {', '.join(map(visible_line, idle))}"
        )
    return "".join(f"{line}\n" for line in lines)


def _idle(holder: Mapping[str, Any], now: float) -> float | None:
    return None if holder["busy_at"] is None else max(0.0, now - holder["busy_at"])


def _gpu_row(host: str, unit: Mapping[str, Any], now: float) -> tuple[str, ...]:
    holder = unit["holder"]
    since = idle = ""
    user, job = "free", ""
    if holder is not None:
        user, job = holder["user"], holder["job"] or "?"
        since = "" if holder["since"] is None else duration(max(0.0, now - holder["since"]))
        seconds = _idle(holder, now) if unit["memory_total"] else None
        idle = "" if seconds is None else f"{seconds / 60:.0f} min"
    # Every process of the holder belongs to the lease, whatever its program.
    strangers = [
        process for process in unit["processes"] if holder is None or process["user"] != holder["user"]
    ]
    if strangers:
        first = strangers[0]
        words = f"{first['command']} (pid {first['pid']}) of {first['user']}"
        user, job = (user, f"{job}, and {words}") if holder else ("outside hvlaunch", words)
    elif holder is None and not unit["is_free"]:
        user = "memory in use"
    has_gpu = unit["memory_total"] > 0
    cells = (
        host,
        str(unit["index"]),
        user,
        job,
        since,
        f"{unit['utilization']:.0%}" if has_gpu else "",
        f"{unit['memory_used'] / _GB:.0f}/{unit['memory_total'] / _GB:.0f} GB" if has_gpu else "",
        idle,
    )
    return tuple(map(visible_line, cells))
