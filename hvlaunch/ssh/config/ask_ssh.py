"""Asking the ssh binary, which may run commands of its own (`Match exec`); none of them stays behind."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Sequence

__all__ = ["AskSSH", "ask_ssh"]


class AskSSH:
    """Runs `ssh` and gives its answer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._closed = False

    def __call__(self, arguments: Sequence[str], timeout: float) -> "subprocess.CompletedProcess[str]":
        """The answer to `ssh ARGUMENTS`, within `timeout` seconds.

        Raises FileNotFoundError where there is no ssh, and subprocess.TimeoutExpired, once closed too.
        """
        with self._start(arguments) as process:
            try:
                stdout, stderr = process.communicate(timeout=timeout)
            finally:
                with self._lock:
                    self._running.discard(process)
                    _kill(process)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def close(self) -> None:
        """End what still runs. May be repeated."""
        with self._lock:
            self._closed = True
            for process in self._running:
                _kill(process)

    def _start(self, arguments: Sequence[str]) -> "subprocess.Popen[str]":
        command = ["ssh", *arguments]
        with self._lock:
            if self._closed:
                raise subprocess.TimeoutExpired(command, 0.0)
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="surrogateescape",
                start_new_session=True,  # so that it can be ended with what it runs
            )
            self._running.add(process)
        return process


def ask_ssh(arguments: Sequence[str], timeout: float) -> "subprocess.CompletedProcess[str]":
    """One question; see AskSSH."""
    return AskSSH()(arguments, timeout)


def _kill(process: "subprocess.Popen[str]") -> None:
    """End the process and its children, unless it was reaped: its number may be another's by then."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
