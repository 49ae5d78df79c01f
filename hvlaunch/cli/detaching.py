"""--detach: the job's driver is a process of its own from the start, and leaves the one that was typed when its workers run."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress

from hvlaunch.cli.answer import print_answer

__all__ = ["run_detached"]

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LONGEST_ID = 100
_STDERR = 2


def run_detached(run: Callable[[Callable[[str], None]], int]) -> int:
    """Call `run` in another process, which calls what it gets with the job's id when it needs nobody any more.

    Returns in both: here with 0 and the id on stdout, or, where it has ended before that, with its exit code; in the
    other process with what `run` returns. Must be called before there are threads.
    """
    read_end, write_end = os.pipe()
    # Blocked, they wait for sigwaitinfo(), which tells what came from a terminal: that is the other's too.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_PASSED_ON, signal.SIGCHLD))
    parent, child = os.getpid(), os.fork()
    if child:
        os.close(write_end)
        return _wait(child, read_end)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _let_go(write_end)

    def tell(job_id: str) -> None:
        with suppress(OSError):  # nobody waits any more
            os.write(write_end, job_id.encode())
            os.kill(parent, signal.SIGCHLD)
        os.close(write_end)

    return run(tell)


def _let_go(kept: int) -> None:
    """Close all that was inherited but `kept` and, until the job runs, the way to its user."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (names alone)
        if int(name) > _STDERR and int(name) != kept:
            with suppress(OSError):  # the one that this list was read from
                os.close(int(name))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _wait(child: int, told: int) -> int:
    """Until the other process has told the job's id, or has ended; signals that were sent to us alone are for it."""
    os.set_blocking(told, False)
    while True:
        found = signal.sigwaitinfo((*_PASSED_ON, signal.SIGCHLD))
        if found.si_signo != signal.SIGCHLD:
            if found.si_code <= 0:  # by another process, and not by the kernel for a whole group
                os.kill(child, found.si_signo)
            continue
        with suppress(BlockingIOError):
            if job_id := os.read(told, _LONGEST_ID):
                return print_answer(f"{job_id.decode()}\n")
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
