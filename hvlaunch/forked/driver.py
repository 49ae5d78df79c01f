"""From a copy of the fork server to a driver: what who asks for it has, it has."""

import io
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, NoReturn, TextIO, cast

from hvlaunch.agent.quick import prctl
from hvlaunch.errors import EXIT_INTERNAL
from hvlaunch.forked.request import Request

__all__ = ["Asker", "be_driver", "run_command_line", "run_function"]

_INTERRUPTED = 130  # 128 + SIGINT
_PR_SET_NAME = 15  # prctl(2)
_STREAMS = 3
_PROCESS_GROUP, _FOREGROUND_GROUP = (
    2,
    5,
)  # fields of /proc/PID/stat behind the name, counted from 0; see proc(5)


class Asker(NamedTuple):
    """Who asks for a driver, and for which."""

    pid: int
    request: Request
    descriptors: Sequence[int]
    """The working directory, stdin, stdout, stderr, and what the program has beside them."""


def be_driver(asker: Asker, run: Callable[[Asker], NoReturn]) -> NoReturn:
    """Call `run` as a process that `asker` might have started. Signals are blocked until it is one."""
    try:
        prctl(_PR_SET_NAME, b"hvl-driver")
        _take_descriptors(asker.descriptors)
        _take_attributes(asker.request)
        _take_signals(asker.request.ignored)
        run(asker)
    except KeyboardInterrupt:
        os._exit(_INTERRUPTED)
    except BaseException:  # noqa: BLE001 (nobody is above us who would say it)
        import traceback  # noqa: PLC0415 (hopefully never)

        traceback.print_exc()
        os._exit(EXIT_INTERNAL)


def run_command_line(asker: Asker) -> NoReturn:
    """hvlaunch, with the words and at the terminal of who has typed them."""
    from hvlaunch.cli.main import script  # noqa: PLC0415 (the server has loaded it)
    from hvlaunch.driver.stdin import Stdin  # noqa: PLC0415 (as above)
    from hvlaunch.gloo.controller import run  # noqa: PLC0415 (as above)

    script(partial(run, stdin=Stdin(0, partial(_is_in_foreground, asker.pid))))


def run_function(asker: Asker) -> NoReturn:
    """The driver of a job that a Python process has begun."""
    from hvlaunch.api.driver import main  # noqa: PLC0415 (as above)

    main(asker.descriptors[1 + _STREAMS], caller=asker.pid)


def _take_descriptors(descriptors: Sequence[int]) -> None:
    """Raises OSError."""
    here, *streams = descriptors[: 1 + _STREAMS]
    os.fchdir(here)
    os.close(here)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout = sys.__stdout__ = _writer(1, sys.stdout)  # type: ignore[misc]  # it is final for others
    sys.stderr = sys.__stderr__ = _writer(2, sys.stderr)  # type: ignore[misc]  # as above


def _writer(descriptor: int, own: TextIO) -> io.TextIOWrapper:
    """As Python makes it at its start. The server's own is made so for another file."""
    like = cast("io.TextIOWrapper", own)
    return io.TextIOWrapper(
        open(descriptor, "wb", closefd=False),
        encoding=like.encoding,
        errors=like.errors,
        line_buffering=descriptor > 1 or os.isatty(descriptor),
        write_through=like.write_through,
    )


def _take_attributes(request: Request) -> None:
    os.environ.clear()
    os.environ.update(request.environ)
    time.tzset()
    os.umask(request.umask)
    for number, limit in request.limits.items():
        resource.setrlimit(number, (limit, resource.getrlimit(number)[1]))
    with suppress(OSError):  # processors that are no more
        os.sched_setaffinity(0, request.cpus)
    sys.argv[:] = request.argv
    sys.path[:] = request.path


def _take_signals(ignored: frozenset[int]) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else default)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _is_in_foreground(pid: int) -> bool:
    """Whether this process may read its terminal: it is no job in the background."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 (on the way of what is typed)
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return False
    foreground = int(fields[_FOREGROUND_GROUP])
    return foreground <= 0 or foreground == int(fields[_PROCESS_GROUP])
