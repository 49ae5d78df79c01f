"""What a training outlives of its driver: the terminal is closed, the driver is killed, and no worker is restarted, no step and no line lost or doubled.

    python benchmarks/outlived_drivers.py
    python benchmarks/outlived_drivers.py --kind "the driver is killed (--detach)" --times 3

As outlived.py, whose options it has.
"""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import outlived
from benchmarks.outlived import END, START, Kind, Training, Wrong
from hvlaunch.outside import ABOUT, KnownJob, has_driver, known_jobs
from tests.cluster.jobs import HVLAUNCH
from tests.testhosts.hosts import wait_until

IN_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Left(Training):
    """One whose driver has a terminal, or had one; `logs -f` prints its output."""

    terminal: int
    launcher: "subprocess.Popen[bytes]"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def job(self) -> KnownJob:
        [job] = known_jobs(self.state / "hvlaunch" / "jobs")
        return job

    @property
    def env(self) -> dict[str, str]:
        return {**self.hosts.driver.env, "XDG_STATE_HOME": str(self.state)}

    def _start(self, words: list[str]) -> "subprocess.Popen[str]":
        self.terminal, other = pty.openpty()
        self.launcher = self.hosts.driver.popen(
            [sys.executable, "-c", IN_TERMINAL, *self._line(words)],
            env=self.env,
            stdin=other,
            stdout=other,
            stderr=other,
        )
        os.close(other)
        threading.Thread(target=self._drain, args=[self.terminal], daemon=True).start()
        wait_until(lambda: known_jobs(self.state / "hvlaunch" / "jobs"), "it begins", START)
        wait_until(lambda: has_driver(self.job.directory), "it has a driver", START)
        return self._watched(["logs", "-f", self.job.id], env=self.env)

    def _line(self, words: list[str]) -> list[str]:
        return [*HVLAUNCH, *words]

    @staticmethod
    def _drain(terminal: int) -> None:
        try:
            while os.read(terminal, 1 << 16):
                pass
        except OSError:
            pass

    def end(self) -> None:
        super().end()
        code = self.hosts.driver.run([*HVLAUNCH, "wait", self.job.id], env=self.env, timeout=END).returncode
        if code:
            raise Wrong(f"code {code}")

    def clear(self) -> None:
        if has_driver(self.job.directory):
            self.hosts.driver.run([*HVLAUNCH, "stop", self.job.id], env=self.env, timeout=END)
        super().clear()


class Shell(Left):
    """Started from a shell, which stays."""

    def _line(self, words: list[str]) -> list[str]:
        return ["sh", "-c", '"$@"; sleep 1000', "sh", *HVLAUNCH, *words]


class Foreground(Training):
    """In the foreground; its output is read of it, and then of `attach`."""

    @property
    def job(self) -> KnownJob:
        [job] = known_jobs(self.folder / "state/hvlaunch/jobs")
        return job

    @property
    def env(self) -> dict[str, str]:
        return {**self.hosts.driver.env, "XDG_STATE_HOME": str(self.folder / "state")}

    def _start(self, words: list[str]) -> "subprocess.Popen[str]":
        return self._watched(words, env=self.env)

    def attach(self) -> None:
        self._reader.join(END)
        self.process = self._watched(["attach", self.job.id], env=self.env)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()


def close_terminal(training: Any) -> None:
    os.close(training.terminal)


def kill_driver(training: Any) -> None:
    about = json.loads((training.job.directory / ABOUT).read_text())
    os.kill(about["pid"], signal.SIGKILL)


def kill_and_attach(training: Any) -> None:
    kill_driver(training)
    training.attach()


KINDS = {
    "the terminal is closed (--detach)": Kind(close_terminal, ("--detach",), most=1, training=Shell),
    "the terminal is closed (--detach-on-hangup)": Kind(
        close_terminal, ("--detach-on-hangup",), most=1, training=Left
    ),
    "the driver is killed (--detach)": Kind(kill_driver, ("--detach",), most=3, training=Shell),
    "the driver is killed, and attach follows": Kind(kill_and_attach, most=1, training=Foreground),
}

if __name__ == "__main__":
    outlived.KINDS.clear()
    outlived.KINDS.update(KINDS)
    sys.exit(outlived.main())
