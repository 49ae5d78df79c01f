"""Making a warm pool, and holding it until somebody ends it: what the process of `hvlaunch pool up` does."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from hvlaunch import __version__
from hvlaunch.console.printer import Printer
from hvlaunch.console.status import AskStatus, OnStatus
from hvlaunch.engine.codec import encode
from hvlaunch.errors import BadUsage, HostsFailed, Problem
from hvlaunch.hosts.local import is_local
from hvlaunch.job import ConsoleOptions, Host, JobSpec, SSHOptions
from hvlaunch.outside.directory import IN_MAKING, JobDirectory, has_driver, remove
from hvlaunch.pool.pool import WarmPool
from hvlaunch.ssh.connection import Connection
from hvlaunch.ssh.ways import Ways

__all__ = ["hold_pool", "printed_status"]

_LAST_WORDS = 1.0
"""Seconds for a terminal that takes nothing."""


def hold_pool(
    root: Path,
    name: str,
    spec: JobSpec,
    *,
    idle_timeout: float,
    on_ready: Callable[[list[Problem]], None],
    on_status: OnStatus,
    owner: int | None = None,
) -> None:
    """Connect to the hosts of `spec`, call `on_ready` with what is wrong with some, and serve until the end.

    The pool is in `root`, under its name. It ends after `idle_timeout` seconds without a job; where there is an `owner`,
    a file descriptor, at the latest when nothing more can be read of it. `on_status` gets what is waited for while it connects.

    Raises BadUsage, NoJobDirectory, HostsFailed.
    """
    if has_driver(root / name):
        raise BadUsage(
            f"pool {name} is up",
            hint=f"hvlaunch pool status {name}, hvlaunch pool down {name}, or another name",
        )
    with suppress(OSError):  # what is left of one whose process was killed
        remove(root / name)
    with suppress(OSError):
        remove(root / f"{IN_MAKING}{name}")
    hosts = [host for host in spec.hosts if not is_local(host)]
    with (
        _signals() as on_signal,
        closing(JobDirectory(root, name, _about(name, spec))) as directory,
        closing(directory.listen()) as listener,
        _connect(spec) as connect,
        closing(WarmPool(name, spec, hosts, connect, idle_timeout=idle_timeout)) as pool,
    ):
        on_signal(pool.stop)
        problems = list(pool.start(on_status))
        if problems and (not spec.skip_bad_hosts or len(problems) == len(spec.hosts)):
            raise HostsFailed(problems)
        on_ready(problems)
        pool.serve(listener, owner)


def printed_status(console: ConsoleOptions, stderr: BinaryIO) -> OnStatus:
    """Shows it on `stderr`, until nothing is waited for any more."""
    printer = Printer(stderr, stderr, options=console)

    def show(ask: AskStatus | None) -> None:
        if not console.quiet:
            printer.status(ask)
        if ask is None:
            printer.close(_LAST_WORDS)

    return show


def _about(name: str, spec: JobSpec) -> Mapping[str, object]:
    return {
        "name": name,
        "version": __version__,
        "machine": os.uname().nodename,
        "pid": os.getpid(),
        "began": time.time(),
        "hosts": encode(tuple[Host, ...], spec.hosts),
        "ssh": encode(SSHOptions, spec.ssh),
        "remote_python": spec.remote_python,
    }


@contextmanager
def _connect(spec: JobSpec) -> Iterator[Callable[[Host], Connection]]:
    if spec.ssh.remote_agent is not None:
        from hvlaunch.ssh.ways import connect_by_agent  # noqa: PLC0415 (few sites have one)

        yield partial(connect_by_agent, spec.ssh.remote_agent)
        return
    with closing(Ways(spec.ssh, timeout=spec.start_timeout)) as ways:
        yield ways.connect


@contextmanager
def _signals() -> Iterator[Callable[[Callable[[], None]], None]]:
    """While in the block, signals that end a process call what was given; none cuts short what is closed at its end."""
    calls: list[Callable[[], None]] = []
    came: list[int] = []

    def handle(number: int, _frame: object) -> None:
        came.append(number)
        for call in calls:
            call()

    def on_signal(call: Callable[[], None]) -> None:
        calls.append(call)
        if came:
            call()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield on_signal
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
