"""Calls functions on hosts: run() for one call, Launcher for many with the same options."""

import asyncio
import html
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from hvlaunch.api import archive
from hvlaunch.api.archive import CallDirectory
from hvlaunch.api.call_job import CallJob
from hvlaunch.api.child import Child
from hvlaunch.api.errors import WorkerFailed
from hvlaunch.api.job import Job
from hvlaunch.api.options import GivenOptions, LauncherOptions
from hvlaunch.children import uninterrupted
from hvlaunch.console.status import Status
from hvlaunch.job import Call

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Launcher", "notebook_bar", "run"]

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
        pickled = archive.pickled_call(fn, args, {} if kwargs is None else kwargs)
        # asdict() would copy the values deeply.
        given = {field.name: getattr(self, field.name) for field in fields(LauncherOptions)}
        spec = spec_of(given, archive.command(self.python), os.environ)
        if spec.setup is not None:
            spec = replace(spec, command=archive.command(self.python, is_set_up=True))

        def begin() -> CallJob[R]:
            directory = CallDirectory()
            job: CallJob[R] | None = None
            try:
                archive.write_archive(
                    directory.program, pickled, raises=not return_exceptions, sync=spec.sync
                )
                call = Call(
                    name=archive.function_name(fn),
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
