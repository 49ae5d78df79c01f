"""Begin and end of a script: membership in the group of all workers, in static and elastic jobs."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Literal, TextIO

from hvlaunch.torch import current
from hvlaunch.torch.backends import wait_until_idle
from hvlaunch.torch.current import ProcessSet, add_process_set
from hvlaunch.torch.elastic.training import is_elastic, placed
from hvlaunch.torch.group_errors import NotOffered

__all__ = ["STACK_SIGNAL", "answer_stack_signal", "init", "shutdown"]

_files: list[TextIO] = []
"""Kept open for faulthandler, which writes to their descriptors."""

STACK_SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else None


def answer_stack_signal() -> None:
    """Let the host's agent request stacks from this process, if it is a worker and does not use the signal otherwise."""
    scratch = os.environ.get("HVLAUNCH_SCRATCH")
    if scratch is None or STACK_SIGNAL is None or _files or signal.getsignal(STACK_SIGNAL) != signal.SIG_DFL:
        return
    # The directory is gone, or is another program's.
    with suppress(OSError, ValueError):
        # One file per process, opened in advance: a signal handler must not open files.
        path = os.path.join(scratch, f"stack.{os.getpid()}")  # noqa: PTH118 (as cheap as can be)
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "w")
        faulthandler.register(STACK_SIGNAL, file, all_threads=True, chain=False)
        _files.append(file)


def init(
    backend: str | None = None,
    timeout: timedelta | float | None = None,
    *,
    comm: object = None,
    process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None = None,
) -> None:
    """Make this process a member of the group of all workers, and choose its device. Collective.

    backend: a backend's name in torch; the default is NCCL with CUDA, else Gloo. timeout: the longest wait for the other
    workers, and for each later collective, as a timedelta or in seconds; the default is torch's. process_sets: sets to add at
    once; more can be added later. comm exists for Horovod's scripts and must be empty.

    The rank comes from the launcher's variables (hvlaunch, torchrun, mpirun or srun). Without a launcher the group has a
    single process. Under hvlaunch the workers find rank 0 through the rendezvous, else at MASTER_ADDR and MASTER_PORT. In an
    elastic job of hvlaunch, init() asks for a place in the next round, and a function under elastic.run continues from there.
    A second call does nothing until shutdown().

    Raises GroupError (see hvlaunch.torch.group_errors), and RendezvousError if the rendezvous can't be reached. A worker that
    an elastic job does not need any more ends by SystemExit(0).
    """
    if comm or not isinstance(backend, str | None):
        raise NotOffered(
            "init(comm)", "add_process_set() with the ranks, and process_set= in each collective"
        )
    if current.is_initialized():
        return
    if not isinstance(timeout, timedelta | None):
        timeout = timedelta(seconds=timeout)
    if is_elastic():
        with placed() as training:
            training.join(backend=backend, timeout=timeout)
    else:
        current.init(backend, timeout)
    # init() may be called again after shutdown(), and one registration is enough.
    atexit.unregister(_end)
    atexit.register(_end, os.getpid())
    if process_sets is not None and not isinstance(process_sets, str):
        for process_set in process_sets:
            add_process_set(process_set)


def shutdown() -> None:
    """Wait until all workers call it, then leave the group. Collective. init() may follow. Does nothing without a group.

    A failing worker need not call it: its peers do not wait for a worker that has ended.
    """
    if is_elastic():
        with placed() as training:
            training.leave()
    else:
        current.shutdown()


def _end(process: int) -> None:
    """Leave the group at the end of Python: Horovod's scripts call no shutdown(). Does not wait for peers, which may have failed."""
    # A forked child inherits this registration, and has no part in the group.
    if current.is_initialized() and os.getpid() == process:
        wait_until_idle()
        current.leave()
