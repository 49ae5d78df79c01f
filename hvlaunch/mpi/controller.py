"""Run a job whose processes another launcher (mpirun, srun, jsrun) starts.

The launcher replaces ssh, and nothing else: it starts an agent on each host, the agents call the driver, and from
then on the job runs as any other. Output, signals, ends, reports and exit codes are the same. The launcher is a child process in
a session of its own: its output is printed, and it ends with the job.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO

from hvlaunch.agent.quick import has_own_proc
from hvlaunch.agent.wire.caller import ADDRESSES, CERTIFICATE, ENTRY
from hvlaunch.driver.links.agent_channel import AgentConnection
from hvlaunch.driver.program import Keys
from hvlaunch.engine.hosts import is_usable
from hvlaunch.gloo.controller import HostWays
from hvlaunch.gloo.controller import run as run_by_agents
from hvlaunch.hosts.local import is_local, own_addresses
from hvlaunch.job import Host, JobResult, JobSpec, MPIOptions
from hvlaunch.mpi import Kind, LauncherProgram, NoLauncher, find, names_of
from hvlaunch.mpi.builders import LauncherCommand, LaunchRequest, build, rankfile, ssh_arguments
from hvlaunch.mpi.calls import Arrivals, CallListener, LauncherFailed, ReturnCalls
from hvlaunch.mpi.launched_agent import LaunchedAgent
from hvlaunch.mpi.request import caller_command, counted, key_exchange_words, remote_python, request_of
from hvlaunch.rendezvous.serving import EVERYWHERE

if TYPE_CHECKING:
    import psutil

__all__ = ["LauncherProcess", "run"]

_LOOPBACK = "127.0.0.1"
_END_PATIENCE = 10.0  # seconds for the launcher to notice that its processes have ended
_LOST_PATIENCE = 2.0  # ... if a host is out of reach, whose processes it may wait for in vain


def run(
    spec: JobSpec,
    *,
    stdout: BinaryIO,
    stderr: BinaryIO,
    on_detached: Callable[[str], None] | None = None,
    advise: Callable[[str], str] = str,
) -> JobResult:
    """Run the job with the launcher in spec.mpi; otherwise like hvlaunch.gloo.controller.run.

    Raises HvlaunchError for mistakes in the job, before any process starts.
    """
    options = spec.mpi or MPIOptions()
    launcher = find(options)
    counts = dict(counted(spec))
    hosts = tuple(
        replace(host, slots=counts[host.name], python=None) for host in spec.hosts if host.name in counts
    )
    ways = partial(_ways, whole=spec, options=options, launcher=launcher, python=remote_python(spec))
    spec = replace(spec, hosts=hosts)
    return run_by_agents(
        spec, stdout=stdout, stderr=stderr, ways=ways, on_detached=on_detached, advise=advise
    )


@contextmanager
def _ways(
    spec: JobSpec,
    keys: Keys,
    say: Callable[[str], None],
    *,
    whole: JobSpec,
    options: MPIOptions,
    launcher: LauncherProgram,
    python: str | None,
) -> Iterator[HostWays]:
    """Run the launcher inside the block; yield functions to connect to a host, after the agents' calls.

    `whole` is the job with each host of the user's; `spec` has only the hosts in use.
    """
    caller = caller_command(names_of(launcher.kind), python, limit=spec.start_timeout + spec.lease)
    request = request_of(whole, options, launcher, caller, (ENTRY, CERTIFICATE, ADDRESSES))
    request = replace(request, ssh_words=(*request.ssh_words, *_quick_words(whole, request, launcher)))
    arrivals = Arrivals(request.hosts, launcher.kind)

    def ended(status: int) -> None:
        cause = f"{launcher.program} ended with exit code {status} before all agents were connected; its own messages are above"
        arrivals.fail(LauncherFailed(cause))

    with ExitStack() as stack:
        command = build(
            launcher, replace(request, rankfile=stack.enter_context(_rankfile(launcher, request)))
        )
        addresses = _addresses(spec)
        returns = stack.enter_context(closing(ReturnCalls()))
        listener = stack.enter_context(
            closing(
                CallListener(
                    keys.entry,
                    keys.certificate,
                    arrivals.add,
                    host=addresses[0] if len(addresses) == 1 else "",
                    returns=returns,
                )
            )
        )
        env = {
            **os.environ,
            ENTRY: keys.entry,
            CERTIFICATE: keys.certificate.fingerprint,
            ADDRESSES: ",".join(f"{address} {listener.port}" for address in addresses),
            **command.env,
        }
        # After the listener, so that the first agent finds it.
        process = LauncherProcess(command, env, say=say, ended=ended)
        agents: list[LaunchedAgent] = []
        # The callback runs before the listener closes: agents may call until the launcher has ended.
        stack.callback(_end, arrivals, agents, process)
        connect = partial(_connect, arrivals, agents, returns, process, spec.start_timeout)
        yield HostWays(connect, connect)


def _quick_words(spec: JobSpec, request: LaunchRequest, launcher: LauncherProgram) -> tuple[str, ...]:
    remote = [host.name for host in spec.hosts if not is_local(host)]
    return key_exchange_words(launcher.kind, remote, ssh_arguments(request), request.extra, os.environ)


@contextmanager
def _rankfile(launcher: LauncherProgram, request: LaunchRequest) -> Iterator[str | None]:
    """Write jsrun's rankfile, and yield its path; None for other launchers."""
    if launcher.kind is not Kind.JSRUN:
        yield None
        return
    from tempfile import NamedTemporaryFile  # noqa: PLC0415 (few launchers need one)

    with NamedTemporaryFile("w", prefix="hvlaunch-", suffix=".erf") as file:
        file.write(rankfile(request))
        file.flush()
        yield file.name


_LAST_WORDS = 2.0  # seconds to read its last output
_KILL_AFTER = 5.0
_SWEEP_AFTER = 1.0  # seconds in which its ssh processes may notice its end by themselves
_DIRECTORIES = ("ompi.*.{uid}/pid.{pid}", "ompi.{pid}")
"""Directories of Open MPI's mpirun in the directory of temporary files, before version 5 and since; a killed one leaves them."""


class LauncherProcess:
    """Runs the launcher. Calls `say` with each line, and then `ended` with the exit status, in threads."""

    def __init__(
        self,
        command: LauncherCommand,
        env: dict[str, str],
        *,
        say: Callable[[str], None],
        ended: Callable[[int], None],
    ) -> None:
        """Raises NoLauncher."""
        program = command.argv[0]
        self._name = os.path.basename(program)  # noqa: PTH119 (a name, no path)
        self._say = say
        self._ended = ended
        try:
            # A session of its own: Ctrl-C in the terminal is for the driver, and ssh can't ask for passwords there.
            self._process = subprocess.Popen(
                command.argv,
                executable=shutil.which(program) or program,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            cause = f"{program} can't be started: {(error.strerror or str(error)).lower()}"
            raise NoLauncher(cause, program=program, hint="--mpirun PATH") from None
        pipes = (self._process.stdout, self._process.stderr)
        self._readers = [
            threading.Thread(target=self._read, args=(pipe,), name=self._name, daemon=True) for pipe in pipes
        ]
        self._waiter = threading.Thread(target=self._wait, name=f"end of {self._name}", daemon=True)
        for thread in (*self._readers, self._waiter):
            thread.start()

    def _read(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                self._say(f"{self._name}: {text}")

    def _wait(self) -> None:
        status = self._process.wait()
        for reader in self._readers:
            # A process that the launcher left behind may hold the pipe open.
            reader.join(_LAST_WORDS)
        self._ended(_shell_status(status))

    def wait(self, timeout: float) -> int | None:
        """Return its exit status, 128 + n for a signal n; None after `timeout` seconds."""
        try:
            return _shell_status(self._process.wait(timeout))
        except subprocess.TimeoutExpired:
            return None

    def close(self, patience: float) -> None:
        """Wait for its end, at most `patience` seconds; then send SIGTERM, by which it ends its processes, then SIGKILL.

        Its processes and directories on this machine are removed: a launcher that waits for an unreachable host is killed.
        """
        family: list[psutil.Process] = []
        for number, seconds in ((signal.SIGTERM, _KILL_AFTER), (signal.SIGKILL, _KILL_AFTER)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
                break
            family += _family(self._process.pid)
            self._signal(number)
            patience = seconds
        if family:
            _end_family(family)
        self._waiter.join(_LAST_WORDS + 1)
        if self._process.returncode == -signal.SIGKILL:
            _remove_directory(self._process.pid)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)


def _shell_status(status: int) -> int:
    return status if status >= 0 else 128 - status


def _family(launcher: int) -> "list[psutil.Process]":
    """Return its ssh processes and their descendants, but not the job's own processes, which end by their guardians."""
    # The launcher puts its ssh into sessions of their own, so a signal to its process group does not reach them.
    import psutil  # noqa: PLC0415 (few launchers have to be stopped)

    if not has_own_proc():
        return []
    try:
        others = [
            child for child in psutil.Process(launcher).children() if not child.name().startswith("hvl-")
        ]
        return [process for child in others for process in (child, *child.children(recursive=True))]
    except psutil.Error:
        return []


def _end_family(family: "list[psutil.Process]") -> None:
    """Give the processes time to notice the launcher's end; kill the remaining ones."""
    import psutil  # noqa: PLC0415 (as above)

    _, left = psutil.wait_procs(family, _SWEEP_AFTER)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, _SWEEP_AFTER)


def _remove_directory(launcher: int) -> None:
    for form in _DIRECTORIES:
        for path in Path(tempfile.gettempdir()).glob(form.format(uid=os.geteuid(), pid=launcher)):
            if path.lstat().st_uid == os.geteuid():
                # Only this user's own: in /tmp another user may have made a directory with this name.
                shutil.rmtree(path, ignore_errors=True)
                if "/" in form:
                    with contextlib.suppress(OSError):  # the directory has another launcher's
                        path.parent.rmdir()


def _end(arrivals: Arrivals, agents: Sequence[LaunchedAgent], process: LauncherProcess) -> None:
    """Wait for a launcher whose processes are about to end; stop a launcher in the middle of its start."""
    complete = arrivals.is_complete
    arrivals.close()
    # A launcher that is killed too early may leave its directories and daemons on the hosts.
    patience = _END_PATIENCE if all(agent.has_ended for agent in agents) else _LOST_PATIENCE
    process.close(patience if complete else 0.0)


def _connect(
    arrivals: Arrivals,
    agents: list[LaunchedAgent],
    returns: ReturnCalls,
    process: LauncherProcess,
    timeout: float,
    host: Host,
) -> AgentConnection:
    """Raises HvlaunchError."""
    caller, processes = arrivals.agent_of(host.name, timeout)
    agent = LaunchedAgent(
        host.name, caller.connection, processes, process.wait, lambda: arrivals.trouble, returns
    )
    agents.append(agent)
    return agent


def _addresses(spec: JobSpec) -> list[str]:
    """Return the driver's addresses for agents; only the loopback if each host is this machine."""
    if all(is_local(host) for host in spec.hosts):
        return [_LOOPBACK]
    if spec.rendezvous_bind is not None and spec.rendezvous_bind not in EVERYWHERE:
        return [spec.rendezvous_bind]
    usable = filter(is_usable, own_addresses())
    # Agents try the addresses in this order: few networks of clusters route IPv6.
    return [*sorted(usable, key=lambda address: ":" in address), _LOOPBACK]
