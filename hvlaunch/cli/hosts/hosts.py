"""`hvlaunch hosts`: the hosts in the ledger, and the verdicts on them."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence

from hvlaunch.cli.options.parser import Parser
from hvlaunch.cli.process import complain, print_answer
from hvlaunch.console.lines import aligned, visible_line
from hvlaunch.console.status import ago
from hvlaunch.errors import BadUsage
from hvlaunch.hosts.parse import parse_hosts
from hvlaunch.outside.ledger import HostRecord, Ledger, ledger_directory

__all__ = ["hosts_parser", "ledger_table", "run_hosts_command"]

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
_HEAD = ("HOST", "RECORD", "LAST", "JOB", "WHY")


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
        from hvlaunch.cli.hosts.gpus import run_gpus_command  # noqa: PLC0415 (it connects to hosts)

        return run_gpus_command(argv, environ)
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
    lines = aligned([_HEAD, *(_row(record, now) for record in records)])
    return "".join(f"{line}\n" for line in lines)


def _row(record: HostRecord, now: float) -> tuple[str, ...]:
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
