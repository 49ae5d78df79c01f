"""The driver of a job that a Python process has begun: a child of that process, which it talks to over a socket.

A process of its own needs neither the caller's main thread nor its signals, and leaves nothing there. When the caller ends, or
lets the socket go, the job is stopped.
"""

import gc
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from hvlaunch.console.status import AskStatus, Status
from hvlaunch.errors import EXIT_INTERNAL, HvlaunchError
from hvlaunch.job import JobResult, JobSpec

__all__ = ["Begun", "Caller", "DriverEnd", "JobWaits", "Refused", "Request", "main", "receive", "send"]

_OBJECTS_PER_COLLECTION = 20_000  # see cli/main.py
_LOOK = 1000  # milliseconds
_STATUS_DELAY = 1.0
"""Seconds before a status is told: a quick start has none."""
_STATUS_EACH = 0.25


class Request(NamedTuple):
    """What the caller asks for."""

    spec: JobSpec
    is_shown: bool
    """Whether the job's output is printed; else it is kept alone."""
    tells_status: bool
    """Whether the caller shows what the job waits for."""


class Begun(NamedTuple):
    """The job has an id."""

    job_id: str


class JobWaits(NamedTuple):
    """What the job waits for now."""

    status: Status | None


class DriverEnd(NamedTuple):
    """The job has ended, so."""

    result: JobResult


class Refused(NamedTuple):
    """There is no job."""

    error: HvlaunchError


def send(connection: socket.socket, message: object) -> None:
    """Pickled: both ends are processes of this user, and the socket has no name. Raises OSError."""
    data = pickle.dumps(message)
    connection.sendall(len(data).to_bytes(8, "big") + data)


def receive(connection: socket.socket) -> Any:
    """The next message; None where there will be none. Raises OSError."""
    with connection.makefile("rb", buffering=0) as file:
        size = int.from_bytes(_read(file, 8), "big")
        data = _read(file, size)
    return pickle.loads(data) if data else None  # noqa: S301 (see send)


def _read(file: Any, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (part := file.read(size - len(data))):
        data += part
    return bytes(data) if len(data) == size else b""


def main(descriptor: int) -> NoReturn:
    """Run the job that our parent asks for, and tell how it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller says whether Ctrl-C stops the job
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    request = receive(connection)
    if request is None:
        os._exit(0)
    has_gone = _end_of(connection)

    def end() -> None:
        """What the caller would have removed is removed in its place."""
        if has_gone(0) and request.spec.call is not None:
            shutil.rmtree(request.spec.call.results, ignore_errors=True)

    _end_by_signals(end)
    threading.Thread(target=_watch, args=(has_gone,), name="caller", daemon=True).start()
    asked_by = Caller(connection)
    message: DriverEnd | Refused
    try:
        message = _run(request, asked_by)
    except HvlaunchError as error:
        message = Refused(error)
    except Exception as error:  # noqa: BLE001 (ours to explain, whatever it is)
        import traceback  # noqa: PLC0415 (hopefully never)

        traceback.print_exc()
        message = Refused(_Defect(f"internal error: {type(error).__name__}: {error}"))
    with suppress(OSError):  # nobody waits any more
        asked_by.send(message)
    end()
    os._exit(0)


def _end_by_signals(end: Callable[[], None]) -> None:
    """Signals that end this process call `end` first, while no job handles them: before it has begun, and when it has ended."""

    def handle(number: int, _frame: object) -> None:
        end()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)


class _Defect(HvlaunchError):
    exit_code = EXIT_INTERNAL


class Caller:
    """Who has asked for a job, or a pool. For any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._ask: AskStatus | None = None
        self._changed = threading.Event()

    def send(self, message: object) -> None:
        """Raises OSError."""
        with self._lock:
            send(self._connection, message)

    def keep_status(self, ask: AskStatus | None) -> None:
        """What is waited for from now on."""
        self._ask = ask
        self._changed.set()

    def tell_status(self) -> NoReturn:
        """Tell what is waited for, as it changes."""
        told: Status | None = None
        self._changed.wait()
        time.sleep(_STATUS_DELAY)
        while True:
            self._changed.clear()
            ask = self._ask
            status = None if ask is None else ask()
            if status != told:
                with suppress(OSError):  # see main
                    self.send(JobWaits(status))
            told = status
            self._changed.wait(None if ask is None else _STATUS_EACH)


def _run(request: Request, caller: Caller) -> DriverEnd:
    from hvlaunch.gloo.controller import run  # noqa: PLC0415 (slow to load: the caller may be gone)

    stdout, stderr = (sys.stdout.buffer, sys.stderr.buffer) if request.is_shown else (_nothing(), _nothing())
    if request.tells_status:
        threading.Thread(target=caller.tell_status, name="status", daemon=True).start()
    result = run(
        request.spec,
        stdout=stdout,
        stderr=stderr,
        on_begun=lambda job_id: caller.send(Begun(job_id)),
        on_status=caller.keep_status if request.tells_status else None,
    )
    return DriverEnd(result)


def _nothing() -> BinaryIO:
    return Path(os.devnull).open("wb")


def _end_of(connection: socket.socket) -> Callable[[int], bool]:
    """Whether the caller, our parent, has gone or lets the socket go, now or within so many milliseconds. For any thread."""
    parent = os.getppid()

    def has_gone(milliseconds: int) -> bool:
        closing = select.poll()
        closing.register(connection, select.POLLIN)  # nothing more comes but the end
        # A process that the caller has forked may have the socket too.
        return os.getppid() != parent or bool(closing.poll(milliseconds))

    return has_gone


def _watch(has_gone: Callable[[int], bool]) -> None:
    """Stop the job when the caller has gone."""
    while not has_gone(_LOOK):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
