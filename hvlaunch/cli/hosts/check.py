"""`hvlaunch check`: compares hosts before a job, and names what would stop or slow the job."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hvlaunch.check import Expectation, Finding, expectations_of, measures, unexpected
from hvlaunch.check.report import Comparison, as_hostfile, as_html, as_json, as_text
from hvlaunch.check.table import CHECKS
from hvlaunch.cli.arguments import Answered, parse
from hvlaunch.cli.config import BadSyntax, toml_tree
from hvlaunch.cli.options import Option, OptionGroup, UnknownOption, Value, by_name, split
from hvlaunch.cli.options.settings import Options
from hvlaunch.cli.options.table import GROUPS
from hvlaunch.cli.process import complain, print_answer
from hvlaunch.cli.spec import job_spec
from hvlaunch.console.printer import Printer
from hvlaunch.errors import EXIT_HOSTS, BadUsage, HostError, Problem
from hvlaunch.job import JobSpec
from hvlaunch.outside import NoJobDirectory
from hvlaunch.outside.ledger import Ledger, ledger_directory
from hvlaunch.owners import reason

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.engine.events import HostFacts

__all__ = ["check_options", "run_check_command"]

_USAGE = """\
usage: hvlaunch check [-H HOSTS | --hostfile FILE] [--json] [--html FILE] [--expect FILE] [--write-hostfile FILE] [--deep]
                      [options of a job] [COMMAND [ARG ...]]

Compare hosts, and name each fault with its host and what to do about it: `check` before the line of a job is enough.
COMMAND is not started; its Python and its script are looked at. The exit code is 0, or 69 if a fault would stop a job.

  --json                  an object for programs
  --html FILE             write a page with a column for each host
  --expect FILE           values that are good, as TOML: torch = "2.6.0", memory = { min = "500G" }
  --write-hostfile FILE   write a hostfile of the hosts without errors, with slots and addresses
  --deep                  multiply matrices, and sum over pairs of hosts, by the job's Python with torch
"""
_FILE = Value(("FILE",), completion="file")
_OWN = OptionGroup(
    "check",
    (
        Option("json", ("--json",), "an object for programs", source="command line"),
        Option("deep", ("--deep",), "run pieces of training", source="command line"),
        Option("html", ("--html",), "write a page", _FILE, source="command line"),
        Option("expect", ("--expect",), "values that are good", _FILE, source="command line"),
        Option("write_hostfile", ("--write-hostfile",), "write a hostfile", _FILE, source="command line"),
    ),
)
_DEFAULT_COMMAND = ("--", "python3")


def run_check_command(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the words behind `check`; return the exit code. Raises HvlaunchError."""
    try:
        options = check_options(argv, environ)
    except Answered as answer:
        return print_answer(answer.text)
    spec, warnings = job_spec(options, environ)
    if not spec.hosts:
        raise BadUsage("check: no hosts are named", hint="hvlaunch check -H a,b python train.py")
    for warning in () if options.quiet else warnings:
        complain(f"warning: {warning}")
    expectations = _expectations(options.given.get("expect"))
    comparison = _examined(spec, is_deep="deep" in options.given)
    _remember(comparison, environ)
    findings = [*comparison.findings, *unexpected(expectations, comparison.values)]
    return _report(comparison._replace(findings=findings), options)


def check_options(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Return the options of the words behind `check`. Raises BadUsage, and Answered for a question."""
    groups = (*GROUPS, _OWN)
    try:
        _, command = split(argv, by_name(groups), lambda _name: True)
    except UnknownOption as error:
        command = error.words  # parse() has the words for it
    if {"-h", "--help"} & {*argv[: len(argv) - len(command)]}:
        raise Answered(_USAGE)
    return parse([*argv, *(() if command else _DEFAULT_COMMAND)], groups, environ=environ, warn=complain)


def _expectations(path: str | None) -> list[Expectation]:
    """Raises BadUsage."""
    if path is None:
        return []
    try:
        tree = toml_tree(Path(path).read_text(encoding="utf-8"))
        return expectations_of(cast("Mapping[str, Any]", tree), CHECKS)
    except OSError as error:
        raise BadUsage(f"{path}: {reason(error)}") from None
    except (BadSyntax, ValueError) as error:
        raise BadUsage(f"{path}: {error}", hint='lines such as torch = "2.6.0"') from None


def _examined(spec: JobSpec, *, is_deep: bool) -> Comparison:
    from hvlaunch.gloo.examination import Examination, python_of  # noqa: PLC0415 (errors come first)
    from hvlaunch.gloo.measures import Deep, Pairs  # noqa: PLC0415 (as above)
    from hvlaunch.gloo.visit import visit_hosts  # noqa: PLC0415 (as above)

    examination = Examination(spec)
    names = [host.name for host in spec.hosts]
    pairs = Pairs(names, spec.worker_ports or ())
    deep = Deep(names, python_of(spec) or "python3", dict(spec.env), spec.cwd) if is_deep else None
    gatherings = [examination.gathering, pairs.gathering, *([deep.gathering] if deep is not None else [])]

    def work(link: "HostLink", facts: "HostFacts") -> None:
        try:
            examination.examine(link, facts, pairs)
            if deep is not None:
                deep.measure(link, facts)
        except HostError:
            gone(link.host.name)
            raise

    def gone(name: str) -> None:
        for gathering in gatherings:
            gathering.leave(name)

    with closing(Printer(sys.stderr.buffer, sys.stderr.buffer, options=spec.console)) as printer:
        problems = visit_hosts(spec, printer, work, gone)
    findings = [_finding(name, problem) for name, problem in problems.items()]
    findings += [*examination.findings(), *pairs.findings(), *(deep.findings() if deep is not None else ())]
    between, trials = pairs.values(), deep.values() if deep is not None else {}
    values = {
        host: {**of_host, "pairs": between.get(host), "deep": trials.get(host)}
        for host, of_host in examination.values.items()
    }
    return Comparison(spec.hosts, (*CHECKS, *measures.CHECKS), values, findings)


def _finding(host: str, problem: Problem) -> Finding:
    """Return a host's problem as a finding."""
    return Finding(host, "error", "ssh", problem.cause, problem.hint or "")


def _remember(comparison: Comparison, environ: Mapping[str, str]) -> None:
    """Write faulty hosts to the ledger of hosts, and clear the good ones."""
    errors = [finding for finding in comparison.findings if finding.level == "error"]
    # A host that did not answer was not checked: the user may have no access.
    faults = {finding.host: finding for finding in errors if finding.host in comparison.values}
    good = [host for host in comparison.values if comparison.level(host) in (None, "note")]
    with suppress(NoJobDirectory):
        ledger, now = Ledger(ledger_directory(environ), complain), time.time()
        ledger.clear(good, "", now)
        # A fault of most hosts is a mistake in the line, or the cluster's own way.
        if 2 * len(faults) <= len(comparison.values):
            for host, fault in faults.items():
                ledger.record("", host, "check failed", "", now, f"{fault.subject}: {fault.text}")


def _report(comparison: Comparison, options: Options) -> int:
    """Write the files, and print the answer; return the exit code."""
    for name, text in (("html", as_html), ("write_hostfile", as_hostfile)):
        path = options.given.get(name)
        if path is not None:
            _write(path, text(comparison))
    if "json" in options.given:
        code = print_answer(json.dumps(as_json(comparison)) + "\n")
    else:
        code = print_answer(as_text(comparison, with_notes=bool(options.given.get("verbose"))))
    has_errors = any(finding.level == "error" for finding in comparison.findings)
    return code or (EXIT_HOSTS if has_errors else 0)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadUsage(f"{path}: {reason(error)}") from None
