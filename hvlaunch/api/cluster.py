"""Functions on hosts that stay connected: a Cluster has a warm pool of its own for as long as its `with` block."""

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

_PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import sys; sys.path[:] = {path!r}; "
    "from hvlaunch.api.cluster import main; main({descriptor})"
)
_END_PATIENCE = 30.0


class PoolWanted(NamedTuple):
    """What the process of the pool is asked for."""

    name: str
    spec: JobSpec
    tells_status: bool
    """Whether the caller shows what it waits for; else that is printed."""


class PoolUp(NamedTuple):
    """The pool is up, but for some hosts."""

    problems: tuple[Problem, ...]


class Cluster:
    """Hosts that stay connected while the block lasts: `with Cluster(hosts="a:4,b:4") as launcher: launcher.run(fn)`.

    The options are those of Launcher. What the block gets is a Launcher, whose jobs start in a fraction of the time. The
    pool is nobody else's, and ends with the block, or with this process, however that ends (docs/pool.md).
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
        """The options of a job on the pool: its hosts are chosen already, whatever weaker sources say."""
        chosen = None if spec.elastic is not None else words_for(spec.hosts, spec.visible_gpus)
        own = {"hosts": None, "hostfile": None, "include": chosen, "exclude": None, "pool": self._name}
        return {**self._options, **own}

    def __exit__(self, *_: object) -> None:
        """End the pool, and with it the connections. May be repeated."""
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_END_PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _as_named(spec: JobSpec) -> JobSpec:
    """The hosts with slots enough for each of their GPUs to have its number: which of them are used, each job says again."""
    counts = {name: max(numbers) + 1 for name, numbers in spec.visible_gpus.items()}
    hosts = [replace(host, slots=counts.get(host.name, host.slots)) for host in spec.hosts]
    return replace(spec, hosts=tuple(hosts))


def main(descriptor: int) -> NoReturn:
    """Hold the pool that the caller asks for, until it has gone."""
    link = socket.socket(fileno=descriptor)
    link.set_inheritable(False)
    wanted = receive(link)
    if wanted is None:
        os._exit(0)
    caller = Caller(link)
    from hvlaunch.outside.pools import pools_directory  # noqa: PLC0415 (as above)
    from hvlaunch.pool.hold import hold_pool  # noqa: PLC0415 (slow to load: the caller may be gone)

    try:
        hold_pool(
            pools_directory(os.environ),
            wanted.name,
            wanted.spec,
            idle_timeout=float("inf"),
            on_ready=lambda problems: caller.send(PoolUp(tuple(problems))),
            owner=descriptor,
            on_status=_on_status(caller, wanted),
        )
    except HvlaunchError as error:
        with suppress(OSError):  # nobody waits any more
            caller.send(Refused(error))
    os._exit(0)


def _on_status(caller: Caller, wanted: PoolWanted) -> "OnStatus":
    if wanted.tells_status:
        threading.Thread(target=caller.tell_status, name="status", daemon=True).start()
        return caller.keep_status
    from hvlaunch.pool.hold import printed_status  # noqa: PLC0415 (slow to load)

    return printed_status(wanted.spec.console, sys.stderr.buffer)
