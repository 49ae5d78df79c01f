"""Run a job whose processes another launcher (mpirun, srun, jsrun) starts.

The launcher replaces ssh, and nothing else: it starts an agent on each host, the agents call the driver, and from
then on the job runs as any other. Output, signals, ends, reports and exit codes are the same.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import BinaryIO

from hvlaunch.agent.wire.caller import ADDRESSES, CERTIFICATE, ENTRY
from hvlaunch.driver.links.agent_channel import AgentConnection
from hvlaunch.driver.program.keys import Keys
from hvlaunch.engine.network import is_usable
from hvlaunch.gloo.controller import HostWays
from hvlaunch.gloo.controller import run as run_by_agents
from hvlaunch.hosts.local import is_local, own_addresses
from hvlaunch.job import Host, JobResult, JobSpec, MPIOptions
from hvlaunch.mpi import Kind, LauncherProgram, find
from hvlaunch.mpi.arrivals import Arrivals, LauncherFailed
from hvlaunch.mpi.builders import LaunchRequest, build, rankfile, ssh_arguments
from hvlaunch.mpi.call_listener import CallListener, ReturnCalls
from hvlaunch.mpi.launched_agent import LaunchedAgent
from hvlaunch.mpi.process import LauncherProcess
from hvlaunch.mpi.process_ranks import names_of
from hvlaunch.mpi.request import caller_command, counted, key_exchange_words, remote_python, request_of
from hvlaunch.rendezvous.serving.listeners import EVERYWHERE

__all__ = ["run"]

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
