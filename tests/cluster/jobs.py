"""Runs hvlaunch in the driver place, as a user would, and watches what it prints."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

from hvlaunch.engine import replay
from hvlaunch.watch.journal import entries
from tests.testhosts.hosts import Host, Process, TestHosts, wait_until

__all__ = [
    "HVLAUNCH",
    "LIGHT",
    "PROGRAMS",
    "Job",
    "agent_of",
    "agents",
    "guardians",
    "pids",
    "without_progress",
]

HVLAUNCH = [sys.executable, "-m", "hvlaunch"]
PROGRAMS = Path(__file__).parent / "programs"
LIGHT = Path(__file__).parents[1] / "light"
"""A directory for PYTHONPATH: torch loads faster."""


def without_progress(stderr: str) -> list[str]:
    """The lines, without those that tell on a busy machine what hvlaunch waits for, or how hosts failed in earlier tests."""
    others = ("hvlaunch: connect", "hvlaunch: failed in earlier jobs")
    return [line for line in stderr.splitlines() if not line.startswith(others)]


class Job:
    """A running hvlaunch. `stdout` and `stderr` grow as it prints. When it has ended, its journal is replayed."""

    def __init__(
        self, hosts: TestHosts, arguments: Sequence[object], env: Mapping[str, str] | None = None
    ) -> None:
        self.stdout = self.stderr = ""
        self._journals = TemporaryDirectory(prefix="hvlaunch-journal-", dir="/var/tmp")
        self.journal = Path(self._journals.name) / "journal"
        self.process = hosts.driver.popen(
            [*HVLAUNCH, *map(str, arguments)],
            env={**hosts.driver.env, "HVLAUNCH_JOURNAL": str(self.journal), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._readers = [
            Thread(target=self._read, args=(name,), daemon=True) for name in ("stdout", "stderr")
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str) -> None:
        pipe = getattr(self.process, name)
        while data := os.read(pipe.fileno(), 1 << 16):
            setattr(self, name, getattr(self, name) + data.decode(errors="replace"))

    def saw(self, text: str, times: int = 1, timeout: float = 60.0) -> "Job":
        """Wait until a worker or hvlaunch has printed the text so many times."""

        def enough() -> bool:
            if self.process.poll() is not None and (self.stdout + self.stderr).count(text) < times:
                raise AssertionError(
                    f"ended with {self.process.returncode} before {text!r}: {self.stdout}{self.stderr}"
                )
            return (self.stdout + self.stderr).count(text) >= times

        wait_until(enough, f"{text!r} is printed {times} times", timeout)
        return self

    def send(self, number: int) -> "Job":
        os.kill(self.process.pid, number)
        return self

    def code(self, timeout: float = 60.0) -> int:
        """Wait for the end: its exit code, negative for a signal."""
        code = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
        self.replay()
        return code

    def replay(self) -> None:
        """Its journal leads another engine to the same actions; there is nothing in it of what never became a job."""
        if self.journal.exists() and self.journal.stat().st_size:
            replay(entries(self.journal))

    def interrupt(self) -> "Job":
        return self.send(signal.SIGINT)


def agents(processes: Sequence[Process]) -> list[Process]:
    return [process for process in processes if process.comm == "hvl-agent"]


def agent_of(host: Host) -> Process:
    """The only agent of a host: an errand's process has the agent's name too until it has its own."""

    def only() -> Process | None:
        listed = agents(host.user_processes())
        return listed[0] if len(listed) == 1 else None

    return wait_until(only, f"{host.name} has one agent")


def guardians(processes: Sequence[Process]) -> list[Process]:
    return [process for process in processes if process.comm == "hvl-guardian"]


def pids(hosts: TestHosts) -> dict[str, set[int]]:
    """What runs on each host, in its own PID space, but for its init and sshd."""
    return {host.name: {process.pid for process in host.user_processes()} for host in hosts}
