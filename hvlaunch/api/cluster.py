"""Calls functions on hosts that stay connected: a Cluster has a warm pool of its own during its `with` block."""

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from hvlaunch.api.driver import Caller, JobWaits, Refused, receive, send
from hvlaunch.api.launcher import Launcher, notebook_bar
from hvlaunch.children import uninterrupted
from hvlaunch.errors import BadUsage, HvlaunchError, Problem
from hvlaunch.hosts.selection import words_for
from hvlaunch.job import JobSpec

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hvlaunch.api.options import GivenOptions
    from hvlaunch.console.status import OnStatus

__all__ = ["Cluster"]

# SIGINT is ignored before any import, as in child.py.
_PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import sys; sys.path[:] = {path!r}; "
    "from hvlaunch.api.cluster import main; main({descriptor})"
)
_END_PATIENCE = 30.0


class PoolWanted(NamedTuple):
    """The request to the process of the pool."""

    name: str
    spec: JobSpec
    tells_status: bool
    """True if the caller shows the status itself; else the process prints it."""


class PoolUp(NamedTuple):
    """The pool is up, except the hosts with problems."""

    problems: tuple[Problem, ...]


class Cluster:
    """Hosts that stay connected while the block lasts: `with Cluster(hosts="a:4,b:4") as launcher: launcher.run(fn)`.

    The options are those of Launcher. The block gets a Launcher, whose jobs start in a fraction of the time. No other
    program uses the pool. It ends with the block or with this process, in whatever way that ends (docs/guides/pools.md).
    """

    def __init__(self, *, python: str | None = None, **options: "Unpack[GivenOptions]") -> None:
        self._python = python
        self._options = options
        self._name = f"python-{os.getpid()}-{os.urandom(4).hex()}"
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None

    def __enter__(self) -> Launcher:
        """Connect to the hosts. Raises BadUsage, HostsFailed and other HvlaunchErrors."""
        from hvlaunch.api.given import spec_of  # noqa: PLC0415 (slow to load)

        spec = spec_of({**self._options, "pool": ""}, ("true",), os.environ)
        # Without hosts the pool would be empty, and each job would fail with a worse message.
        if not spec.hosts:
            raise BadUsage("a Cluster needs hosts", hint='hosts="a:4,b:4"')
        self._link, theirs = socket.socketpair()
        show = None if spec.console.quiet else notebook_bar()
        try:
            with theirs, uninterrupted():
                program = _PROGRAM.format(path=sys.path, descriptor=theirs.fileno())
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", program],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            send(self._link, PoolWanted(self._name, _as_named(spec), tells_status=show is not None))
            while isinstance(answer := receive(self._link), JobWaits):
                if show is not None:
                    show(answer.status)
        except BaseException:
            self.__exit__()
            raise
        finally:
            if show is not None:
                show(None)
        if not isinstance(answer, PoolUp):
            self.__exit__()
            raise (
                answer.error
                if isinstance(answer, Refused)
                else HvlaunchError("the process of the pool has ended")
            )
        return Launcher(python=self._python, **self._of_jobs(spec))

    def _of_jobs(self, spec: JobSpec) -> Any:
        """Return the options of jobs on the pool, whose hosts are fixed: hosts from other sources must not count."""
        chosen = None if spec.elastic is not None else words_for(spec.hosts, spec.visible_gpus)
        fixed = {"hosts": None, "hostfile": None, "include": chosen, "exclude": None, "pool": self._name}
        return {**self._options, **fixed}

    def __exit__(self, *_: object) -> None:
        """End the pool, and with it the connections. May be repeated."""
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            # The closed socket ends the pool too; the signal ends it while it still connects.
            self._process.terminate()
            try:
                self._process.wait(_END_PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _as_named(spec: JobSpec) -> JobSpec:
    """Give each host slots for all GPU numbers up to its highest visible one; each job then chooses its GPUs by number."""
    # A job names GPUs by number, so a host needs as many slots as its highest number.
    counts = {name: max(numbers) + 1 for name, numbers in spec.visible_gpus.items()}
    hosts = [replace(host, slots=counts.get(host.name, host.slots)) for host in spec.hosts]
    return replace(spec, hosts=tuple(hosts))


def main(descriptor: int) -> NoReturn:
    """Hold the pool that the caller asks for, until the caller has gone."""
    link = socket.socket(fileno=descriptor)
    # ssh and other children must not hold the link open: its end tells the caller that this process
    # is gone.
    link.set_inheritable(False)
    request = receive(link)
    if request is None:
        os._exit(0)
    # From here on messages come from several threads.
    caller = Caller(link)
    from hvlaunch.outside.pools import pools_directory  # noqa: PLC0415 (as above)
    from hvlaunch.pool import hold_pool  # noqa: PLC0415 (slow to load: the caller may be gone)

    try:
        hold_pool(
            pools_directory(os.environ),
            request.name,
            request.spec,
            idle_timeout=float("inf"),
            on_ready=lambda problems: caller.send(PoolUp(tuple(problems))),
            owner=descriptor,
            on_status=_on_status(caller, request),
        )
    except HvlaunchError as error:
        with suppress(OSError):
            # The caller has gone.
            caller.send(Refused(error))
    os._exit(0)


def _on_status(caller: Caller, request: PoolWanted) -> "OnStatus":
    if request.tells_status:
        threading.Thread(target=caller.tell_status, name="status", daemon=True).start()
        return caller.keep_status
    from hvlaunch.pool import printed_status  # noqa: PLC0415 (slow to load)

    return printed_status(request.spec.console, sys.stderr.buffer)
