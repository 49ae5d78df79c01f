"""`hvlaunch bisect`: runs a command on sets of hosts until one host or one link explains all results."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from hvlaunch.check.bisection import Bisection, Conclusion, most_rounds
from hvlaunch.children import Sweeper
from hvlaunch.cli.arguments import Answered, parse
from hvlaunch.cli.options import Option, OptionGroup, Typed, Value, by_name, split
from hvlaunch.cli.options.settings import Options
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.cli.options.values import SECONDS, positive
from hvlaunch.cli.process import complain, print_answer
from hvlaunch.cli.spec import job_spec
from hvlaunch.console.status import count, duration
from hvlaunch.errors import EXIT_HOSTS, BadUsage
from hvlaunch.hosts.parse import host_set, hostfile_line
from hvlaunch.job import Host
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.outside.ledger import Ledger, ledger_directory

__all__ = ["bisect_options", "run_bisect_command"]

_USAGE = """\
usage: hvlaunch bisect [-H HOSTS | --hostfile FILE] [--repeat N] [--seconds S] [--json] [options of a job] -- COMMAND [ARG ...]

Run a short command that fails on these hosts on sets of them, until one host or one link explains all results. COMMAND runs
as a job on each set, with all slots. The exit code is 0 if nothing is wrong, and 69 for bad hosts or a bad link.

  --repeat N   run a command that succeeds N times in each round: for faults that show themselves now and then (default: 1)
  --seconds S  a run that takes longer counts as failed (default: 300)
  --json       an object for programs
"""
_HINT = "hvlaunch bisect -H a,b,c,d -- python check_all_reduce.py"
_OWN = OptionGroup(
    "bisect",
    (
        Option("repeat", ("--repeat",), "runs", Value(("N",), positive), source="command line"),
        Option("seconds", ("--seconds",), "limit of a run", SECONDS, source="command line"),
        Option("json", ("--json",), "an object for programs", source="command line"),
    ),
)
_HOSTS = frozenset(["hosts", "hostfile", "np"])
_SECONDS_OF_RUN = 300.0
_ENDING = 30.0
"""Seconds for a job to end after SIGTERM; it then stops its workers by itself."""
_TAIL = 20
"""Lines of the last failed run that are shown."""


class _Run(NamedTuple):
    hosts: tuple[str, ...]
    failed: bool
    output: str


def run_bisect_command(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the words behind `bisect`; return the exit code. Raises HvlaunchError."""
    try:
        options = bisect_options(argv, environ)
    except Answered as answer:
        return print_answer(answer.text)
    spec, warnings = job_spec(options, environ)
    if not spec.hosts:
        raise BadUsage("bisect: no hosts are named", hint=_HINT)
    for warning in () if options.quiet else warnings:
        complain(f"warning: {warning}")
    names = by_name((*GROUPS, _OWN))
    typed, command = split(argv, names, lambda _name: False)
    taken = _HOSTS | {option.name for option in _OWN.options}
    words = [word for option in typed if names[option.name].name not in taken for word in _words(option)]
    with tempfile.TemporaryDirectory(prefix="hvlaunch-bisect-") as folder:
        runner = _Runner(
            Path(folder),
            spec.hosts,
            [*words, "--", *command],
            environ,
            seconds=options.given.get("seconds") or _SECONDS_OF_RUN,
            repeats=options.given.get("repeat") or 1,
        )
        with closing(runner):
            conclusion = _search(runner, [host.name for host in spec.hosts], is_quiet=bool(options.quiet))
    _remember(conclusion, environ)
    return _report(conclusion, runner, is_json="json" in options.given)


def bisect_options(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Return the options of the words behind `bisect`. Raises BadUsage, and Answered for --help."""
    own_words = argv[: argv.index("--")] if "--" in argv else argv
    if {"-h", "--help"} & {*own_words}:
        raise Answered(_USAGE)
    if own_words == argv or not argv[len(own_words) + 1 :]:
        raise BadUsage("bisect: a command behind -- is needed", hint=_HINT)
    options = parse(argv, (*GROUPS, _OWN), environ=environ, warn=complain)
    if "np" in options.given:
        raise BadUsage("bisect: the sets have all slots of their hosts, so -np has no meaning", hint=_HINT)
    return options


def _words(option: Typed) -> tuple[str, ...]:
    if option.is_joined and option.name.startswith("--"):
        return (f"{option.name}={option.values[0]}",)
    return (option.name, *option.values)


class _Runner:
    """Runs a job on sets of hosts. `failures` are the failed runs, in order."""

    def __init__(
        self,
        folder: Path,
        hosts: Sequence[Host],
        words: Sequence[str],
        environ: Mapping[str, str],
        *,
        seconds: float,
        repeats: int,
    ) -> None:
        self._folder = folder
        self._hosts = {host.name: host for host in hosts}
        self._words = words
        # The failures of these jobs are no verdicts on hosts: half of a bad link is good.
        self._environ = {**environ, "XDG_STATE_HOME": str(folder / "state")}
        self._seconds = seconds
        self.repeats = repeats
        self.failures: list[_Run] = []
        self._is_stopped = False
        self._running: set[subprocess.Popen[bytes]] = set()
        self._sweeper = Sweeper()

    def close(self) -> None:
        """Kill what may be left of the jobs."""
        self._sweeper.close()

    def run(self, sets: Sequence[tuple[str, ...]]) -> list[_Run]:
        """Run on all sets at the same time; a set that succeeds runs again, `repeats` times in all."""
        with ThreadPoolExecutor(len(sets)) as pool:
            try:
                runs = [run for part in pool.map(self._repeat, sets) for run in part]
            except BaseException:
                # Otherwise the pool would wait for the ends of the jobs.
                self._is_stopped = True
                for process in list(self._running):
                    process.send_signal(signal.SIGTERM)
                raise
        self.failures += [run for run in runs if run.failed]
        return runs

    def _repeat(self, hosts: tuple[str, ...]) -> list[_Run]:
        runs: list[_Run] = []
        while len(runs) < self.repeats and not self._is_stopped and not any(run.failed for run in runs):
            runs.append(self._run_once(hosts))
        return runs

    def _run_once(self, hosts: tuple[str, ...]) -> _Run:
        descriptor, hostfile = tempfile.mkstemp(dir=self._folder)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(f"{hostfile_line(self._hosts[name])}\n" for name in hosts)
        with tempfile.TemporaryFile(dir=self._folder) as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "hvlaunch", "--hostfile", hostfile, *self._words],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C reaches this process alone, and ends the jobs; the sweeper ends them after SIGKILL.
                start_new_session=True,
            )
            self._sweeper.add(process.pid)
            self._running.add(process)
            if self._is_stopped:  # since it was about to start
                process.send_signal(signal.SIGTERM)
            end = ""
            try:
                process.wait(self._seconds)
            except subprocess.TimeoutExpired:
                end = f"it was stopped after {duration(self._seconds)}\n"
            finally:
                _end(process)
                self._running.discard(process)
                self._sweeper.forget(process.pid)
            output.seek(0)
            text = output.read().decode(errors="replace")
        return _Run(hosts, process.returncode != 0 or bool(end), text + end)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Let the job stop its workers."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _search(runner: _Runner, hosts: Sequence[str], *, is_quiet: bool) -> Conclusion:
    bisection = Bisection(hosts)
    number = 0
    while sets := bisection.next_round():
        number += 1
        begin = time.monotonic()
        runs = runner.run(sets)
        for run in runs:
            bisection.add(run.hosts, failed=run.failed)
        failed = [host_set(run.hosts) for run in runs if run.failed]
        if not is_quiet:
            verdict = f"failed on {'; '.join(failed)}" if failed else "all succeeded"
            complain(
                f"round {number} of at most {most_rounds(len(hosts))}, {duration(time.monotonic() - begin)}: "
                f"{count(len(sets), 'set')} of hosts: {verdict}"
            )
    assert bisection.conclusion is not None  # noqa: S101 (the search ends with one)
    return bisection.conclusion


def _remember(conclusion: Conclusion, environ: Mapping[str, str]) -> None:
    """Write bad hosts to the ledger. Of a bad link each end may be the cause."""
    verdicts = {"host": "check failed", "network": "check failed", "link": "network error"}
    verdict = verdicts.get(conclusion.cause)
    if verdict is not None:
        ledger = Ledger(ledger_directory(environ), complain)
        for host in conclusion.hosts:
            ledger.record("", host, verdict, "", time.time(), f"bisect: {_sentence(conclusion)}")


def _sentence(conclusion: Conclusion) -> str:
    hosts = conclusion.hosts
    match conclusion.cause:
        case "nothing":
            return "nothing is wrong: the command succeeded on all hosts together"
        case "everything":
            return "the command fails on each host alone: look for the cause in the command, or in what all hosts share"
        case "host":
            return f"the command fails on {host_set(hosts)} alone, and succeeds without {'it' if len(hosts) == 1 else 'them'}"
        case "network":
            return f"the network of host {hosts[0]} is bad: the command succeeds there alone, and fails with any other host"
        case "link":
            return f"the link between hosts {hosts[0]} and {hosts[1]} is bad: the command fails on both together, and succeeds on either with others"
        case "unclear":
            return f"no single host or link explains all results; the smallest set that failed: {host_set(hosts)}"


def _report(conclusion: Conclusion, runner: _Runner, *, is_json: bool) -> int:
    sentence = _sentence(conclusion)
    exit_code = 0 if conclusion.cause == "nothing" else EXIT_HOSTS
    if is_json:
        answer = {**conclusion._asdict(), "text": sentence}
        return print_answer(json.dumps(answer) + "\n") or exit_code
    lines = []
    smallest = min(runner.failures, key=lambda run: len(run.hosts), default=None)
    if smallest is not None:
        lines += [f"the end of a failed run on {host_set(smallest.hosts)}:"]
        lines += [f"  {line}" for line in smallest.output.rstrip().splitlines()[-_TAIL:]]
    lines.append(f"{sentence} ({count(conclusion.rounds, 'round')}, confidence {conclusion.confidence:.1%})")
    if conclusion.cause == "nothing":
        lines.append(
            f"(the confidence is for a fault in every second run; more runs raise it: --repeat {2 * runner.repeats + 2})"
        )
    elif conclusion.cause in ("host", "network"):
        lines.append(f"try: hvlaunch check -H {host_set(conclusion.hosts)}; hvlaunch hosts keeps the record")
    return print_answer("\n".join([*lines, ""])) or exit_code
