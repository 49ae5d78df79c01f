"""Calls functions on hosts: run() for one call, Launcher for many with the same options, Cluster for hosts that stay connected."""

import asyncio
import html
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeVar, overload

from hvlaunch.api.call_job import (
    CallDirectory,
    CallJob,
    Child,
    call_command,
    function_name,
    pickled_call,
    write_archive,
)
from hvlaunch.api.driver import Caller, JobWaits, Refused, begun_by_caller, receive, send
from hvlaunch.api.errors import WorkerFailed
from hvlaunch.api.job import Job
from hvlaunch.api.options import GivenOptions, LauncherOptions
from hvlaunch.children import uninterrupted
from hvlaunch.console.status import Status
from hvlaunch.errors import BadUsage, HvlaunchError, Problem
from hvlaunch.hosts.selection import words_for
from hvlaunch.job import Call, JobSpec
from hvlaunch.named_tuples import NamedTuple

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from hvlaunch.console.status import OnStatus

__all__ = ["Cluster", "Launcher", "notebook_bar", "run", "serve_pool"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Launcher(LauncherOptions):
    """The options with which functions run. A Launcher holds no resources, and is thread-safe."""

    python: str | None = None
    """The Python that calls the functions, on every host. Default: the path of this process's Python, if the host has it, else
    `python3.X` of the same version, else `python3`."""

    @overload
    def run(
        self,
        fn: Callable[..., R],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        return_exceptions: Literal[False] = False,
    ) -> list[R]: ...

    @overload
    def run(
        self,
        fn: Callable[..., R],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        return_exceptions: bool,
    ) -> list[R | Exception]: ...

    def run(
        self,
        fn: Callable[..., R],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` in every worker, print the output, and return the values by rank.

        With `return_exceptions` a failed rank has its error in the list, and the others continue. Ctrl-C stops the workers.
        Raises CallNotPickled and BadUsage before the start, WorkerFailed for the first worker that fails, JobFailed if hosts
        can't be used or are lost, ResultNotRead.
        """
        job = self._planned(fn, args, kwargs, return_exceptions=return_exceptions, is_shown=True)()
        try:
            with _printed():
                return job.results()
        finally:
            job.stop_and_forget()

    def call(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call `fn(*args, **kwargs)` as run() does. Type checkers check the arguments too."""
        return self.run(fn, args, kwargs)

    @overload
    async def arun(
        self,
        fn: Callable[..., R],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        return_exceptions: Literal[False] = False,
    ) -> list[R]: ...

    @overload
    async def arun(
        self,
        fn: Callable[..., R],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        return_exceptions: bool,
    ) -> list[R | Exception]: ...

    async def arun(
        self,
        fn: Callable[..., R],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """As run(), for asyncio. A cancellation stops the workers first.

        The function and its arguments are pickled before the first wait, so they may be changed afterwards.
        """
        begin = self._planned(fn, args, kwargs, return_exceptions=return_exceptions, is_shown=True)
        # An executor, and not a task: the loop cancels all tasks when it ends.
        beginning = asyncio.get_running_loop().run_in_executor(None, copy_context().run, begin)
        try:
            # Shielded: a cancelled start would leave a job that nobody stops.
            job = await asyncio.shield(beginning)
            await asyncio.wait([asyncio.wrap_future(job.ended)])
            # Reading and unpickling may take long, and the loop has other tasks.
            with _printed():
                return await asyncio.to_thread(job.results)
        finally:
            await _shielded(beginning)

    @overload
    def start(
        self,
        fn: Callable[..., R],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        return_exceptions: Literal[False] = False,
        show: bool = False,
    ) -> Job[R]: ...

    @overload
    def start(
        self,
        fn: Callable[..., R],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        return_exceptions: bool,
        show: bool = False,
    ) -> Job[R | Exception]: ...

    def start(
        self,
        fn: Callable[..., R],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        return_exceptions: bool = False,
        show: bool = False,
    ) -> Job[Any]:
        """Start the job as run() does, without waiting; its results() are the values that run() returns.

        The output is available by Job.output(), and with `show` it is printed as well. The job ends with this process.
        """
        begin = self._planned(
            fn, args, kwargs, return_exceptions=return_exceptions, is_shown=show, is_followed=True
        )
        return begin()

    def _planned(
        self,
        fn: Callable[..., R],
        args: Sequence[object],
        kwargs: Mapping[str, object] | None,
        *,
        return_exceptions: bool,
        is_shown: bool,
        is_followed: bool = False,
    ) -> Callable[[], CallJob[R]]:
        """Pickle the call now, and return a function that starts its job. Thread-safe."""
        from hvlaunch.api.given import spec_of  # noqa: PLC0415 (slow to load, and a wrong function comes first)

        # Pickled first: an error here must come before anything is started.
        pickled = pickled_call(fn, args, {} if kwargs is None else kwargs)
        # asdict() would copy the values deeply.
        given = {field.name: getattr(self, field.name) for field in fields(LauncherOptions)}
        spec = spec_of(given, call_command(self.python), os.environ)
        if spec.setup is not None:
            spec = replace(spec, command=call_command(self.python, is_set_up=True))

        def begin() -> CallJob[R]:
            directory = CallDirectory()
            job: CallJob[R] | None = None
            try:
                write_archive(directory.program, pickled, raises=not return_exceptions, sync=spec.sync)
                call = Call(
                    name=function_name(fn),
                    program=directory.program,
                    results=directory.path,
                    is_followed=is_followed,
                )
                on_status = notebook_bar() if is_shown else None
                # Ctrl-C between the two lines would leave a driver that no object knows.
                with uninterrupted():
                    child = Child(replace(spec, call=call), is_shown=is_shown, on_status=on_status)
                    job = CallJob(child, directory, return_exceptions=return_exceptions)
            # KeyboardInterrupt too: neither job nor files may stay.
            except BaseException:
                if job is not None:
                    job.stop_and_forget()
                directory.remove()
                raise
            return job

        return begin


@contextmanager
def _printed() -> Iterator[None]:
    """Mark errors of workers whose traceback is in the printed output: a notebook would show it again and again."""
    try:
        yield
    except WorkerFailed as error:
        error.is_printed = True
        raise


async def _shielded(beginning: "asyncio.Future[CallJob[Any]]") -> None:
    """Wait for the end of the job even if this coroutine is cancelled; a cancellation stops the job."""
    # shield() alone would let the caller return before the workers have ended.
    ending = asyncio.ensure_future(_ended(beginning))
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:  # noqa: PERF203 (as often as somebody cancels)
            if beginning.done() and beginning.exception() is None:
                beginning.result().stop()


async def _ended(beginning: "asyncio.Future[CallJob[Any]]") -> None:
    await asyncio.wait([beginning])
    if beginning.exception() is None:
        await asyncio.to_thread(beginning.result().stop_and_forget)


@overload
def run(
    fn: Callable[..., R],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    return_exceptions: Literal[False] = False,
    python: str | None = None,
    **options: "Unpack[GivenOptions]",
) -> list[R]: ...


@overload
def run(
    fn: Callable[..., R],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    return_exceptions: bool,
    python: str | None = None,
    **options: "Unpack[GivenOptions]",
) -> list[R | Exception]: ...


def run(
    fn: Callable[..., R],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    return_exceptions: bool = False,
    python: str | None = None,
    **options: "Unpack[GivenOptions]",
) -> list[Any]:
    """Call `fn(*args, **kwargs)` in every worker of a job, and return the values by rank: Launcher(...).run(fn, ...).

    `options` are the fields of Launcher: `np=8`, `hosts="a:4,b:4"`, `env={"NAME": "value"}`, ….
    """
    if unknown := options.keys() - GivenOptions.__annotations__.keys():
        name = min(unknown)
        close = get_close_matches(name, GivenOptions.__annotations__, n=1)
        advice = f"; did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"run() got an unexpected keyword argument {name!r}{advice}")
    launcher = Launcher(python=python, **options)
    return launcher.run(fn, args, kwargs, return_exceptions=return_exceptions)


def notebook_bar() -> Callable[[Status | None], None] | None:
    """Return a function that shows a status below the cell of a notebook, and removes it for None; None outside a notebook.

    Jupyter's display messages can be updated: https://jupyter-client.readthedocs.io/en/stable/messaging.html
    """
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    if getattr(shell, "kernel", None) is None:
        # IPython in a terminal has no kernel.
        return None
    shown: list[Any] = []

    def show(status: Status | None) -> None:
        data = _displayed(status)
        # The first status makes the display, later ones update it.
        if shown:
            shown[0].update(data, raw=True)
        elif status is not None:
            from IPython import display  # noqa: PLC0415 (a kernel has it)

            show_new: Any = display.display
            shown.append(show_new(data, raw=True, display_id=True))

    return show


def _displayed(status: Status | None) -> dict[str, str]:
    """Return the status as text and as HTML, by media type."""
    if status is None:
        return {"text/plain": "", "text/html": ""}
    progress = f' value="{status.done}" max="{status.of}"' if status.of else ""
    lines = "<br>".join(html.escape(line) for line in status.text.split("\n"))
    return {"text/plain": status.text, "text/html": f"<progress{progress}></progress> {lines}"}


# SIGINT is ignored before any import, as in call_job.py.
_PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import sys; sys.path[:] = {path!r}; "
    "from hvlaunch.api.launcher import serve_pool; serve_pool({descriptor})"
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


def serve_pool(descriptor: int) -> NoReturn:
    """Hold the pool that the caller asks for, until the caller has gone."""
    link, request = begun_by_caller(descriptor)
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
