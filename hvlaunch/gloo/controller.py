"""hvlaunch's own controller: it opens the parts of a job, runs the driver's loop among them, and reports the end.

Its ways to hosts are ssh, a scheduler's own program, a warm pool, or pipes on this machine. A successor takes over the job of a killed
driver.
"""

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, Protocol

from hvlaunch import __version__
from hvlaunch.agent.wire.probe import Prover
from hvlaunch.console.lines import visible
from hvlaunch.console.printer import Printer
from hvlaunch.console.status import OnStatus
from hvlaunch.driver.links.agent_channel import AgentConnection, CommandConnection, LostConnection
from hvlaunch.driver.observing import CollectWanted, Inquiry, MoveRequest, Observe, StacksWanted
from hvlaunch.driver.process import Detachment, failures_as_events, signals_as_events
from hvlaunch.driver.program import Keys
from hvlaunch.engine import events as on
from hvlaunch.engine.hosts import LOOPBACK
from hvlaunch.errors import EXIT_HOSTS, EXIT_INTERNAL, EXIT_NOT_WRITTEN, BadUsage, HostError, HvlaunchError
from hvlaunch.gloo.reporting import Reporting, check_report_path
from hvlaunch.hosts.local import is_here_by_dns, is_local, launcher_of, may_be_taken_over, only_local
from hvlaunch.job import Host, JobResult, JobSpec
from hvlaunch.named_tuples import NamedTuple
from hvlaunch.rendezvous.serving import EVERYWHERE, RendezvousServer
from hvlaunch.ssh import Connection, Ways, connect_by_agent, connect_local

if TYPE_CHECKING:
    from hvlaunch.console.output_store import OutputStore
    from hvlaunch.driver.history import History
    from hvlaunch.driver.job_record import JobRecord, Past, Takeover
    from hvlaunch.driver.loop import Item, Watcher
    from hvlaunch.engine import actions as do
    from hvlaunch.gloo.host_memory import HostMemory
    from hvlaunch.gloo.notifier import Notifier
    from hvlaunch.outside import JobDirectory
    from hvlaunch.rendezvous.serving.http import Answer, Head, Route
    from hvlaunch.sync.collection import JobCollector
    from hvlaunch.telemetry.stack import ProcessStack
    from hvlaunch.watch.journal import ReplayJournal

__all__ = ["HostWays", "JobOver", "WaysToHosts", "by_ssh", "run", "run_successor", "take_over"]

_PAGER_PATIENCE = 600.0
"""Seconds for a user who reads a successful job's output in a pager."""


class JobOver(HvlaunchError):
    """The job ended before it could be taken over.

    Try: `hvlaunch logs JOB` prints its output.
    """

    exit_code = EXIT_HOSTS


class HostWays(NamedTuple):
    """The functions for connections to hosts. `connect` and `lost` raise HostError."""

    connect: Callable[[Host], AgentConnection]
    """Makes a new connection, for starting an agent."""
    lost: Callable[[Host], AgentConnection]
    """Returns the lost connection of a killed driver, for the session to replace."""


WaysToHosts = Callable[[JobSpec, Keys, Callable[[str], None]], AbstractContextManager[HostWays]]
"""Opens the ways for the duration of a job, by the job, its keys, and a function that prints a message."""


@contextmanager
def by_ssh(
    spec: JobSpec, keys: Keys, _say: Callable[[str], None], shared: Ways | None = None
) -> Iterator[HostWays]:
    """Open hvlaunch's own ways: by ssh (with `shared` if they have begun), or by a scheduler's own program."""
    agent = spec.ssh.remote_agent
    if agent is not None:
        remote = partial(connect_by_agent, agent)
        yield HostWays(partial(_connect, spec, remote), partial(_lost, spec, remote))
        return
    with closing(shared or Ways(spec.ssh, timeout=spec.start_timeout)) as ways:
        plain = HostWays(partial(_connect, spec, ways.connect), partial(_lost, spec, ways.connect))
        yield plain if spec.pool is None else _by_pool(spec, keys, plain, ways.connect)


def run(
    spec: JobSpec,
    *,
    stdout: BinaryIO,
    stderr: BinaryIO,
    stdin: int = 0,
    ways: WaysToHosts = by_ssh,
    on_detached: Callable[[str], None] | None = None,
    on_begun: Callable[[str], None] = lambda _job_id: None,
    on_status: OnStatus | None = None,
    advise: Callable[[str], str] = str,
) -> JobResult:
    """Run a job: workers' output to stdout and stderr, the failure report last.

    `on_detached` is called with the job's id when the driver has left its terminal, `on_begun` as soon as the id exists.
    `on_status` gets hvlaunch's status lines, in place of stderr. `advise` completes the advice in a message. Signals reach the workers only if called in the main thread.
    Raises HvlaunchError for errors in the job itself, before anything is started.
    """
    # The user's mistakes first, before any part of the job exists.
    if spec.output_dir is not None:
        from hvlaunch.driver.worker_files import make_output_directory  # noqa: PLC0415 (few jobs have one)

        make_output_directory(spec.output_dir)
    if spec.report is not None:
        check_report_path(spec.report)
    keys = Keys.new(None if spec.queued is None else spec.queued.job_id)
    about = _about(spec, keys.job_id)
    with _job_directory(spec, about) as directory:
        on_begun(keys.job_id)
        job = _Job(spec, keys, directory, ways, about)
        result, reporting = _run_and_report(job, stdout, stderr, stdin, on_detached, on_status, advise)
        if directory is not None and (result.exit_code != 0 or directory.is_detached or _is_kept(spec)):
            _keep(job, directory, result, reporting)
    return result


def run_successor() -> NoReturn:
    """Run the program of a successor: take over the job whose directory is the first argument.

    A successor is headless. Its exit code is the job's, 2 if the job has another driver, and 69 if the job can't be taken
    over; stderr has the reason then.
    """
    from hvlaunch.outside import DriverLives  # noqa: PLC0415 (see take_over)

    try:
        code = take_over(Path(sys.argv[1])).exit_code
    except HvlaunchError as error:
        sys.stderr.write(f"hvlaunch: {error}\n")
        code = error.exit_code if isinstance(error, DriverLives) else EXIT_HOSTS
    sys.exit(code)


def take_over(path: Path) -> JobResult:
    """Continue the job of a killed driver as run() does; the job's directory `path` keeps the output.

    Raises DriverLives, NoJobDirectory, JobOver, and the errors of read_past().
    """
    from hvlaunch.driver.job_record import NoJournal, TornJournal  # noqa: PLC0415 (few drivers are killed)
    from hvlaunch.outside import JobDirectory, remove_secrets  # noqa: PLC0415 (as above)

    with closing(JobDirectory.adopt(path)) as directory:
        try:
            past, keys = _past_and_keys(path)
        except HvlaunchError as error:
            _say_in_output(path, str(error))
            # A journal of another version may still be taken over by that version.
            if isinstance(error, JobOver | NoJournal | TornJournal):
                with suppress(OSError):
                    remove_secrets(path)
            raise
        # Relative paths of the job count from there; a directory that is gone is no reason to end the job.
        with suppress(OSError):
            os.chdir(past.begin.cwd)
        job = _Job(past.begin.spec, keys, directory, by_ssh, directory.about, past)
        # The killed driver's stdin is gone; workers that read it have got its end.
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123 (no path is joined)
            result, reporting = _run_and_report(job, None, None, nothing.fileno(), None)
        _keep(job, directory, result, reporting)
    return result


def _past_and_keys(path: Path) -> "tuple[Past, Keys]":
    from hvlaunch.driver.job_record import JOURNAL, NoJournal, read_past  # noqa: PLC0415 (see take_over)
    from hvlaunch.outside import KEYS, RESULT  # noqa: PLC0415 (as above)

    if (path / RESULT).exists():
        raise JobOver(f"{path}: the job has ended", hint="hvlaunch jobs")
    # The journal first: its errors say more than missing keys.
    past = read_past(path / JOURNAL)
    try:
        keys, env = Keys.load(path / KEYS)
    except FileNotFoundError:
        cause = (
            f"{path}: the job's keys were removed: it had no driver for longer than its hosts wait for one"
        )
        raise NoJournal(cause, hint="start the job again") from None
    except (OSError, ValueError) as error:
        raise NoJournal(f"{path / KEYS}: {error}") from None
    begin = past.begin._replace(spec=replace(past.begin.spec, env=env))
    return past._replace(begin=begin), keys


def _say_in_output(path: Path, text: str) -> None:
    """Say it where the job's output is read: a successor's own stderr has no reader, since a minder starts it."""
    from hvlaunch.console.output_store import OutputStore  # noqa: PLC0415 (see take_over)

    with suppress(OSError), closing(OutputStore(path)) as store:
        store.say(text)
        store.write()


class _Job(NamedTuple):
    """A job before any part of it is open."""

    spec: JobSpec
    keys: Keys
    directory: "JobDirectory | None"
    ways: WaysToHosts
    about: dict[str, Any]
    """Description of the job for other programs."""
    past: "Past | None" = None
    """The turns of a killed driver; None for a new job."""


def _run_and_report(
    job: _Job,
    stdout: BinaryIO | None,
    stderr: BinaryIO | None,
    stdin: int,
    on_detached: Callable[[str], None] | None,
    on_status: OnStatus | None = None,
    advise: Callable[[str], str] = str,
) -> tuple[JobResult, Reporting]:
    """Run the job and show its end. Without `stdout` and `stderr`, only the job's directory gets the output."""
    spec, directory = job.spec, job.directory
    events: SimpleQueue[Item] = SimpleQueue()
    has_store = directory is not None and (spec.detach != "never" or stdout is None or _is_followed(spec))
    store = _output_store(spec, directory) if has_store and directory is not None else None
    with failures_as_events(events.put) as failures, ExitStack() as signals:
        detachment: Detachment | None = None
        printer = Printer(
            stdout,
            stderr,
            store=store,
            # Output of workers before the driver leaves is not for the terminal: stdout gets the job's id alone.
            options=replace(spec.console, ranks=()) if spec.detach == "at start" else spec.console,
            on_broken=lambda: events.put(_left_alone(spec, detachment, signal.SIGPIPE)),
            on_status=on_status,
            advise=advise,
        )
        if spec.detach != "never" and store is not None and directory is not None and stdout is not None:
            detachment = Detachment(directory, printer, on_detached)
        on_hangup = partial(events.put, _left_alone(spec, detachment, signal.SIGHUP))
        on_quit = partial(events.put, StacksWanted(partial(_show_stacks, printer)))
        signals.enter_context(signals_as_events(events.put, on_hangup, on_quit))
        reporting = Reporting(spec, printer, job.about, None if directory is None else directory.path)
        collector = _JobCollector(spec, printer)
        memory = _host_memory(job, printer.say)
        notifier = _notifier(job, reporting, printer.say)
        patience = spec.grace
        last_words: Callable[[bool], str] | None = None
        try:
            try:
                observers = [part.watch for part in (memory, notifier) if part is not None]
                if memory is not None and job.past is None:
                    memory.greet(avoids=("--avoid-suspects",) in spec.options)
                result = _run(job, events, printer, stdin, detachment, reporting, collector, observers)
            except HvlaunchError:
                if failures.first is None:
                    raise
                result = JobResult(exit_code=EXIT_INTERNAL, elapsed=0.0, error=failures.first)
            if failures.first is not None:
                result = result._replace(exit_code=EXIT_INTERNAL, error=failures.first)
            if memory is not None:
                memory.keep(result, reporting.report)
            if result.exit_code != 0:
                printer.show(advise(reporting.text(result)))
            else:
                is_silent = spec.console.quiet or collector.has_lost
                last_words = None if is_silent else reporting.last_words(result)
                patience = _PAGER_PATIENCE
                # A signal may end the wait for a slow reader here; elsewhere it must not suppress the report.
                signals.close()
            reporting.write(result, printer.say)
            if notifier is not None:
                notifier.ended(result)
        finally:
            printer.close(patience, last_words)
    if failures.first is not None:
        # The printer itself may have failed, even at the very end. Its thread has ended then, and stderr is free.
        is_shown = printer.is_whole and result.error is failures.first
        result = result._replace(exit_code=EXIT_INTERNAL, error=failures.first)
        report = "" if is_shown else reporting.text(result)
        reporting.write(result, lambda _: None)
        story = failures.traceback() if spec.verbose else ""
        if stderr is not None:
            _write_last(stderr, visible(story + report))
    if result.exit_code == 0 and (printer.has_lost or collector.has_lost):
        result = result._replace(exit_code=EXIT_NOT_WRITTEN)
        reporting.write(result, lambda _: None)
    return result, reporting


def _run(
    job: _Job,
    events: "SimpleQueue[Item]",
    printer: Printer,
    stdin: int,
    detachment: Detachment | None,
    reporting: Reporting,
    collector: "_JobCollector",
    observers: "Sequence[Watcher]",
) -> JobResult:
    spec, keys, directory = job.spec, job.keys, job.directory
    from hvlaunch.gloo.preparation import open_preparation  # noqa: PLC0415 (the first connections have begun by now)

    leases, is_successor = None, job.past is not None
    if spec.leases is not None and spec.leases.given is None:
        from hvlaunch.gloo.leasing import JobLeases, stopper  # noqa: PLC0415 (few jobs have any)

        stop = stopper(printer.say, events.put)
        leases = JobLeases(spec, spec.leases, job.about, printer.say, stop=stop, is_successor=is_successor)
    with (
        _event_file(job, printer.say) as write_event,
        _job_record(job, printer.say) as job_record,
        _server(job, job_record, printer.say) as server,
        open_preparation(
            spec, directory, job.about, leases, printer.say, is_successor=is_successor
        ) as prepare,
        _journal(printer.say) as journal,
        job.ways(spec, keys, printer.say) as ways,
    ):
        from hvlaunch.driver.loop import Driver  # noqa: PLC0415 (15 ms, in which a launcher starts its processes)

        watchers: list[Watcher] = [part.watch for part in (journal, leases) if part is not None]
        takeover = None if job.past is None else _takeover(job.past)
        clock, wall = (time.monotonic, time.time) if takeover is None else (takeover.clock, takeover.wall)
        history = (
            None
            if directory is None
            else _serve_control(directory, server, job, events.put, printer, clock, wall, reporting)
        )
        if history is not None:
            watchers.append(history.watch)
        if detachment is not None and spec.detach == "at start":
            watchers.append(detachment.leave_when_running)
        if spec.elastic is not None:
            watchers.append(reporting.watch)
        watchers.extend(observers)
        driver = Driver(
            spec,
            events,
            printer,
            server,
            keys,
            ways.connect,
            stdin=stdin,
            write_event=write_event,
            watchers=watchers,
            record=job_record,
            directory=None if directory is None else directory.path,
            prepare=prepare,
            collector=collector.get,
            clock=clock,
            wall=wall,
        )
        # Before the replay: its turns stand behind the first entry.
        if journal is not None:
            journal.begin(spec, keys.job_id, server.port)
        reporting.follow(driver, history)
        if directory is not None:
            driver.observing.when_asked(_run_record(job, directory))
        if takeover is not None:
            driver.take_over(takeover, ways.lost)
        reporting.begin()
        result = driver.run()._replace(size=driver.size)
        collector.show(driver.directories, keys.job_id)
        if history is not None:
            reporting.announce_end(result)
            history.close()
    return result


def _notifier(job: _Job, reporting: Reporting, say: Callable[[str], None]) -> "Notifier | None":
    """Return what sends word of the job, if wanted. Raises BadUsage if no directory can be made for it."""
    if not job.spec.notify:
        return None
    from hvlaunch.gloo.notifier import Notifier  # noqa: PLC0415 (few jobs have one)
    from hvlaunch.outside import jobs_directory  # noqa: PLC0415 (as above)

    directory = jobs_directory(os.environ) if job.directory is None else job.directory.path.parent
    return Notifier(
        job.spec, job.about, directory.with_name("notices"), reporting, lambda text: say(f"warning: {text}")
    )


def _host_memory(job: _Job, say: Callable[[str], None]) -> "HostMemory | None":
    """Return the memory of a job with other hosts; a job on this machine alone has nothing to choose from."""
    spec, directory = job.spec, job.directory
    if directory is None or only_local(spec):
        return None
    from hvlaunch.gloo.host_memory import HostMemory  # noqa: PLC0415 (not for a local job)
    from hvlaunch.outside.ledger import Ledger, directory_beside  # noqa: PLC0415 (as above)

    # One warning is enough of a file that is read and written several times.
    warned: set[str] = set()

    def warn(text: str) -> None:
        if text not in warned:
            warned.add(text)
            say(f"warning: {text}")

    ledger = Ledger(directory_beside(directory.path.parent), warn)
    return HostMemory(ledger, job.keys.job_id, [host.name for host in spec.hosts], say)


class _JobCollector:
    """Brings a job's files back; made when it is needed."""

    def __init__(self, spec: JobSpec, printer: Printer) -> None:
        self._spec = spec
        self._printer = printer
        self._collector: JobCollector | None = None
        self.has_lost = False
        """True if files of --collect are not here."""

    def get(self) -> "JobCollector":
        if self._collector is None:
            from hvlaunch.sync.collection import JobCollector  # noqa: PLC0415 (few jobs collect files)

            self._collector = JobCollector(self._spec, self._printer.status)
        return self._collector

    def show(self, directories: Mapping[str, str], job_id: str) -> None:
        """Tell what was collected at the end of the job."""
        if not self._spec.collect or not directories:
            return
        self._printer.status(None)
        self.has_lost, lines = self.get().report(directories, job_id)
        for line in lines:
            if self.has_lost or not self._spec.console.quiet:
                self._printer.say(line)


@contextmanager
def _server(job: _Job, record: "JobRecord | None", say: Callable[[str], None]) -> Iterator[RendezvousServer]:
    spec, keys = job.spec, job.keys
    with RendezvousServer(
        keys.token,
        certificate=keys.certificate,
        answerer=Prover(keys.probe_key, "rendezvous"),
        host=spec.rendezvous_bind if spec.rendezvous_bind in EVERYWHERE else LOOPBACK,
        port=spec.rendezvous_port if job.past is None else job.past.begin.rendezvous_port,
        file=None if record is None else record.store_file,
        say=say,
    ) as server:
        # A successor finds the addresses in the store's file.
        if spec.rendezvous_bind is not None and job.past is None:
            server.listen_at(spec.rendezvous_bind)
        yield server


def _takeover(past: "Past") -> "Takeover":
    from hvlaunch.driver.job_record import Takeover  # noqa: PLC0415 (as above)
    from hvlaunch.record import boot_id  # noqa: PLC0415 (few drivers are killed)

    # After a boot, monotonic clocks start anew, and writes without fsync may be lost.
    boot = boot_id()
    is_same_boot = bool(boot) and boot == past.drivers[-1].boot
    return Takeover(past, past.shift(boot, time.monotonic(), time.time()), is_same_boot=is_same_boot)


def _show_stacks(printer: Printer, stacks: "Sequence[ProcessStack]") -> None:
    """Show the workers' stacks to a user who has pressed Ctrl and the backslash."""
    from hvlaunch.telemetry.stack import tree_lines  # noqa: PLC0415 (when somebody asks)

    printer.say("\n".join(["the workers' stacks:", *tree_lines(stacks)]) if stacks else "no workers")


def _write_last(stderr: BinaryIO, text: str) -> None:
    """Write to stderr in place of a failed printer."""
    with suppress(OSError):
        stderr.write(text.encode(errors="backslashreplace"))
        stderr.flush()


def _about(spec: JobSpec, job_id: str) -> dict[str, Any]:
    return {
        "id": job_id,
        "name": spec.name,
        "command": spec.command if spec.call is None else (f"{spec.call.name}()",),
        "np": spec.np,
        "detach": spec.detach,
        "is_elastic": spec.elastic is not None,
        "launcher": launcher_of(spec),
        "began": time.time(),
        "cwd": spec.cwd,
        "machine": os.uname().nodename,
        "pid": os.getpid(),
        "version": __version__,
        "lease": spec.lease,
        **({} if spec.queued is None else {"queue": spec.queued.number}),
        **{name: value for name in ("ready_port", "ready_url") if (value := getattr(spec, name)) is not None},
    }


@contextmanager
def _job_directory(spec: JobSpec, about: dict[str, Any]) -> Iterator["JobDirectory | None"]:
    """Make the job's directory. Yields None on failure: the job runs without one, unless it is to be detached."""
    from hvlaunch.outside import JobDirectory, NoJobDirectory, jobs_directory  # noqa: PLC0415 (errors come first)

    try:
        directory = JobDirectory(jobs_directory(os.environ), about["id"], about)
    except NoJobDirectory as error:
        if spec.detach != "never":
            raise _can_not_leave(error.cause) from None
        yield None
        return
    with closing(directory):
        yield directory


def _is_followed(spec: JobSpec) -> bool:
    return spec.call is not None and spec.call.is_followed


def _is_kept(spec: JobSpec) -> bool:
    """True for a job with a directory after a good end before its user's eyes, such as for another run of its code."""
    return _is_followed(spec) or spec.sync is not None or bool(spec.collect)


def _run_record(job: _Job, directory: "JobDirectory") -> Callable[[Mapping[str, Mapping[str, Any]]], None]:
    """Return the function for writing the record of the job's run, with versions of hosts."""

    def write(hosts: Mapping[str, Mapping[str, Any]]) -> None:
        from hvlaunch.gloo.run_record import write_run  # noqa: PLC0415 (a job of less than a second has none)

        write_run(job.spec, directory, hosts)

    return write


def _can_not_leave(cause: str) -> BadUsage:
    return BadUsage(f"--detach needs a directory for the job: {cause}", hint="XDG_STATE_HOME=DIRECTORY")


def _output_store(spec: JobSpec, directory: "JobDirectory") -> "OutputStore":
    """Make the store of output for other programs. Raises BadUsage."""
    try:
        directory.reserve()
        return _new_store(spec, directory)
    except OSError as error:
        raise _can_not_leave(os.strerror(error.errno or 0).lower()) from None


def _new_store(spec: JobSpec, directory: "JobDirectory") -> "OutputStore":
    """Raises OSError."""
    from hvlaunch.console.output_store import OutputStore, head_of  # noqa: PLC0415 (for jobs that somebody looks at from elsewhere)

    return OutputStore(directory.path, head_of(spec.console))


def _left_alone(spec: JobSpec, detachment: Detachment | None, number: signal.Signals) -> on.Event | Inquiry:
    """Return the event of a closed terminal, or of a stdout without a reader: the job ends, or is detached."""
    if detachment is None or spec.detach != "on hangup":
        return on.Interrupted(number)
    # As a request on the queue: the loop's thread leaves, between two events.
    leave = detachment.leave
    return Inquiry(lambda _state: leave())


def _keep(job: _Job, directory: "JobDirectory", result: JobResult, reporting: Reporting) -> None:
    from hvlaunch.driver.job_record import forget  # noqa: PLC0415 (for jobs that failed)
    from hvlaunch.outside import prune  # noqa: PLC0415 (as above)
    from hvlaunch.outside.run_record import RUN  # noqa: PLC0415 (as above)
    from hvlaunch.watch.recorder import result_record  # noqa: PLC0415 (as above)

    if not (directory.path / RUN).exists():
        _run_record(job, directory)({})
    # A full disk must not turn the job's own end into an error.
    with suppress(OSError):
        if (directories := reporting.directories()) and (job.spec.collect or not only_local(job.spec)):
            from hvlaunch.sync.collection import keep_hosts  # noqa: PLC0415 (as above)

            keep_hosts(directory.path, job.spec, directories)
    with suppress(OSError):
        directory.keep(result_record(result, reporting.bill()), reporting.form(result))
    # Only after the result is kept: until then a successor could still be needed.
    forget(directory.path)
    prune(directory.path.parent)


def _serve_control(
    directory: "JobDirectory",
    server: RendezvousServer,
    job: _Job,
    post: Callable[[on.Event | CollectWanted | Inquiry | MoveRequest | Observe | StacksWanted], None],
    printer: Printer,
    clock: Callable[[], float],
    wall: Callable[[], float],
    reporting: Reporting,
) -> "History | None":
    """Let this user's other programs ask and order; return the history that they may ask for."""
    from hvlaunch.driver.history import History  # noqa: PLC0415 (as the directory)
    from hvlaunch.outside import NoJobDirectory  # noqa: PLC0415 (as the directory)

    def make_recorder(
        write: Callable[[Mapping[str, object]], None], seen_at: Callable[[], float]
    ) -> "Watcher":
        from hvlaunch.watch.recorder import Recorder  # noqa: PLC0415 (as above)
        from hvlaunch.watch.rounds import Ranks  # noqa: PLC0415 (when somebody asks)

        # Ranks of its own: the history reads turns later than the loop, whose ranks may have changed meanwhile.
        ranks = Ranks()
        recorder = Recorder(spec, job_id, write, ranks.rank_of, seen_at)

        def see(event: on.Event, actions: "Sequence[do.Action]", now: float) -> None:
            ranks.update(actions)
            recorder.watch(event, actions, now)

        return see

    spec, job_id = job.spec, job.keys.job_id
    try:
        listener = directory.listen()
    except NoJobDirectory:
        return None
    history = History(make_recorder, wall=wall, clock=clock)

    def admit(head: "Head") -> "Answer | Route":
        from hvlaunch.driver.control import ControlDoor  # noqa: PLC0415 (when somebody asks)

        keep_output = partial(printer.keep_output, partial(_new_store, spec, directory))
        return ControlDoor(directory.about, history, post, keep_output, reporting)(head)

    server.serve_beside(listener, admit)
    return history


@contextmanager
def _event_file(
    job: _Job, say: Callable[[str], None]
) -> Iterator[Callable[[Mapping[str, object]], None] | None]:
    """Open the file of --events; yields the function for records. Records of a killed driver are skipped. Raises BadUsage."""
    path = job.spec.events
    if path is None:
        yield None
        return
    from hvlaunch.console.files import EventFile, records_of  # noqa: PLC0415 (few jobs have one)

    written = 0 if job.past is None else records_of(path, job.keys.job_id)
    with closing(EventFile(path, say)) as file:
        count = itertools.count()
        yield lambda record: file.write(record) if next(count) >= written else None


@contextmanager
def _job_record(job: _Job, say: Callable[[str], None]) -> Iterator["JobRecord | None"]:
    """Open the record of a job that another driver may take over; yields None for other jobs. Raises BadStoreFile."""
    spec, directory = job.spec, job.directory
    if directory is None or not may_be_taken_over(spec):
        yield None
        return
    from hvlaunch.driver.job_record import JobRecord  # noqa: PLC0415 (not for a local job)

    try:
        record = JobRecord(directory.path, say, is_synced=spec.fsync, past=job.past)
    except OSError:  # such as a full disk: the job runs without a record
        yield None
        return
    with closing(record):
        yield record


@contextmanager
def _journal(say: Callable[[str], None]) -> Iterator["ReplayJournal | None"]:
    """Open a developer's journal, the file of HVLAUNCH_JOURNAL; yields None if unset. Raises BadUsage."""
    # Removed from the environment: a job inside a worker would write to the same file.
    path = os.environ.pop("HVLAUNCH_JOURNAL", None)
    if path is None:
        yield None
        return
    from hvlaunch.watch.journal import ReplayJournal  # noqa: PLC0415 (as above)

    with closing(ReplayJournal(Path(path), say)) as journal:
        yield journal


def _by_pool(spec: JobSpec, keys: Keys, plain: HostWays, remote: "_Remote") -> HostWays:
    """Use the warm pool's connections, or the plain ways if the pool is gone by now."""
    from hvlaunch.driver.links.warm_way import WarmWay  # noqa: PLC0415 (as above)
    from hvlaunch.errors import BadUsage  # noqa: PLC0415 (few jobs have one)
    from hvlaunch.outside.pools import find_pool, pools_directory  # noqa: PLC0415 (as above)

    try:
        pool = find_pool(pools_directory(os.environ), spec.pool or "")
    except BadUsage:
        return plain
    way = WarmWay(pool, keys, plain.connect, lambda host: partial(remote, host))
    return plain._replace(connect=way.connect)


class _Remote(Protocol):
    def __call__(self, host: Host, timeout: float | None = None, /) -> Connection: ...


def _connect(spec: JobSpec, remote: _Remote, host: Host) -> AgentConnection:
    """Connect by pipes to this machine itself, else by `remote`. Raises HostError."""
    if is_local(host):
        environ = _host_environ(spec)
        return CommandConnection(connect_local(host, environ), lambda _timeout: connect_local(host, environ))
    try:
        return CommandConnection(remote(host), partial(remote, host))
    except HostError as error:
        # Under this name the machine is reached by ssh; its user may not know that the name means this machine.
        if host.port is None and is_here_by_dns(host):
            name, otherwise = host.name, f"; else {error.hint}" if error.hint else ""
            error.hint = f"if {name} is this machine, as DNS says: write localhost, or put {name} in /etc/hosts{otherwise}"
        raise


def _lost(spec: JobSpec, remote: _Remote, host: Host) -> AgentConnection:
    """Return the lost connection that _connect() would have made."""
    if not is_local(host):
        return LostConnection(partial(remote, host))
    environ = _host_environ(spec)
    return LostConnection(lambda _timeout: connect_local(host, environ))


def _host_environ(spec: JobSpec) -> dict[str, str]:
    """Return the environment of this machine as a host: the driver's, without variables that other hosts would lack."""
    from hvlaunch.hosts.local import without_outer_rank  # noqa: PLC0415 (not for jobs elsewhere)

    # A job started by a worker of another job has that worker's rank in its environment.
    environ = without_outer_rank(os.environ)
    if only_local(spec):
        return environ
    from hvlaunch.hosts.local import host_environ  # noqa: PLC0415 (not for a local job)

    return host_environ(environ, spec.env)
