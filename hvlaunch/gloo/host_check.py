"""Test of hosts: a login with the connections of a job, and the search for a Python for the agent."""

import re
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import NamedTuple

from hvlaunch.driver.links.host_ends import never_began
from hvlaunch.driver.program import agent_command, python_candidates
from hvlaunch.errors import HostError, HvlaunchError, Problem
from hvlaunch.hosts.local import is_local
from hvlaunch.job import Host, JobSpec, SSHOptions
from hvlaunch.ssh import Connection, Ways, connect_by_agent, connect_local
from hvlaunch.ssh.config import ask_ssh, resolve

__all__ = ["HostAnswer", "ask_hosts"]

_LIMIT = 10.0
"""Seconds for the login, and again for the Python."""
_MOST_AT_ONCE = 256
_MARK = "hvlaunch: Python "
_PROGRAM = zlib.compress(f"import sys\nprint('{_MARK}' + sys.version.split()[0], flush=True)\n".encode())
_ANSWER = re.compile(rf"{_MARK}([0-9][0-9A-Za-z.+]*)")
_MOST_BYTES = 1 << 16
_STATUS_WAIT = 2.0


class HostAnswer(NamedTuple):
    """A host's answer, or the problem."""

    host: Host
    is_here: bool
    """True if the host is this machine."""
    seconds: float
    """Time until a command could run."""
    python: str = ""
    problem: Problem | None = None


def ask_hosts(spec: JobSpec) -> list[HostAnswer]:
    """Ask all hosts of a job at once; return their answers in order."""
    asking = ThreadPoolExecutor(min(_MOST_AT_ONCE, max(1, len(spec.hosts))))
    with closing(Ways(spec.ssh, timeout=_LIMIT)) as ways:
        remote: Callable[[Host], Connection] = ways.connect
        if spec.ssh.remote_agent is not None:
            remote = partial(connect_by_agent, spec.ssh.remote_agent)
        try:
            return list(asking.map(partial(_ask, spec.ssh, spec.remote_python, remote), spec.hosts))
        finally:
            # Without a wait: Ctrl-C must not wait for silent hosts.
            asking.shutdown(wait=False, cancel_futures=True)


def _ask(
    ssh: SSHOptions, remote_python: str | None, remote: Callable[[Host], Connection], host: Host
) -> HostAnswer:
    start = time.monotonic()
    is_here = False
    try:
        is_here = is_local(host)
        candidates = python_candidates(host.python or remote_python)
        connection = connect_local(host) if is_here else remote(host)
        # Without it the reading below could wait for ever. Closing twice is harmless.
        late = threading.Timer(_LIMIT, connection.close)
        late.daemon = True
        late.start()
        try:
            return _ask_for_python(connection, candidates, host, is_here, start)
        finally:
            late.cancel()
            connection.close()
    except HvlaunchError as error:
        return HostAnswer(
            host, is_here, time.monotonic() - start, problem=_as_named(error.problem, host, ssh)
        )
    except Exception as error:  # noqa: BLE001 (a defect must not hide the other hosts)
        cause = f"internal error: {type(error).__name__}: {error}"
        problem = HostError(cause, host=host.name, hint="report it").problem
        return HostAnswer(host, is_here, time.monotonic() - start, problem=problem)


def _ask_for_python(
    connection: Connection, candidates: Sequence[str], host: Host, is_here: bool, start: float
) -> HostAnswer:
    """Raises HostError."""
    # The command of an agent: the same Python is chosen, and the same things go wrong.
    channel = connection.run(agent_command(candidates, len(_PROGRAM), _LIMIT))
    seconds = time.monotonic() - start
    output, broken = b"", None
    try:
        channel.write(_PROGRAM)
        while len(output) < _MOST_BYTES and (data := channel.read()):
            output += data
    except OSError as error:
        broken = str(error) or type(error).__name__
    answer = _ANSWER.search(output.decode("utf-8", "replace"))
    if answer is not None:
        return HostAnswer(host, is_here, seconds, python=answer[1])
    status = channel.exit_status(_STATUS_WAIT)
    stderr = channel.stderr().decode("utf-8", "replace").strip()
    raise never_began(host.name, status, stderr, broken, output)


def _as_named(problem: Problem, host: Host, ssh: SSHOptions) -> Problem:
    """Return the problem with the user's name of the host instead of the configured HostName."""
    try:
        hostname = resolve(host, ssh, timeout=_LIMIT, ask=ask_ssh).hostname
    except HvlaunchError:
        return problem
    if hostname == host.name:
        return problem
    hint = problem.hint and problem.hint.replace(hostname, host.name)
    return problem._replace(cause=problem.cause.replace(hostname, host.name), hint=hint)
