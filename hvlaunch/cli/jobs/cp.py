"""`hvlaunch cp`: copies a file or a directory to all hosts, from this machine or from a host."""

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from hvlaunch.cli.arguments import Answered, options_of_word
from hvlaunch.cli.options import UnknownOption, by_name, split
from hvlaunch.cli.options.table import GROUPS, SSH
from hvlaunch.cli.options.values import collect_options, source_and_path
from hvlaunch.cli.process import complain, print_answer
from hvlaunch.cli.spec import current_directory, job_spec
from hvlaunch.console.printer import Printer
from hvlaunch.console.status import count, size_words
from hvlaunch.errors import EXIT_NOT_WRITTEN, BadUsage
from hvlaunch.hosts.parse import host_set, parse_hosts
from hvlaunch.job import BringOptions, CollectOptions, JobSpec
from hvlaunch.outside import KnownJob, await_driver
from hvlaunch.outside.control import ControlClient

if TYPE_CHECKING:
    from hvlaunch.driver.links.host_link import HostLink
    from hvlaunch.engine.events import HostFacts
    from hvlaunch.sync.bringing import Bringing
    from hvlaunch.sync.collection import Collected

__all__ = ["run_collect_command", "run_cp_command"]

_USAGE = """\
usage: hvlaunch cp [-H HOSTS | --hostfile FILE] [--json] [options of hosts and of SSH] SRC DST

Copy a file or a directory to all hosts. SRC is a path here, or HOST:PATH on one of the hosts. DST is the name of the copy
on each host, or with / at its end the directory for it. Hosts pass the content on to each other. What has arrived is kept
if the copy is broken off: the same command continues there. The exit code is 0 if all hosts have the files.

  --json  an object for programs
"""
_HINT = "hvlaunch cp -H a,b ./model /data/model"
_TAKEN = frozenset(
    [
        *(option.name for option in SSH.options),
        *("hosts", "hostfile", "slots_per_host", "force_slots", "no_scheduler", "start_timeout", "lease"),
        *("config_file", "profile", "isolated", "command", "quiet", "verbose"),
    ]
)
"""Options of a job for this command too."""
_LAST_WORDS = 1.0
_LONG = 86400.0


def run_collect_command(
    job: KnownJob, texts: Sequence[str], environ: Mapping[str, str], *, is_json: bool
) -> int:
    """Bring files of a running or ended job back; return the exit code. Raises HvlaunchError."""
    from hvlaunch.sync.collection import Collected, kept_hosts, summary  # noqa: PLC0415 (errors come first)

    options = collect_options(texts, current_directory(environ))
    # The driver of a running job has the connections, and knows the directories.
    if await_driver(job):
        body = {"options": [list(option) for option in options]}
        answer = ControlClient(job).post("/collect", body, _LONG)
        results = [
            Collected(**{**entry, "skipped": [*map(tuple, entry["skipped"])]}) for entry in answer["hosts"]
        ]
        options = options or tuple(CollectOptions(*pair) for pair in answer["options"])
    else:
        kept = kept_hosts(job.directory)
        if kept is None:
            raise BadUsage(f"job {job.id} has ended, and its hosts are not known", hint="hvlaunch jobs")
        spec, directories = kept
        options = options or spec.collect
        results = _collect(spec, directories, options)
    if not options:
        raise BadUsage(f"job {job.id} has no --collect", hint=f"hvlaunch collect {job.id} 'checkpoints/*.pt'")
    failed = any(result.problem is not None for result in results)
    if is_json:
        code = print_answer(
            json.dumps({"hosts": {result.host: result.as_json() for result in results}}) + "\n"
        )
    else:
        lines = summary(results, [option.directory for option in options], f"hvlaunch collect {job.id}")
        code = print_answer(lines[0] + "\n")
        for line in lines[1:]:
            complain(line)
    return code or (EXIT_NOT_WRITTEN if failed else 0)


def _collect(
    spec: JobSpec, directories: Mapping[str, str], options: Sequence[CollectOptions]
) -> "list[Collected]":
    """Collect from hosts without a job."""
    from hvlaunch.gloo.visit import visit_hosts  # noqa: PLC0415 (as above)
    from hvlaunch.sync.collection import LIMIT, Collected, Collection  # noqa: PLC0415 (as above)

    collection = Collection(LIMIT if spec.collect_limit is None else spec.collect_limit)

    def work(link: "HostLink", _facts: "HostFacts") -> None:
        collection.collect(link, directories[link.host.name], options)

    with closing(Printer(sys.stderr.buffer, sys.stderr.buffer, options=spec.console)) as printer:
        problems = visit_hosts(spec, printer, work)
    results = list(collection.results)
    seen = {result.host for result in results}
    return results + [
        Collected(name, problem=problem.cause) for name, problem in problems.items() if name not in seen
    ]


def run_cp_command(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the words behind `cp`; return the exit code. Raises HvlaunchError."""
    if {"-h", "--help"} & {*argv}:
        return print_answer(_USAGE)
    is_json = "--json" in argv
    words = [word for word in argv if word != "--json"]
    try:
        _, files = split(words, by_name(GROUPS), lambda _name: False)
    except UnknownOption as error:
        raise BadUsage(f"cp: unknown option {str(error)!r}", hint=_HINT) from None
    if len(files) != len(("SRC", "DST")):
        raise BadUsage("cp: SRC and DST come last, and options before them", hint=_HINT)
    try:
        options = options_of_word("cp", words[: -len(files)], environ, _TAKEN, warn=complain)
    except Answered as answer:
        return print_answer(answer.text)
    spec, warnings = job_spec(options, environ)
    if spec.allocation is None and not options.given.keys() & {"hosts", "hostfile"}:
        raise BadUsage("cp: no hosts are named", hint=_HINT)
    for warning in () if options.quiet else warnings:
        complain(f"warning: {warning}")
    return _copy(spec, source_and_path(files[0], files[1], spec.cwd), is_json=is_json)


def _copy(spec: JobSpec, options: BringOptions, *, is_json: bool) -> int:
    from hvlaunch.gloo.visit import visit_hosts  # noqa: PLC0415 (errors come first)
    from hvlaunch.sync.bringing import Bringing  # noqa: PLC0415 (as above)

    hosts = [host.name for host in spec.hosts]
    if options.host is not None and options.host not in hosts:
        spec = replace(spec, hosts=(*parse_hosts(options.host), *spec.hosts))
    bringing = Bringing(options, has_peers=len(hosts) > 1)
    copy = _Copy(bringing, options, hosts)
    printer = Printer(sys.stderr.buffer, sys.stderr.buffer, options=spec.console)
    try:
        # No rendezvous is needed: the driver listens nowhere.
        problems = visit_hosts(replace(spec, relay="always"), printer, copy.work, copy.gone)
    except KeyboardInterrupt:
        printer.status(None)
        printer.say("stopped; the same command continues here")
        raise
    finally:
        printer.status(None)
        printer.close(_LAST_WORDS)
    files = bringing.files
    received = copy.received
    if is_json:
        answer = {
            "path": options.path,
            "files": None if files is None else files.count,
            "bytes": None if files is None else files.size,
            "hash": None if files is None else files.hash,
            "hosts": {
                name: {
                    "received": received.get(name),
                    "error": str(problems[name]) if name in problems else None,
                }
                for name in hosts
            },
        }
        code = print_answer(json.dumps(answer) + "\n")
    else:
        done = [name for name in hosts if name in received]
        text = ""
        if done and files is not None:
            sent = sum(received.values()) / len(done)
            text = f"{host_set(done)}: {options.path}, {count(files.count, 'file')}, {size_words(files.size)}"
            text += " (all were there)\n" if not sent else f" ({size_words(sent)} were new)\n"
        code = print_answer(text)
    for text in dict.fromkeys(map(str, problems.values())):
        complain(text)
    if problems and files is not None:
        complain("try: the same command, which continues where this one has stopped")
    return code or next((problem.exit_code for problem in problems.values()), 0)


class _Copy:
    """The work on each host."""

    def __init__(self, bringing: "Bringing", options: BringOptions, hosts: Sequence[str]) -> None:
        self.received: dict[str, int] = {}
        """Received bytes of each complete host."""
        self._bringing = bringing
        self._source = options.host
        self._hosts = hosts
        self._changed = threading.Condition()
        self._left = set(hosts)

    def work(self, link: "HostLink", facts: "HostFacts") -> None:
        """Raises HostError."""
        name = link.host.name
        errand = self._bringing.serve(link, facts) if name == self._source else None
        if name in self._hosts:
            self.received[name] = self._bringing.deliver(link, facts, lambda _facts: None)
        self._ended(name)
        if errand is not None:
            with self._changed:
                self._changed.wait_for(lambda: not self._left or errand.has_ended)
            errand.stop()

    def gone(self, name: str) -> None:
        """End the waits for a failed host."""
        if name == self._source:
            self._bringing.give_up("it has the files, and is lost")
        self._ended(name)

    def _ended(self, name: str) -> None:
        with self._changed:
            self._left.discard(name)
            self._changed.notify_all()
