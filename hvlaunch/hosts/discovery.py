"""Hosts of an elastic job, from a script or a hostfile that is read at intervals."""

import os
import shlex
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from subprocess import DEVNULL, PIPE, Popen
from typing import Protocol

from hvlaunch.children import Sweeper
from hvlaunch.errors import BadUsage, DiscoveryFailed, HvlaunchError
from hvlaunch.hosts.parse import parse_hostfile, read_hostfile
from hvlaunch.hosts.placement import in_quota
from hvlaunch.job import ElasticOptions, Host
from hvlaunch.owners import path_hint, reason

__all__ = ["Discovery", "HostFile", "HostScript", "HostSource", "host_source", "is_open_to_all"]

_SHOWN = 2000
"""Characters of a failed script's stderr in the message."""
_READ_SIZE = 1 << 16
_MOST = 1 << 18
"""Bytes that a script may print."""
_STOPPING_TIME = 5.0
"""Seconds for a look to end. A look that hangs in the kernel (a dead file system) is abandoned."""
_PAUSE = 0.05
"""Poll interval for the script's end before Linux 5.3, which has no pidfd."""


class HostSource(Protocol):
    """A source of hosts."""

    def read_hosts(self) -> list[Host]:
        """Return the current hosts in order; the list may be empty. Raises HvlaunchError."""
        ...

    def stop(self) -> None:
        """End another thread's read_hosts(), and refuse later ones."""
        ...


class HostScript:
    """An executable, with optional arguments, that prints lines of a hostfile.

    `limit` is in seconds. The script runs without input in its own process group, which is killed after each run or at the
    limit: leftover processes would add up. It does not outlive this process.
    """

    def __init__(self, command: str, limit: float) -> None:
        self.command = command
        self.limit = limit
        self._argv = [command] if Path(command).is_file() else _words(command)
        # `discover.sh` in the current directory works without `./`.
        if shutil.which(self._argv[0]) is None:
            self._argv[0] = str(Path(self._argv[0]).absolute())
        self._lock = threading.Lock()
        self._running: Popen[bytes] | None = None
        self._sweeper = Sweeper()
        self._stopped = False

    def read_hosts(self) -> list[Host]:
        """Run the script. Raises BadUsage without such a program, DiscoveryFailed if it fails, BadHost for a bad line."""
        script = self._start()
        try:
            out, err = _read(script, time.monotonic() + self.limit)
            if out is None:
                raise self._failed(f"took longer than {self.limit:g} s", err)
            if len(out) > _MOST:
                raise self._failed(f"printed more than {_MOST >> 10} KiB", err)
        finally:
            self._end(script)
        if script.returncode != 0:
            raise self._failed(_ending(script.returncode), err)
        try:
            return parse_hostfile(out.decode(), self.command, is_own=False)
        except UnicodeDecodeError:
            raise self._failed("printed text that is not UTF-8", err) from None

    def stop(self) -> None:
        """Kill the script if it is running."""
        with self._lock:
            self._stopped = True
            if self._running is not None:
                _kill_group(self._running)
        self._sweeper.close()

    def _start(self) -> Popen[bytes]:
        # Checked before each run: permissions may change while the job runs.
        if is_open_to_all(self._argv[0]):
            cause = f"{self.command}: every user of this machine can change it"
            raise BadUsage(cause, hint=f"chmod o-w {shlex.quote(self._argv[0])}")
        with self._lock:
            if self._stopped:
                raise DiscoveryFailed(f"{self.command}: stopped")
            try:
                self._running = Popen(
                    self._argv, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True
                )
            except PermissionError:
                raise BadUsage(
                    f"{self.command}: not executable", hint=f"chmod +x {shlex.quote(self._argv[0])}"
                ) from None
            except OSError as error:
                is_there = Path(self._argv[0]).is_file()
                hint = (
                    "check its first line, #!PROGRAM: this machine must have that program"
                    if is_there
                    else path_hint(self.command)
                )
                raise BadUsage(f"{self.command}: {reason(error)}", hint=hint) from None
            self._sweeper.add(self._running.pid)
            return self._running

    def _end(self, script: Popen[bytes]) -> None:
        with self._lock:
            self._running = None
        _kill_group(script)
        self._sweeper.forget(script.pid)
        script.wait()
        for pipe in (script.stdout, script.stderr):
            if pipe is not None:
                # Not read to the end: a daemon of the script may keep the other end open.
                pipe.close()

    def _failed(self, cause: str, stderr: bytes) -> DiscoveryFailed:
        words = stderr.decode("utf-8", "replace").strip()
        # The prefix keeps a script's line from looking like a message of hvlaunch.
        quote = "".join(f"\n  | {line}" for line in words.splitlines())
        return DiscoveryFailed(f"{self.command}: {cause}" + (f":{quote}" if quote else ""))


class HostFile:
    """A hostfile that may be edited or replaced while the job runs."""

    def __init__(self, path: Path, *, is_named: bool) -> None:
        """See read_hostfile() for `is_named`."""
        self.path = path
        self._is_named = is_named

    def read_hosts(self) -> list[Host]:
        """Read the file. Raises BadUsage, and BadHost for a bad line."""
        return read_hostfile(self.path, is_named=self._is_named)

    def stop(self) -> None:
        pass


class _InQuota:
    """The hosts of another source that the job may use."""

    def __init__(self, source: HostSource, options: ElasticOptions) -> None:
        self._source = source
        self._options = options

    def read_hosts(self) -> list[Host]:
        """Read the source. Raises its errors, and BadUsage if a host has too few slots."""
        return in_quota(self._source.read_hosts(), self._options)

    def stop(self) -> None:
        self._source.stop()


def host_source(options: ElasticOptions) -> HostSource | None:
    """Return the source of an elastic job's hosts; None for a fixed list. Raises BadUsage."""
    if options.discovery_script is not None:
        return _InQuota(HostScript(options.discovery_script, options.discovery_timeout), options)
    if options.hostfile is not None:
        return _InQuota(HostFile(options.hostfile, is_named=options.is_named), options)
    return None


class Discovery:
    """Reads a source every `interval` seconds in its own thread, from start() to stop().

    `on_hosts(hosts)` is called for the first answer and each changed one, `on_failure(error)` for each failure.
    """

    def __init__(
        self,
        source: HostSource,
        on_hosts: Callable[[Sequence[Host]], None],
        on_failure: Callable[[HvlaunchError], None],
        *,
        interval: float,
    ) -> None:
        self._source = source
        self._on_hosts = on_hosts
        self._on_failure = on_failure
        self._interval = interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvlaunch-discovery", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and a slow look. No callback is called afterwards."""
        self._stopped.set()
        self._source.stop()
        # Bounded: the thread may hang in the kernel.
        self._thread.join(_STOPPING_TIME)

    def _run(self) -> None:
        previous: list[Host] | None = None
        while not self._stopped.is_set():
            try:
                hosts = self._source.read_hosts()
            # A failed look does not end the job: its hosts are still there.
            except Exception as error:  # noqa: BLE001 (the next look may do better, whatever it is)
                if not self._stopped.is_set():
                    self._on_failure(_as_failure(error))
            else:
                if hosts != previous and not self._stopped.is_set():
                    previous = hosts
                    self._on_hosts(hosts)
            self._stopped.wait(self._interval)


def is_open_to_all(path: str) -> bool:
    """Return whether every user can change the program, and thus run code as this user."""
    with suppress(OSError):
        status = Path(shutil.which(path) or path).stat()
        return stat.S_ISREG(status.st_mode) and bool(status.st_mode & stat.S_IWOTH)
    return False


def _as_failure(error: Exception) -> HvlaunchError:
    if isinstance(error, HvlaunchError):
        return error
    description = " ".join(f"{type(error).__name__}: {error}".split())
    return DiscoveryFailed(f"the hosts could not be read: {description}")


def _read(script: Popen[bytes], deadline: float) -> tuple[bytes | None, bytes]:
    """Read a script's output until it ends: stdout up to a little over _MOST, and the end of stderr.

    stdout is None if the script exceeds `deadline`.
    """
    out, err = bytearray(), bytearray()
    end = _end_of(script.pid)
    with DefaultSelector() as selector:
        for pipe, data in ((script.stdout, out), (script.stderr, err)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, EVENT_READ, data)
        if end is not None:
            selector.register(end, EVENT_READ)
        try:
            while len(out) <= _MOST:
                has_ended = script.poll() is not None
                timeout = 0.0 if has_ended else max(0.0, deadline - time.monotonic())
                ready = selector.select(timeout if end is not None else min(timeout, _PAUSE))
                pipes = [key for key, _ in ready if key.fileobj != end]
                for key in pipes:
                    piece = os.read(key.fd, _READ_SIZE)
                    key.data.extend(piece)
                    if not piece:
                        selector.unregister(key.fileobj)
                del err[:-_SHOWN]
                # The script's end counts, not the end of its pipes: children may keep them open.
                if has_ended and not pipes:
                    break
                if time.monotonic() >= deadline:
                    return None, bytes(err)
        finally:
            if end is not None:
                os.close(end)
    return bytes(out), bytes(err)


def _end_of(pid: int) -> int | None:
    """Return a descriptor that becomes readable at the process's end; None without pidfd."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _kill_group(script: Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(script.pid, signal.SIGKILL)


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError:
        words = []
    if not words:
        raise BadUsage(f"--host-discovery-script {command!r} does not name a program")
    return words


def _ending(status: int) -> str:
    return f"ended with status {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"
