"""Driver of a job from a Python program: a child process of the program (the caller), connected by a socket.

As a process of its own the driver needs neither the main thread nor the signal handlers of the caller. It stops the job when the
caller ends, or closes the socket.
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
from typing import Any, BinaryIO, NoReturn

from hvlaunch.api.errors import in_python
from hvlaunch.console.status import AskStatus, Status
from hvlaunch.errors import EXIT_INTERNAL, HvlaunchError
from hvlaunch.job import JobResult, JobSpec
from hvlaunch.named_tuples import NamedTuple

__all__ = [
    "Begun",
    "Caller",
    "DriverEnd",
    "JobWaits",
    "Refused",
    "Request",
    "begun_by_caller",
    "main",
    "receive",
    "send",
]

# The start makes many objects that stay, so the garbage collector runs less often: hvlaunch/__main__.py.
_OBJECTS_PER_COLLECTION = 20_000
_LOOK = 1000  # milliseconds
_STATUS_DELAY = 1.0
"""Seconds before the first status is sent: a quick start shows no bar."""
_STATUS_EACH = 0.25


class Request(NamedTuple):
    """The caller's request for a job."""

    spec: JobSpec
    is_shown: bool
    """True if the output is printed; else it is only kept."""
    tells_status: bool
    """True if the caller shows the status itself."""


class Begun(NamedTuple):
    """The job has an id."""

    job_id: str


class JobWaits(NamedTuple):
    """The status while the job waits for hosts; None otherwise."""

    status: Status | None


class DriverEnd(NamedTuple):
    """The job has ended with this result."""

    result: JobResult


class Refused(NamedTuple):
    """The job could not be started."""

    error: HvlaunchError


def send(connection: socket.socket, message: object) -> None:
    """Send a message. Raises OSError."""
    # Pickle is safe here: both ends are processes of this user, and the socket has no name by which others could connect.
    data = pickle.dumps(message)
    connection.sendall(len(data).to_bytes(8, "big") + data)


def receive(connection: socket.socket) -> Any:
    """Return the next message; None at the end. Raises OSError."""
    # Unbuffered: a buffer would take bytes of the next message, and is thrown away.
    with connection.makefile("rb", buffering=0) as file:
        size = int.from_bytes(_read(file, 8), "big")
        data = _read(file, size)
    return pickle.loads(data) if data else None  # noqa: S301 (see send)


def _read(file: Any, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (part := file.read(size - len(data))):
        data += part
    return bytes(data) if len(data) == size else b""


def begun_by_caller(descriptor: int) -> tuple[socket.socket, Any]:
    """Return the caller's connection and request; end this process if the caller has gone."""
    connection = socket.socket(fileno=descriptor)
    # ssh and other children must not hold the connection open: its end tells the caller that this process is gone.
    connection.set_inheritable(False)
    request = receive(connection)
    if request is None:
        os._exit(0)
    return connection, request


def main(descriptor: int) -> NoReturn:
    """Run the job of the parent's request, and send back the result."""
    # The caller decides whether Ctrl-C stops the job.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    connection, request = begun_by_caller(descriptor)
    has_gone = _end_of(connection)

    def end() -> None:
        """Remove the call's files, if the caller has gone and can't do it."""
        if has_gone(0) and request.spec.call is not None:
            shutil.rmtree(request.spec.call.results, ignore_errors=True)

    _end_by_signals(end)
    threading.Thread(target=_watch, args=(has_gone,), name="caller", daemon=True).start()
    asked_by = Caller(connection)
    message: DriverEnd | Refused
    try:
        message = _run(request, asked_by)
    except HvlaunchError as error:
        error.hint = in_python(error.hint)
        message = Refused(error)
    except Exception as error:  # noqa: BLE001 (ours to explain, whatever it is)
        import traceback  # noqa: PLC0415 (hopefully never)

        traceback.print_exc()
        message = Refused(_Defect(f"internal error: {type(error).__name__}: {error}"))
    with suppress(OSError):
        # The caller has gone.
        asked_by.send(message)
    end()
    os._exit(0)


def _end_by_signals(end: Callable[[], None]) -> None:
    """Make signals that end this process call `end` first. The job itself has other handlers."""

    def handle(number: int, _frame: object) -> None:
        end()
        # Ended by the signal itself, and not by an exit code: the caller recognizes a stop by it.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        # Under nohup SIGHUP is ignored, and must stay so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)


class _Defect(HvlaunchError):
    exit_code = EXIT_INTERNAL


class Caller:
    """The process that has asked for a job or a pool. Thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._ask: AskStatus | None = None
        self._changed = threading.Event()

    def send(self, message: object) -> None:
        """Raises OSError."""
        # The main thread and the status's thread send: their messages must not mix.
        with self._lock:
            send(self._connection, message)

    def keep_status(self, ask: AskStatus | None) -> None:
        """Use this function for the status from now on; None while the job does not wait."""
        self._ask = ask
        self._changed.set()

    def tell_status(self) -> NoReturn:
        """Send each change of the status."""
        sent: Status | None = None
        self._changed.wait()
        time.sleep(_STATUS_DELAY)
        while True:
            # Before the function is read: a change after this line ends the wait below at once.
            self._changed.clear()
            ask = self._ask
            status = None if ask is None else ask()
            if status != sent:
                with suppress(OSError):
                    # The caller has gone; main() stops the job.
                    self.send(JobWaits(status))
            sent = status
            self._changed.wait(None if ask is None else _STATUS_EACH)


def _run(request: Request, caller: Caller) -> DriverEnd:
    from hvlaunch.gloo import run  # noqa: PLC0415 (slow to load: the caller may be gone)

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
    """Return a function that waits some milliseconds, and is True if the caller has gone or has closed the socket. Thread-safe."""
    parent = os.getppid()

    def has_gone(milliseconds: int) -> bool:
        closing = select.poll()
        # The caller sends only its request, so the socket becomes readable at its end.
        closing.register(connection, select.POLLIN)
        # A process that the caller has forked may hold the socket open: the parent's end counts too.
        return os.getppid() != parent or bool(closing.poll(milliseconds))

    return has_gone


def _watch(has_gone: Callable[[int], bool]) -> None:
    """Wait until the caller has gone, then stop the job."""
    while not has_gone(_LOOK):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
