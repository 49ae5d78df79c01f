"""A call on hosts: its file, which any Python of the same version can run, its driver, which is a child of this process, and its job."""

import atexit
import fcntl
import io
import json
import os
import pickle
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import cache
from importlib.resources import files
from os import environ
from pathlib import Path
from types import ModuleType
from typing import IO, Any, TextIO, TypeVar

from hvlaunch.api.driver import Begun, DriverEnd, JobWaits, Refused, Request, receive, send
from hvlaunch.api.errors import CallNotPickled, JobFailed, JobStopped, ResultNotRead, WorkerFailed
from hvlaunch.api.in_worker import MARK, SIZE
from hvlaunch.api.job import Job
from hvlaunch.console.status import Status
from hvlaunch.driver.worker_files import PROBLEM
from hvlaunch.errors import BadUsage, HvlaunchError
from hvlaunch.job import JobResult, JobSpec, SyncOptions, WorkerExit
from hvlaunch.outside import KnownJob, jobs_directory, known_job
from hvlaunch.outside.control import DriverGone
from hvlaunch.sync.library import module_texts, worker_modules

__all__ = [
    "CallDirectory",
    "CallJob",
    "Child",
    "call_command",
    "error_of",
    "function_name",
    "pickled_call",
    "values",
    "write_archive",
]

_MOST = 1 << 31
"""Most bytes that Python reads from a member of an archive."""


def function_name(function: Callable[..., object]) -> str:
    """Return the function's name for messages and `hvlaunch jobs`."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def pickled_call(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> bytes:
    """Pickle a call: functions and classes of `__main__` or a notebook by value, all others by name.

    Raises CallNotPickled, and BadUsage for wrong arguments.
    """
    import cloudpickle  # noqa: PLC0415 (30 ms; attach() and jobs() do without)

    if not callable(function):
        raise CallNotPickled(f"{function!r} is not a function")
    if not isinstance(args, Iterable):
        raise BadUsage(f"args is of type {type(args).__name__}, not a sequence", hint="args=(value,)")
    if not isinstance(kwargs, Mapping):
        raise BadUsage(
            f"kwargs is of type {type(kwargs).__name__}, not a mapping", hint='kwargs={"name": value}'
        )
    # An iterator can be read only once.
    args = tuple(args)
    try:
        pickled: bytes = cloudpickle.dumps((function, args, dict(kwargs)), protocol=5)
    except Exception as error:
        culprit = _culprit(cloudpickle, function, args, kwargs)
        hint = "create it inside the function, or pass the values that it is made from"
        raise CallNotPickled(f"{culprit} can't be pickled: {_one_line(error)}", hint=hint) from error
    if len(pickled) >= _MOST:
        hint = "pass the path of a file that the hosts can read"
        raise CallNotPickled(
            f"the function and its arguments take {len(pickled)} bytes; the limit is 2 GiB", hint=hint
        )
    return pickled


def _culprit(
    cloudpickle: ModuleType,
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> str:
    parts: Iterator[tuple[str, object]] = iter(
        [
            *((f"argument {number + 1}", value) for number, value in enumerate(args)),
            *((f"argument {name!r}", value) for name, value in kwargs.items()),
        ]
    )
    # The error of cloudpickle does not say which value is at fault: try them one by one.
    for name, part in parts:
        try:
            cloudpickle.dumps(part)
        except Exception:  # noqa: BLE001, PERF203 (the value's own code may raise anything)
            return f"{name} of {function_name(function)}()"
    return f"{function_name(function)}(), or a value that it uses,"


def write_archive(path: Path, pickled: bytes, *, raises: bool, sync: SyncOptions | None = None) -> None:
    """Write the archive. With `raises` a worker fails if its function raises an exception. Raises OSError.

    With `sync`, modules of the tree come from the hosts' copies.
    """
    places = [os.path.abspath(place) for place in sys.path]  # noqa: PTH100 (a text; "" means the working directory)
    call = {
        "python": "{}.{}".format(*sys.version_info),
        "path": places if sync is None else [_place_in(sync, place) for place in places],
        "raises": raises,
    }
    # Opened for reading as well: zipfile looks for the archive's directory before it appends.
    with path.open("x+b") as file:
        # The members that all calls share are compressed once for this process.
        file.write(_base())
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr("call.json", json.dumps(call))
            archive.writestr("call.pickle", pickled)


def _place_in(sync: SyncOptions, place: str) -> str:
    """Return a directory of the tree relative to the workers' directory; other directories unchanged."""
    real = os.path.realpath(place)
    is_inside = real == sync.root or real.startswith(f"{sync.root}/")
    return os.path.relpath(real, f"{sync.root}/{sync.below}") if is_inside else place


@cache
def _base() -> bytes:
    """Return the archive with the common members of all calls."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", (files("hvlaunch.api") / "in_worker.py").read_bytes())
        for path, source in (*module_texts(files("cloudpickle"), "cloudpickle"), *worker_modules()):
            archive.writestr(path, source)
    return data.getvalue()


def call_command(python: str | None, *, is_set_up: bool = False) -> tuple[str, ...]:
    """Return the command for a host: with the given Python, or the first available of this path, this version, `python3`.

    `is_set_up`: the hosts have an environment of their own, whose programs are first on their PATH.
    """
    version = "{}.{}".format(*sys.version_info)
    here = () if is_set_up else (sys.executable,)
    candidates: Any = (python,) if python is not None else (*here, f"python{version}", "python3")
    # `sh` is the script's $0; the candidates are its "$@".
    return ("/bin/sh", "-c", _FIND, "sh", *candidates)


# The host's shell finds Python: its paths may differ from ours.
_FIND = (
    'for p do if command -v "$p" >/dev/null 2>&1; then exec "$p" "$HVLAUNCH_SCRATCH/call"; fi; done; '
    'echo "hvlaunch: no Python here: $*" >&2; exit 127'
)


_PREFIX = "hvlaunch-call-"
_LOCK = "lock"
_MAKING_TIME = 60.0
"""Seconds after which a directory without a held lock is abandoned."""


class CallDirectory:
    """The files of one call on this machine: the program for the hosts, and the results. The process holds its lock."""

    def __init__(self) -> None:
        """Make the directory, and remove directories of callers killed together with their drivers. Raises OSError."""
        for path in _left_over():
            shutil.rmtree(path, ignore_errors=True)
        # A forked child has this object too, and must not remove its parent's files.
        self._pid = os.getpid()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.program = self.path / "program"
        try:
            self._lock = (self.path / _LOCK).open("xb")
            with suppress(OSError):
                # The file system has no locks.
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def remove(self) -> None:
        """Remove the directory. May be repeated; does nothing in a forked process, since the parent still needs the files."""
        if os.getpid() == self._pid:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()


def _left_over() -> Iterator[Path]:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Another caller may remove the same directory at this moment.
        with suppress(OSError):
            # Directories of temporary files are shared: another user's directory, or a link, stays
            # as it is.
            status = path.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            # A young directory may not have its lock yet.
            if is_ours and status.st_mtime < time.time() - _MAKING_TIME and not _is_held(path / _LOCK):
                yield path


def _is_held(lock: Path) -> bool:
    """True if a process holds the lock. Raises OSError."""
    with suppress(FileNotFoundError), lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


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


R = TypeVar("R")

_BEGINNING = 60.0
"""Seconds that a driver gets to make the job's id."""
_AT_EXIT = 30.0
"""Seconds for which an ending process waits for its jobs."""


class CallJob(Job[R]):
    """A job whose driver is a child of this process. In a forked process it is a job like any other."""

    def __init__(self, child: Child, directory: CallDirectory, *, return_exceptions: bool) -> None:
        self._child = child
        self._directory = directory
        self._return_exceptions = return_exceptions
        # At the end of this process, _end_all() also stops jobs whose objects are gone.
        _LEFT[child] = directory
        # Not at exit: _end_all() does it then, in the right order.
        weakref.finalize(self, _when_ended, child).atexit = False

    @property
    def ended(self) -> Future[JobResult]:
        """The job's result, when its driver has ended. The future can't be cancelled."""
        return self._child.result

    @property
    def state(self) -> str:
        if self.ended.done():
            error = self.ended.exception()
            return f"exit code {_code(error) if error is not None else self.ended.result().exit_code}"
        state = super().state
        # The driver is starting, or has just ended; its future decides.
        return "connecting" if state in ("no answer", "driver killed") else state

    @property
    def hosts(self) -> list[str]:
        """The names of the connected hosts; after the job, the hosts of its last workers."""
        if self.ended.done() and self.ended.exception() is None:
            return list(dict.fromkeys(end.host for end in self.ended.result().exits))
        return super().hosts

    def stop(self, *, kill: bool = False) -> None:
        """Stop the job as Ctrl-C does, or with `kill` as a second Ctrl-C. wait() waits for its end."""
        if not self._child.is_ours:
            super().stop(kill=kill)
            return
        # The driver takes a second signal as a second Ctrl-C, and kills the workers.
        for _ in range(1 + kill):
            self._child.stop()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the job, at most `timeout` seconds; return its exit code (docs/reference/exit-codes.md).

        Raises TimeoutError, and HvlaunchError if the job could not be started.
        """
        return self._await_end(timeout).exit_code if self._child.is_ours else super().wait(timeout)

    def results(self, timeout: float | None = None) -> list[R]:
        """Wait for the end, at most `timeout` seconds; return the values of the last round's functions, by rank.

        Raises TimeoutError, WorkerFailed for a failed worker, JobFailed for failed hosts, JobStopped, ResultNotRead;
        other HvlaunchErrors if the job could not be started, and ResultLost in a forked process.
        """
        if not self._child.is_ours:
            return super().results(timeout)
        result = self._await_end(timeout)
        return values(result, self._directory.path, return_exceptions=self._return_exceptions)

    def stop_and_forget(self) -> None:
        """Stop the job if it runs, wait for its end, and remove its files. Ctrl-C meanwhile kills its workers."""
        # Each Ctrl-C of an impatient user sends another stop, and the second kills.
        while self._child.is_ours and not self.ended.done():
            self._child.stop()
            with suppress(KeyboardInterrupt):
                self.ended.exception()
        _remove(self._child)

    def _await_end(self, timeout: float | None) -> JobResult:
        try:
            return self.ended.result(timeout)
        # Python 3.10 has two classes of this name, and callers catch the built-in one.
        except FutureTimeoutError:
            raise TimeoutError(f"the job has not ended within {timeout:g} s") from None

    def _known(self) -> KnownJob:
        """Raises HvlaunchError if the job could not be started."""
        job_id = self._child.job_id.result(_BEGINNING)
        directory = jobs_directory(environ) / job_id
        job = known_job(directory)
        return job or KnownJob(
            job_id, directory, {"id": job_id, "pid": self._child.pid}, None, has_driver=False
        )

    def _ending(self, job: KnownJob) -> Mapping[str, Any]:
        if not self._child.is_ours:
            return super()._ending(job)
        from hvlaunch.watch.recorder import result_record  # noqa: PLC0415 (slow to load)

        return result_record(self.ended.result())


_LEFT: dict[Child, CallDirectory] = {}
"""Directories of calls that have not been removed."""


@atexit.register
def _end_all() -> None:
    """Stop all jobs at the end of this process, and wait for their workers."""
    # All jobs are told first, so that they end at the same time.
    # A copy: the threads of ending jobs remove their entries meanwhile.
    children = [child for child in list(_LEFT) if child.is_ours]
    for child in children:
        child.stop()
    for child in children:
        with suppress(HvlaunchError, FutureTimeoutError):
            child.result.result(_AT_EXIT)
        _remove(child)


def _when_ended(child: Child) -> None:
    """Remove the files of a job, whose object is gone, when it ends."""
    child.result.add_done_callback(lambda _ended: _remove(child))


def _remove(child: Child) -> None:
    directory = _LEFT.get(child)
    if directory is not None:
        directory.remove()
        # Removed from the table last: the end of this process waits for the calls that are in it.
        _LEFT.pop(child, None)


def _code(error: BaseException) -> int:
    return error.exit_code if isinstance(error, HvlaunchError) else 1


_MOST_FACTS = 1 << 24


def values(result: JobResult, directory: Path, *, return_exceptions: bool) -> list[Any]:
    """Return the values of the last round's functions, by rank; None for a rank that was stopped after a good end.

    Raises WorkerFailed, JobFailed, JobStopped, ResultNotRead; with `return_exceptions` errors of single ranks are in the list.
    """
    # The failure of the job; errors of single ranks come below.
    error = None if result.exit_code == 0 else error_of(result, directory)
    if error is not None and not (return_exceptions and result.size):
        raise error
    outcomes = [_value(result, directory, rank, error) for rank in range(result.size)]
    if not return_exceptions:
        for value in outcomes:
            if isinstance(value, _Failure):
                raise value.error
    return [value.error if isinstance(value, _Failure) else value for value in outcomes]


class _Failure:
    """The error of a rank without a value. A value may be an exception itself, so a type of its own tells them apart."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def error_of(result: JobResult, directory: Path) -> Exception:
    """Return the cause of the job's failure."""
    if result.interrupted is not None:
        return JobStopped(result.interrupted)
    if result.failure is not None:
        return _failed(result, directory, result.failure.rank)
    if result.error is not None:
        return JobFailed(result.error)
    return _failed(result, directory, next((end.rank for end in result.exits if not end.ok), 0))


def _value(result: JobResult, directory: Path, rank: int, error: Exception | None) -> Any:
    path = directory / str(rank)
    facts, end = _facts(path), _ends(result).get(rank)
    has_failed = error is not None and end is not None and _has_failed(end)
    if facts is not None and facts["kind"] == "value" and not has_failed:
        try:
            with path.open("rb") as file:
                return pickle.load(file)  # noqa: S301 (of a worker of this user's, over the job's session: docs/explain/security.md)
        except Exception as cause:  # noqa: BLE001 (of any kind: unpickling runs the value's own code)
            unread = ResultNotRead(_one_line(cause), rank=rank)
            unread.__cause__ = cause
            return _Failure(unread)
    # A job may end well although some workers were stopped, as the spare ones of an elastic job.
    if error is None and facts is None and end is not None and end.stopped:
        return None
    if facts is None and isinstance(error, JobFailed | JobStopped) and (end is None or end.stopped):
        return _Failure(error)
    return _Failure(_failed(result, directory, rank))


def _has_failed(end: WorkerExit) -> bool:
    """True if the worker failed by itself."""
    return not end.stopped and (end.signal is not None or end.code not in (None, 0))


def _failed(result: JobResult, directory: Path, rank: int) -> WorkerFailed:
    facts, ends = _facts(directory / str(rank)), _ends(result)
    end = ends.get(rank)
    is_error = facts is not None and facts["kind"] == "error"
    error = WorkerFailed(
        f"{facts['type']}: {facts['text']}"
        if facts is not None and is_error
        else _cause(end, directory, rank, has_returned=facts is not None),
        rank=rank,
        host="" if end is None else end.host,
        traceback=facts["traceback"] if facts is not None and is_error else None,
        end=end,
        others=[worker for number, worker in sorted(ends.items()) if number != rank],
    )
    if facts is not None and is_error:
        error.__cause__ = _raised(directory / str(rank), facts)
    return error


def _cause(end: WorkerExit | None, directory: Path, rank: int, *, has_returned: bool) -> str:
    # The driver writes this file if it could not store the result.
    with suppress(OSError):
        return f"its value could not be kept: {(directory / f'{rank}{PROBLEM}').read_text()}"
    if end is None:
        return "its end is unknown"
    if end.not_started is not None:
        return f"it could not be started: {end.not_started}"
    if end.stopped:
        return "it was stopped because the job had failed"
    if end.oom_killed:
        cause = "it was killed because its host ran out of memory"
    elif end.signal is not None:
        cause = f"it was ended by signal {end.signal}"
    else:
        cause = f"it ended with exit code {end.code}" + ("" if has_returned else ", and returned no value")
    return f"{cause}, after it had returned" if has_returned else cause


def _ends(result: JobResult) -> Mapping[int, WorkerExit]:
    return {end.rank: end for end in result.exits}


def _facts(path: Path) -> Mapping[str, Any] | None:
    """Read the facts at the end of a result file; None if the file is incomplete."""
    tail = len(MARK) + SIZE.size
    try:
        with path.open("rb") as file:
            end = file.seek(0, io.SEEK_END)
            file.seek(max(0, end - tail))
            last = file.read()
            # The worker was killed while it wrote, or has exited without a result.
            if len(last) != tail or not last.endswith(MARK):
                return None
            (size,) = SIZE.unpack_from(last)
            # A damaged file may have any number here: its seek must not leave the file, nor its
            # read fill the memory.
            file.seek(max(0, end - tail - min(size, _MOST_FACTS)))
            facts: Mapping[str, Any] = json.loads(file.read(size))
    except (OSError, ValueError):
        return None
    # The sizes must add up: a worker may have printed into the pipe.
    return facts if facts["start"] + facts["size"] + size + tail == end else None


def _raised(path: Path, facts: Mapping[str, Any]) -> BaseException | None:
    """Return the exception of the function, if it could be pickled and can be unpickled here."""
    with suppress(Exception), path.open("rb") as file:
        file.seek(facts["start"])
        error = pickle.loads(file.read(facts["size"]))  # noqa: S301 (as above)
        # Unpickling runs the user's code, which may return anything.
        if isinstance(error, BaseException):
            return error
    return None


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
