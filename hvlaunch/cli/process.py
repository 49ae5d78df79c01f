"""The hvlaunch process itself: printing answers and errors, hiding values from `ps`, leaving a job running (--detach)."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from hvlaunch.console.lines import visible
from hvlaunch.errors import EXIT_NOT_WRITTEN

__all__ = ["BROKEN_PIPE", "complain", "hide_values", "print_answer", "run_detached"]

BROKEN_PIPE = 141  # 128 + SIGPIPE


def print_answer(text: str) -> int:
    """Write to stdout and flush; the exit code that this leads to."""
    if sys.stdout is None:  # closed before we started
        return 0
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails again
        if isinstance(error, BrokenPipeError):
            return BROKEN_PIPE
        complain(f"stdout: {os.strerror(error.errno or errno.EIO).lower()}")
        return EXIT_NOT_WRITTEN
    return 0


def complain(message: str) -> None:
    """Write a message to stderr: one line, or one for each host; control characters, which may be a host's, escaped."""
    with suppress(OSError):
        for line in message.split("\n"):
            print(f"hvlaunch: {visible(line)}", file=sys.stderr, flush=True)  # noqa: T201 (printing errors is done here)


_ARG_START, _ARG_END = 48, 49  # fields of /proc/PID/stat, counted from 1; see proc(5)


def hide_values(assignments: Iterable[str]) -> None:
    """Overwrite the VALUE of each NAME=VALUE on this process's own command line, as others see it.

    It was to be seen for the milliseconds until now, and may be in the shell's history; `-x NAME`
    and --env-file are better. Nothing happens where the system does not tell where its arguments lie.
    """
    words = tuple(word.encode(errors="surrogateescape") for word in assignments if "=" in word)
    span = _own_arguments() if words else None
    if span is None:
        return
    import ctypes  # noqa: PLC0415 (only for those who use it)

    start, end = span
    memory = (ctypes.c_char * (end - start)).from_address(start)
    # endswith: -xNAME=VALUE is one word.
    hidden = [_hidden(word) if word.endswith(words) else word for word in memory.raw.split(b"\0")]
    memory.raw = b"\0".join(hidden)


def _hidden(word: bytes) -> bytes:
    name, equals, value = word.partition(b"=")
    return name + equals + b"*" * len(value)


def _own_arguments() -> tuple[int, int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    start, end = (int(fields[number - 3]) for number in (_ARG_START, _ARG_END))
    return (start, end) if 0 < start < end else None


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
