"""The caller's side of a job's driver, which is a child process: its start, its messages and its output."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import IO, TextIO

from hvlaunch.api.driver import Begun, DriverEnd, JobWaits, Refused, Request, receive, send
from hvlaunch.api.errors import JobStopped
from hvlaunch.console.status import Status
from hvlaunch.errors import HvlaunchError
from hvlaunch.job import JobResult, JobSpec
from hvlaunch.outside.control import DriverGone

__all__ = ["Child"]

# SIGINT is ignored before any import: Ctrl-C also reaches this child, and its parent decides about
# the job.
_PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import sys; sys.path[:] = {path!r}; "
    "from hvlaunch.api.driver import main; main({descriptor})"
)


class Child:
    """The driver of a job. When `result` is done, the driver and the threads of this object have ended.

    The driver writes to the stdout and stderr of this process. If sys.stdout or sys.stderr is another object, as in a
    notebook, a thread copies the output there.
    """

    def __init__(
        self, spec: JobSpec, *, is_shown: bool, on_status: Callable[[Status | None], None] | None = None
    ) -> None:
        """`on_status` gets the status, in a thread of this object; without it the driver prints the status. Raises OSError."""
        self.job_id: Future[str] = Future()
        """Has the error of `result` if the job could not be started."""
        self.result: Future[JobResult] = Future()
        """The job's result, when the driver has ended. Raises HvlaunchError."""
        for future in (self.job_id, self.result):
            # A running future can't be cancelled.
            future.set_running_or_notify_cancel()
        self._pid = os.getpid()
        self._is_stopped = False
        self._on_status = on_status
        ours, theirs = socket.socketpair()
        outputs: list[_Output] = []
        try:
            with theirs, open(os.devnull, "r+b") as null:  # noqa: PTH123 (no path is joined)
                for number, text in ((1, sys.stdout), (2, sys.stderr)):
                    outputs.append(_Output(number, text, null.fileno(), is_shown=is_shown))
                streams = [null.fileno(), *(output.descriptor for output in outputs)]
                self._process = _begin(streams, theirs.fileno())
            # Sent by the socket, and not by the command line, which other users can read.
            # Our copy of the driver's end is closed by now: sending to a dead driver fails instead
            # of waiting.
            send(ours, Request(spec, is_shown, tells_status=on_status is not None))
        except OSError:
            for end in (ours, *(output.pipe for output in outputs)):
                if end is not None:
                    end.close()
            raise
        finally:
            # With our copies open, the readers would never see the end of the driver's output.
            for output in outputs:
                output.close()
        self._connection = ours
        self._threads = [
            threading.Thread(
                target=_pass_on, args=(output.pipe, output.text), name="hvlaunch output", daemon=True
            )
            for output in outputs
            if output.pipe is not None
        ]
        for thread in self._threads:
            thread.start()
        # Not one of _threads: this thread joins them.
        threading.Thread(target=self._listen, name="hvlaunch job", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_ours(self) -> bool:
        """True in the process that started the driver. A forked child has none of the threads."""
        return os.getpid() == self._pid

    def stop(self) -> None:
        """Stop the job as Ctrl-C does; a second call kills the workers. Does not wait."""
        self._is_stopped = True
        if not self.result.done():
            self._process.send_signal(signal.SIGTERM)

    def _listen(self) -> None:
        end: DriverEnd | Refused | None = None
        with self._connection, suppress(OSError):
            while (message := receive(self._connection)) is not None:
                if isinstance(message, Begun):
                    self.job_id.set_result(message.job_id)
                elif isinstance(message, JobWaits):
                    self._show_status(message.status)
                else:
                    end = message
        self._show_status(None)
        # The socket is at its end, so the driver ends now or has ended.
        code = self._process.wait()
        # A caller that has the result must have all of the output, too.
        for thread in self._threads:
            thread.join()
        # The fallback: a driver that was killed has sent no message.
        error: HvlaunchError = DriverGone(f"the driver of the job ended with status {code}")
        if isinstance(end, Refused):
            error = end.error
        elif self._is_stopped and code == -signal.SIGTERM:
            # Before the job's signal handlers were there, or after.
            error = JobStopped(signal.SIGTERM)
        if isinstance(end, DriverEnd):
            self.result.set_result(end.result)
        else:
            self.result.set_exception(error)
        if not self.job_id.done():
            self.job_id.set_exception(error)

    def _show_status(self, status: Status | None) -> None:
        if self._on_status is not None:
            # The display belongs to the notebook, and may raise anything; the job continues without it.
            with suppress(Exception):
                self._on_status(status)


def _begin(streams: Sequence[int], connection: int) -> "subprocess.Popen[bytes]":
    """Start a driver with these streams as stdin, stdout and stderr. Raises OSError."""
    stdin, stdout, stderr = streams
    return subprocess.Popen(
        # Isolated (-I): modules come only from the path of this process, which the program sets.
        [sys.executable, "-I", "-c", _PROGRAM.format(path=sys.path, descriptor=connection)],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=[connection],
    )


class _Output:
    """The destination of the driver's output for one of our streams. Raises OSError."""

    def __init__(self, number: int, text: TextIO | None, null: int, *, is_shown: bool) -> None:
        self.text = text
        self.pipe: IO[bytes] | None = None
        """The read end of a pipe, whose data a thread copies to `text`."""
        self.descriptor = number
        """The driver's stream. stderr stays open even for a hidden job, for error messages."""
        if is_shown and text is not None and not _is_own(text, number):
            read_end, self.descriptor = os.pipe()
            self.pipe = os.fdopen(read_end, "rb", buffering=0)
        elif (number == 1 and not is_shown) or not _is_open(number):
            self.descriptor = null

    def close(self) -> None:
        """Close our copy of the driver's end."""
        if self.pipe is not None:
            os.close(self.descriptor)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _is_own(text: TextIO, number: int) -> bool:
    with suppress(OSError, ValueError, AttributeError):
        # The driver writes to the descriptor: our buffered text must come first.
        if text is (sys.__stdout__ if number == 1 else sys.__stderr__):
            text.flush()
            return text.fileno() == number
    return False


def _pass_on(pipe: IO[bytes], text: TextIO) -> None:
    import codecs  # noqa: PLC0415 (where output is passed on)

    # A read may end in the middle of a character.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with pipe:
        is_over = False
        while not is_over:
            data = os.read(pipe.fileno(), 1 << 16)
            is_over = not data
            # A closed destination must not end the reading: a full pipe would block the driver.
            with suppress(OSError, ValueError):
                # It was closed.
                _write(text, decoder.decode(data, is_over))
                text.flush()


def _write(text: TextIO, part: str) -> None:
    """Write a text, with escapes for characters that the encoding lacks. Raises OSError, ValueError."""
    try:
        text.write(part)
    except UnicodeEncodeError as error:
        encoding = getattr(text, "encoding", None) or error.encoding
        text.write(part.encode(encoding, "backslashreplace").decode(encoding))
