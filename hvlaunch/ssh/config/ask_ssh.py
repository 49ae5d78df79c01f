"""Questions to the ssh binary about its configuration (`ssh -G`)."""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["AskSSH", "Questions", "ask_ssh"]


class AskSSH:
    """Runs `ssh` and returns its answer. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._closed = False

    def __call__(self, arguments: Sequence[str], timeout: float) -> "subprocess.CompletedProcess[str]":
        """Return the answer to `ssh ARGUMENTS`, within `timeout` seconds.

        Raises FileNotFoundError without an ssh binary, and subprocess.TimeoutExpired, also after close().
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
        """Kill running questions. May be repeated."""
        with self._lock:
            self._closed = True
            for process in self._running:
                _kill(process)

    def _start(self, arguments: Sequence[str]) -> "subprocess.Popen[str]":
        command = ["ssh", *arguments]
        with self._lock:
            # After close() no process may start: nothing would end it.
            if self._closed:
                raise subprocess.TimeoutExpired(command, 0.0)
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="surrogateescape",
                # A process group of its own, to kill it with the commands of `Match exec`.
                start_new_session=True,
            )
            self._running.add(process)
        return process


def ask_ssh(arguments: Sequence[str], timeout: float) -> "subprocess.CompletedProcess[str]":
    """Ask one question; see AskSSH."""
    return AskSSH()(arguments, timeout)


def _kill(process: "subprocess.Popen[str]") -> None:
    """Kill the process and its children, unless it was reaped: its number may be reused by then."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


Answer = subprocess.CompletedProcess[str]

_READ = re.compile(r"^debug1: Reading configuration data (.+)$", re.MULTILINE)
_KEYWORD = re.compile(r"\s*(\w+)\s*(?:=|\s)\s*(.*?)\s*")


class Questions:
    """Asks ssh for settings, with few processes; called like ask_ssh. Thread-safe.

    An `ssh -G` takes 4 ms of CPU, which adds up with many hosts. With -v it names the files that it reads. If
    these files have no `Match`, no `HostName`, no token and only `Host *`, and the host keeps its given name,
    the answer for any other name is the same.
    """

    def __init__(self, ask: Callable[[Sequence[str], float], Answer]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._answers: dict[tuple[str, ...], _Asked] = {}

    def is_same_for_all(self) -> bool:
        """True if the answers so far serve all hosts, and further hosts cost no process."""
        with self._lock:
            return all(asked.template is not None for asked in self._answers.values())

    def __call__(self, arguments: Sequence[str], timeout: float) -> Answer:
        """Return the answer to `ssh ARGUMENTS`; the last argument is the host's name. Raises the errors of `ask`."""
        *words, name = arguments
        deadline = time.monotonic() + timeout
        with self._lock:
            # The lock of one set of arguments, so that others can ask meanwhile.
            asked = self._answers.setdefault(tuple(words), _Asked())
        with asked.lock:
            if not asked.done:
                asked.done = True
                answer = self._ask(["-v", *words, name], self._left(arguments, deadline))
                asked.template = _template(answer, name)
                if answer.returncode == 0:
                    return answer
        # A token in the name would be expanded by ssh, and not by the template.
        if asked.template is not None and "%" not in name:
            return subprocess.CompletedProcess(list(arguments), 0, asked.template.replace("\0", name), "")
        return self._ask(arguments, self._left(arguments, deadline))

    @staticmethod
    def _left(arguments: Sequence[str], deadline: float) -> float:
        """Return the remaining seconds, after waiting for an earlier question. Raises TimeoutExpired at 0."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise subprocess.TimeoutExpired(list(arguments), 0.0)
        return left


class _Asked:
    """The state of one set of arguments: the answer as a template with NUL for the name, if it fits all hosts."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.done = False
        self.template: str | None = None


def _template(answer: Answer, name: str) -> str | None:
    if answer.returncode != 0 or not answer.stderr.startswith("OpenSSH_"):
        return None
    lines: list[str] = []
    for line in answer.stdout.splitlines():
        key, _, value = line.partition(" ")
        # Canonical names depend on DNS, so answers may differ by host.
        if key == "canonicalizehostname" and value not in ("false", "no"):
            return None
        if key == "hostname" and value.lower() != name.lower():
            return None
        lines.append(f"{key} \0" if key in ("host", "hostname") else line)
    alike = all(_is_same_for_all(Path(file)) for file in _READ.findall(answer.stderr))
    return "\n".join(lines) if alike else None


def _is_same_for_all(file: Path) -> bool:
    try:
        lines = file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return False
    return all(_means_all(line) for line in lines if line.strip() and not line.lstrip().startswith("#"))


def _means_all(line: str) -> bool:
    match = _KEYWORD.fullmatch(line)
    if match is None or "%" in line:
        return False
    keyword, words = match[1].lower(), match[2]
    return words == "*" if keyword == "host" else keyword not in ("match", "hostname")
