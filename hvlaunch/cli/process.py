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
    """Write text to stdout and flush; return the exit code."""
    if sys.stdout is None:  # closed before we started
        return 0
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        # Without this, Python's flush at exit fails again, and prints a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return BROKEN_PIPE
        complain(f"stdout: {os.strerror(error.errno or errno.EIO).lower()}")
        return EXIT_NOT_WRITTEN
    return 0


def complain(message: str) -> None:
    """Write a message to stderr, a line for each of its lines. Control characters, which a host may have sent, are escaped."""
    with suppress(OSError):
        for line in message.split("\n"):
            print(f"hvlaunch: {visible(line)}", file=sys.stderr, flush=True)  # noqa: T201 (printing errors is done here)


# Fields of /proc/PID/stat, counted from 1; see proc(5).
_ARG_START, _ARG_END = 48, 49


def hide_values(assignments: Iterable[str], secrets: Iterable[str] = ()) -> None:
    """Overwrite `secrets`, and the VALUE of each NAME=VALUE, on this process's command line, as other users see it.

    Until now it was visible for some milliseconds, and a shell's history may keep it; `-x NAME` and --env-file are safer.
    Without Linux's /proc nothing is hidden.
    """
    words = tuple(word.encode(errors="surrogateescape") for word in assignments if "=" in word)
    whole = tuple(word.encode(errors="surrogateescape") for word in secrets)
    span = _own_arguments() if words or whole else None
    if span is None:
        return
    import ctypes  # noqa: PLC0415 (only for those who use it)

    start, end = span
    # The kernel shows these bytes of our memory as the command line.
    memory = (ctypes.c_char * (end - start)).from_address(start)
    # endswith, since -xNAME=VALUE is one word.
    hidden = [_hidden(word) if word.endswith(words) else word for word in memory.raw.split(b"\0")]
    for secret in whole:
        stars = b"*" * len(secret)
        hidden = [word[: -len(secret)] + stars if word.endswith(secret) else word for word in hidden]
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
    """Fork, and call `run` in the child with a callback that takes the job's id once the job needs no terminal.

    Returns in both processes. The child returns `run`'s result. The parent prints the id and returns 0, or returns the
    child's exit code if it ends before. Call this before starting threads: fork() copies only the calling thread.
    """
    read_end, write_end = os.pipe()
    # Blocked signals wait for sigwaitinfo(), which tells their sender: the kernel signals the child too.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_PASSED_ON, signal.SIGCHLD))
    parent, child = os.getpid(), os.fork()
    if child:
        os.close(write_end)
        return _wait(child, read_end)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _let_go(write_end)

    def tell(job_id: str) -> None:
        with suppress(OSError):  # the parent is gone
            os.write(write_end, job_id.encode())
            # The parent waits for signals alone: a byte in the pipe would not wake it.
            os.kill(parent, signal.SIGCHLD)
        os.close(write_end)

    return run(tell)


def _let_go(kept: int) -> None:
    """Close inherited descriptors except `kept`, and take stdin from /dev/null."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (names alone)
        if int(name) > _STDERR and int(name) != kept:
            with suppress(OSError):  # the descriptor of this listing
                os.close(int(name))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _wait(child: int, read_end: int) -> int:
    """Wait for the job's id or the child's end, and forward signals sent to this process alone."""
    os.set_blocking(read_end, False)
    while True:
        received = signal.sigwaitinfo((*_PASSED_ON, signal.SIGCHLD))
        if received.si_signo != signal.SIGCHLD:
            # A code above 0 is the kernel's, which signals the whole foreground group, the child too.
            if received.si_code <= 0:
                os.kill(child, received.si_signo)
            continue
        with suppress(BlockingIOError):
            if job_id := os.read(read_end, _LONGEST_ID):
                return print_answer(f"{job_id.decode()}\n")
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
