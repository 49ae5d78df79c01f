"""The launcher as a child process: in a session of its own, its output printed, ended with the job."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from hvlaunch.agent.quick import has_own_proc
from hvlaunch.mpi import NoLauncher
from hvlaunch.mpi.builders import LauncherCommand

if TYPE_CHECKING:
    import psutil

__all__ = ["LauncherProcess"]

_LAST_WORDS = 2.0  # seconds to read its last output
_KILL_AFTER = 5.0
_SWEEP_AFTER = 1.0  # seconds in which its ssh processes may notice its end by themselves
_DIRECTORIES = ("ompi.*.{uid}/pid.{pid}", "ompi.{pid}")
"""Directories of Open MPI's mpirun in the directory of temporary files, before version 5 and since; a killed one leaves them."""


class LauncherProcess:
    """Runs the launcher. Calls `say` with each line, and then `ended` with the exit status, in threads."""

    def __init__(
        self,
        command: LauncherCommand,
        env: dict[str, str],
        *,
        say: Callable[[str], None],
        ended: Callable[[int], None],
    ) -> None:
        """Raises NoLauncher."""
        program = command.argv[0]
        self._name = os.path.basename(program)  # noqa: PTH119 (a name, no path)
        self._say = say
        self._ended = ended
        try:
            # A session of its own: Ctrl-C in the terminal is for the driver, and ssh can't ask for passwords there.
            self._process = subprocess.Popen(
                command.argv,
                executable=shutil.which(program) or program,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            cause = f"{program} can't be started: {(error.strerror or str(error)).lower()}"
            raise NoLauncher(cause, program=program, hint="--mpirun PATH") from None
        pipes = (self._process.stdout, self._process.stderr)
        self._readers = [
            threading.Thread(target=self._read, args=(pipe,), name=self._name, daemon=True) for pipe in pipes
        ]
        self._waiter = threading.Thread(target=self._wait, name=f"end of {self._name}", daemon=True)
        for thread in (*self._readers, self._waiter):
            thread.start()

    def _read(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                self._say(f"{self._name}: {text}")

    def _wait(self) -> None:
        status = self._process.wait()
        for reader in self._readers:
            # A process that the launcher left behind may hold the pipe open.
            reader.join(_LAST_WORDS)
        self._ended(_shell_status(status))

    def wait(self, timeout: float) -> int | None:
        """Return its exit status, 128 + n for a signal n; None after `timeout` seconds."""
        try:
            return _shell_status(self._process.wait(timeout))
        except subprocess.TimeoutExpired:
            return None

    def close(self, patience: float) -> None:
        """Wait for its end, at most `patience` seconds; then send SIGTERM, by which it ends its processes, then SIGKILL.

        Its processes and directories on this machine are removed: a launcher that waits for an unreachable host is killed.
        """
        family: list[psutil.Process] = []
        for number, seconds in ((signal.SIGTERM, _KILL_AFTER), (signal.SIGKILL, _KILL_AFTER)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
                break
            family += _family(self._process.pid)
            self._signal(number)
            patience = seconds
        if family:
            _end(family)
        self._waiter.join(_LAST_WORDS + 1)
        if self._process.returncode == -signal.SIGKILL:
            _remove_directory(self._process.pid)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)


def _shell_status(status: int) -> int:
    return status if status >= 0 else 128 - status


def _family(launcher: int) -> "list[psutil.Process]":
    """Return its ssh processes and their descendants, but not the job's own processes, which end by their guardians."""
    # The launcher puts its ssh into sessions of their own, so a signal to its process group does not reach them.
    import psutil  # noqa: PLC0415 (few launchers have to be stopped)

    if not has_own_proc():
        return []
    try:
        others = [
            child for child in psutil.Process(launcher).children() if not child.name().startswith("hvl-")
        ]
        return [process for child in others for process in (child, *child.children(recursive=True))]
    except psutil.Error:
        return []


def _end(family: "list[psutil.Process]") -> None:
    """Give the processes time to notice the launcher's end; kill the remaining ones."""
    import psutil  # noqa: PLC0415 (as above)

    _, left = psutil.wait_procs(family, _SWEEP_AFTER)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, _SWEEP_AFTER)


def _remove_directory(launcher: int) -> None:
    for form in _DIRECTORIES:
        for path in Path(tempfile.gettempdir()).glob(form.format(uid=os.geteuid(), pid=launcher)):
            if path.lstat().st_uid == os.geteuid():
                # Only this user's own: in /tmp another user may have made a directory with this name.
                shutil.rmtree(path, ignore_errors=True)
                if "/" in form:
                    with contextlib.suppress(OSError):  # the directory has another launcher's
                        path.parent.rmdir()
