"""Makes a warm pool and holds it to its end: the work of the process of `hvlaunch pool up`."""

import os
import signal
import time
from collections.abc import Callable, Iterator
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
from hvlaunch.outside import IN_MAKING, JobDirectory, has_driver, remove
from hvlaunch.pool.pool import WarmPool
from hvlaunch.ssh import Connection
from hvlaunch.ssh.ways import Ways

__all__ = ["hold_pool", "printed_status"]


_LAST_WORDS = 1.0
"""Seconds that a blocked terminal gets for the last message."""


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
    """Connect to the hosts of `spec`, call `on_ready` with the problems of some hosts, and serve until the end.

    The pool's directory is in `root`, under its name. The pool ends after `idle_timeout` seconds without a job, or when the
    `owner`, a file descriptor, is at its end. `on_status` gets the progress of connecting.

    Raises BadUsage, NoJobDirectory, HostsFailed.
    """
    if has_driver(root / name):
        raise BadUsage(
            f"pool {name} is up",
            hint=f"hvlaunch pool status {name}, hvlaunch pool down {name}, or another name",
        )
    # A pool whose process was killed leaves its directory, or one that is not whole.
    with suppress(OSError):
        remove(root / name)
    with suppress(OSError):
        remove(root / f"{IN_MAKING}{name}")
    # This machine needs neither ssh nor a warm agent.
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
        # A pool without any host is of no use, whatever the options say.
        if problems and (not spec.skip_bad_hosts or len(problems) == len(spec.hosts)):
            raise HostsFailed(problems)
        on_ready(problems)
        pool.serve(listener, owner)


def printed_status(console: ConsoleOptions, stderr: BinaryIO) -> OnStatus:
    """Return a function that shows the progress on `stderr` until it gets None."""
    printer = Printer(stderr, stderr, options=console)

    def show(ask: AskStatus | None) -> None:
        if not console.quiet:
            printer.status(ask)
        if ask is None:
            printer.close(_LAST_WORDS)

    return show


def _about(name: str, spec: JobSpec) -> dict[str, object]:
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
    """Within the block, SIGTERM and SIGHUP call the functions that were registered, instead of ending the process."""
    # The block's end closes the pool, and must not be cut short. A signal may come before the first registration.
    calls: list[Callable[[], None]] = []
    received: list[int] = []

    def handle(number: int, _frame: object) -> None:
        received.append(number)
        for call in calls:
            call()

    def on_signal(call: Callable[[], None]) -> None:
        calls.append(call)
        if received:
            call()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield on_signal
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
