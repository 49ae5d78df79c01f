"""The pool of an elastic job: hosts as a script prints them, or a hostfile has them, asked for again and again."""

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
from hvlaunch.hosts.hostfile import parse_hostfile, read_hostfile
from hvlaunch.hosts.placement import in_quota
from hvlaunch.job import ElasticOptions, Host

__all__ = ["Discovery", "HostFile", "HostScript", "Source", "host_source", "is_open_to_all"]

_SHOWN = 2000
"""Characters of a failed script's stderr that are shown."""
_READ_SIZE = 1 << 16
_MOST = 1 << 18
"""Bytes that a script may print."""
_STOPPING_TIME = 5.0
"""Seconds that a look has to end when it is to; what is stuck in the kernel (a file system that hangs) is left there."""
_PAUSE = 0.05
"""Seconds between looks whether a script has ended, where the kernel can't tell (Linux before 5.3)."""


class Source(Protocol):
    """Where hosts come from."""

    def look(self) -> list[Host]:
        """The hosts there are now, in order; the list may be empty. Raises HvlaunchError."""
        ...

    def stop(self) -> None:
        """End the look() that another thread is in, and all later ones."""
        ...


class HostScript:
    """An executable, with arguments perhaps, that prints lines as in a hostfile.

    `limit` is in seconds. The script gets no input, and a process group of its own, all of which is
    killed when it has ended or takes too long: processes that it leaves would add up with every look. It
    does not outlive this process.
    """

    def __init__(self, command: str, limit: float) -> None:
        self.command = command
        self.limit = limit
        self._argv = [command] if Path(command).is_file() else _words(command)
        if shutil.which(self._argv[0]) is None:
            self._argv[0] = str(Path(self._argv[0]).absolute())  # in the current directory, as `discover.sh`
        self._lock = threading.Lock()
        self._running: Popen[bytes] | None = None
        self._sweeper = Sweeper()
        self._stopped = False

    def look(self) -> list[Host]:
        """Raises BadUsage where there is no such program, DiscoveryFailed where it fails, BadHost for a bad line."""
        script = self._start()
        try:
            out, err = _read(script, time.monotonic() + self.limit)
            if out is None:
                raise self._failed(f"took longer than {self.limit:g} s", err)
            if len(out) > _MOST:
                raise self._failed(f"prints too much, more than {_MOST >> 10} KiB", err)
        finally:
            self._end(script)
        if script.returncode != 0:
            raise self._failed(_ending(script.returncode), err)
        try:
            return parse_hostfile(out.decode(), self.command, is_own=False)
        except UnicodeDecodeError:
            raise self._failed("printed text that is not UTF-8", err) from None

    def stop(self) -> None:
        """Kill the script if it runs."""
        with self._lock:
            self._stopped = True
            if self._running is not None:
                _kill_group(self._running)
        self._sweeper.close()

    def _start(self) -> Popen[bytes]:
        if is_open_to_all(self._argv[0]):
            cause = f"{self.command}: every user of this machine can change it"
            raise BadUsage(cause, hint=f"chmod o-w {self._argv[0]}")
        with self._lock:
            if self._stopped:
                raise DiscoveryFailed(f"{self.command}: stopped")
            try:
                self._running = Popen(
                    self._argv, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True
                )
            except PermissionError:
                raise BadUsage(f"{self.command}: not executable", hint=f"chmod +x {self._argv[0]}") from None
            except OSError as error:
                is_there = Path(self._argv[0]).is_file()
                hint = (
                    "check its first line, #!PROGRAM: this machine must have that program"
                    if is_there
                    else None
                )
                raise BadUsage(f"{self.command}: {error.strerror}", hint=hint) from None
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
                pipe.close()  # a daemon of the script's may still hold the other end

    def _failed(self, cause: str, stderr: bytes) -> DiscoveryFailed:
        words = stderr.decode("utf-8", "replace").strip()
        quote = "".join(f"\n  | {line}" for line in words.splitlines())  # no line may look like one of ours
        return DiscoveryFailed(f"{self.command}: {cause}" + (f":{quote}" if quote else ""))


class HostFile:
    """A hostfile that is edited, or replaced, while the job runs."""

    def __init__(self, path: Path, *, is_named: bool) -> None:
        """`is_named` as in read_hostfile()."""
        self.path = path
        self._is_named = is_named

    def look(self) -> list[Host]:
        """Raises BadUsage, and BadHost for a bad line."""
        return read_hostfile(self.path, is_named=self._is_named)

    def stop(self) -> None:
        pass


class _InQuota:
    """Those of a source's hosts that the job may have."""

    def __init__(self, source: Source, options: ElasticOptions) -> None:
        self._source = source
        self._options = options

    def look(self) -> list[Host]:
        """Raises BadUsage where a host has fewer slots than it is to have, and what the source raises."""
        return in_quota(self._source.look(), self._options)

    def stop(self) -> None:
        self._source.stop()


def host_source(options: ElasticOptions) -> Source | None:
    """Where the hosts of an elastic job come from; None where they are what they are. Raises BadUsage."""
    if options.discovery_script is not None:
        return _InQuota(HostScript(options.discovery_script, options.discovery_timeout), options)
    if options.hostfile is not None:
        return _InQuota(HostFile(options.hostfile, is_named=options.is_named), options)
    return None


class Discovery:
    """Looks every `interval` seconds, in a thread of its own, from start() to stop().

    `found(hosts)` is called for the first answer and for each that differs from the one before it,
    `failed(error)` for each look that fails.
    """

    def __init__(
        self,
        source: Source,
        found: Callable[[Sequence[Host]], None],
        failed: Callable[[HvlaunchError], None],
        *,
        interval: float,
    ) -> None:
        self._source = source
        self._found = found
        self._failed = failed
        self._interval = interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvlaunch-discovery", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No call comes after this one, which ends a look that takes its time."""
        self._stopped.set()
        self._source.stop()
        self._thread.join(_STOPPING_TIME)

    def _run(self) -> None:
        known: list[Host] | None = None
        while not self._stopped.is_set():
            try:
                hosts = self._source.look()
            except Exception as error:  # noqa: BLE001 (the next look may do better, whatever it is)
                if not self._stopped.is_set():
                    self._failed(_as_failure(error))
            else:
                if hosts != known and not self._stopped.is_set():
                    known = hosts
                    self._found(hosts)
            self._stopped.wait(self._interval)


def is_open_to_all(path: str) -> bool:
    """Whether every user can change the program: then whoever does runs code as this user."""
    with suppress(OSError):
        status = Path(shutil.which(path) or path).stat()
        return stat.S_ISREG(status.st_mode) and bool(status.st_mode & stat.S_IWOTH)
    return False


def _as_failure(error: Exception) -> HvlaunchError:
    if isinstance(error, HvlaunchError):
        return error
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return DiscoveryFailed(f"the hosts could not be read: {what}")


def _read(script: Popen[bytes], deadline: float) -> tuple[bytes | None, bytes]:
    """What the script prints until it ends: stdout up to a little more than _MOST, and the end of stderr.

    stdout is None where the script goes on beyond `deadline`. Its children may hold both open for longer.
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
                if has_ended and not pipes:
                    break
                if time.monotonic() >= deadline:
                    return None, bytes(err)
        finally:
            if end is not None:
                os.close(end)
    return bytes(out), bytes(err)


def _end_of(pid: int) -> int | None:
    """A descriptor that can be read from when the process has ended; None where there is no such thing."""
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
