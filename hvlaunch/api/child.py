"""The caller's side of a job's driver: a child process, and what it says."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import IO, TextIO

from hvlaunch.api.driver import Begun, Ended, Refused, Request, Waits, receive, send
from hvlaunch.api.errors import JobStopped
from hvlaunch.console.status import Status
from hvlaunch.errors import HvlaunchError
from hvlaunch.job import JobResult, JobSpec
from hvlaunch.outside.control import DriverGone

__all__ = ["Child"]

_PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import sys; sys.path[:] = {path!r}; "
    "from hvlaunch.api.driver import main; main({descriptor})"
)


class Child:
    """A driver that runs one job. Its end, and that of the threads here, is `result`'s.

    Where sys.stdout and sys.stderr are this process's own, the driver writes there itself; else a thread passes on what
    it prints: that is so in a notebook.
    """

    def __init__(
        self, spec: JobSpec, *, is_shown: bool, on_status: Callable[[Status | None], None] | None = None
    ) -> None:
        """`on_status` gets what the job waits for, in a thread of this; else that is printed. Raises OSError."""
        self.job_id: Future[str] = Future()
        """Raises as `result` where there is no job."""
        self.result: Future[JobResult] = Future()
        """How the job has ended, when nothing of the driver is left. Raises HvlaunchError."""
        for future in (self.job_id, self.result):
            future.set_running_or_notify_cancel()  # from now on nobody can cancel it
        self._is_stopped = False
        self._on_status = on_status
        ours, theirs = socket.socketpair()
        pipes: list[tuple[IO[bytes], TextIO]] = []
        try:
            with theirs:
                program = _PROGRAM.format(path=sys.path, descriptor=theirs.fileno())
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", program],
                    stdin=subprocess.DEVNULL,
                    stdout=_own(sys.stdout, 1) if is_shown else subprocess.DEVNULL,
                    stderr=_own(sys.stderr, 2) if is_shown else None,
                    pass_fds=[theirs.fileno()],
                )
            pipes = [
                (pipe, text)
                for pipe, text in ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
                if pipe is not None
            ]
            send(ours, Request(spec, is_shown, tells_status=on_status is not None))
        except OSError:
            ours.close()
            raise
        self._connection = ours
        self._threads = [
            threading.Thread(target=_pass_on, args=each, name="hvlaunch output", daemon=True)
            for each in pipes
        ]
        for thread in self._threads:
            thread.start()
        threading.Thread(target=self._listen, name="hvlaunch job", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """As Ctrl-C does in a terminal; the second time kills the workers. Does not wait."""
        self._is_stopped = True
        if not self.result.done():
            self._process.send_signal(signal.SIGTERM)

    def _listen(self) -> None:
        end: Ended | Refused | None = None
        with self._connection, suppress(OSError):
            while (message := receive(self._connection)) is not None:
                if isinstance(message, Begun):
                    self.job_id.set_result(message.job_id)
                elif isinstance(message, Waits):
                    self._show_status(message.status)
                else:
                    end = message
        self._show_status(None)
        code = self._process.wait()
        for thread in self._threads:
            thread.join()
        error: HvlaunchError = DriverGone(f"the driver of the job ended with status {code}")
        if isinstance(end, Refused):
            error = end.error
        elif self._is_stopped and code == -signal.SIGTERM:  # as it was about to begin, or to end
            error = JobStopped(signal.SIGTERM)
        if isinstance(end, Ended):
            self.result.set_result(end.result)
        else:
            self.result.set_exception(error)
        if not self.job_id.done():
            self.job_id.set_exception(error)

    def _show_status(self, status: Status | None) -> None:
        if self._on_status is not None:
            # of any kind: the display is the notebook's, and the job goes on without it
            with suppress(Exception):
                self._on_status(status)


def _own(text: TextIO | None, number: int) -> int | None:
    """Where the driver is to write what is for this stream of ours: None is to inherit it."""
    with suppress(OSError, ValueError, AttributeError):
        if text is (sys.__stdout__ if number == 1 else sys.__stderr__) and text is not None:
            text.flush()
            if text.fileno() == number:
                return None
    return subprocess.PIPE


def _pass_on(pipe: IO[bytes], text: TextIO) -> None:
    import codecs  # noqa: PLC0415 (where output is passed on)

    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with pipe:
        while data := os.read(pipe.fileno(), 1 << 16):
            with suppress(OSError, ValueError):  # it was closed
                text.write(decoder.decode(data))
                text.flush()
