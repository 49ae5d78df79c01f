"""A user with jobs of their own, for tests of what is done to jobs."""

import os
import subprocess
import sys
from pathlib import Path

from hvlaunch.cli.jobs import run_job_command
from hvlaunch.outside import known_jobs
from tests.testhosts.places import wait_until

__all__ = ["DEADLINE", "Site", "wait_until"]

DEADLINE = 100.0
_WORKER = """\
import signal, sys
signal.signal(signal.SIGUSR1, lambda *_: (print("got USR1", flush=True)))
print("ready", flush=True)
while True: signal.pause()
"""


class Site:
    """A user's jobs, in a state directory of their own."""

    def __init__(self, state: Path) -> None:
        self.environ = {**os.environ, "XDG_STATE_HOME": str(state)}
        self.root = state / "hvlaunch/jobs"
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A job of two workers, which both run."""
        job = subprocess.Popen(
            [sys.executable, "-m", "hvlaunch", "-np", "2", *arguments, sys.executable, "-c", _WORKER],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(job)
        assert job.stdout is not None
        assert [job.stdout.readline().partition(">: ")[2] for _ in range(2)] == ["ready\n"] * 2
        return job

    def do(self, *words: str) -> int:
        return run_job_command(words, self.environ)

    def close(self) -> None:
        for job in self.started:
            job.terminate()
            job.communicate(timeout=DEADLINE)

    def kill_jobs(self) -> None:
        """Kill the jobs that still have a driver, of whichever process."""
        for job in known_jobs(self.root):
            if job.has_driver:
                self.do("stop", "--kill", job.id)
