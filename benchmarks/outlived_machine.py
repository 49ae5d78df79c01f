"""What a training outlives of its driver's machine: it is torn down, and made again at the same address; then `hvlaunch attach` takes the job over.

    python benchmarks/outlived_machine.py

As outlived.py, whose options it has. The driver has a host of its own. Torn down: its link is deleted and all its processes get SIGKILL.
Made again: another boot id, a monotonic clock that begins anew (a time namespace), an empty /tmp; its files are as they were.
"""

import contextlib
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import outlived
from benchmarks.outlived import END, PATIENCE, START, Kind, Shown, Training, Wrong
from hvlaunch.driver.job_record import JOURNAL, read_past
from hvlaunch.outside import KnownJob, has_driver, known_jobs
from tests.cluster.machines import DriverMachine
from tests.testhosts.hosts import wait_until

MACHINE = outlived.GATE
LEASE = 60
DOWN = 15.0
"""Seconds at most without the machine."""


class Away(Training):
    """A detached job of a machine that restarts. What its output store has is read anew from the start after each restart."""

    machine: DriverMachine
    attached: "subprocess.Popen[bytes] | None" = None
    kills = 0
    known = -outlived.LATER
    """Steps that had been shown before the machine fell."""

    @property
    def job(self) -> KnownJob:
        [job] = known_jobs(self.folder / "state/hvlaunch/jobs")
        return job

    def _start(self, words: list[str]) -> "subprocess.Popen[str]":
        self.machine = DriverMachine(self.hosts, self.hosts[MACHINE], self.folder / "state")
        done = self.machine.do(*words, timeout=START)
        if done.returncode:
            raise Wrong(f"code {done.returncode}: {done.stderr}")
        return self._logs()

    def _logs(self) -> "subprocess.Popen[str]":
        errors = self.errors.open("ab")
        return self.machine.popen("logs", "-f", self.job.id, stdout=subprocess.PIPE, stderr=errors, text=True)

    def fall(self) -> None:
        self.machine.fall()
        self._reader.join(END)
        self.process.wait(END)
        self.known = max(self.shown.steps)

    def rise(self) -> None:
        """The user attaches; all that is kept of the output is read anew."""
        self.machine.rise()
        errors = self.errors.open("ab")
        self.attached = self.machine.popen("attach", self.job.id, stdout=subprocess.DEVNULL, stderr=errors)
        wait_until(lambda: has_driver(self.job.directory), "it is taken over", PATIENCE)
        self.shown = Shown()
        self.process = self._logs()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def await_steps(self, count: int, patience: float = PATIENCE) -> None:
        """Nothing was forgotten: what is read anew comes to where it was before, and goes on."""
        super().await_steps(max(count, self.known + outlived.LATER), patience)
        if self.attached is not None:
            self.machine.detach()
            self.attached.wait(END)
            self.attached = None

    def kill_driver(self) -> None:
        [driver] = self.machine.drivers()
        self.machine.kill(driver)
        self.kills += 1
        self.known = max(self.shown.steps)

    def end(self) -> None:
        boots, there_were = self._boots(), self.machine.boots
        if len(set(boots)) != there_were or len(boots) != there_were + self.kills:
            raise Wrong(f"drivers of these boots: {boots}")
        super().end()
        if code := self.machine.do("wait", self.job.id, timeout=END).returncode:
            raise Wrong(f"code {code}")

    def _boots(self) -> list[str]:
        """In which the job's drivers were, one after the other."""
        return [driver.boot for driver in read_past(self.job.directory / JOURNAL).drivers]

    def clear(self) -> None:
        if not self.machine.host.pid:
            self.machine.rise()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.machine.do("stop", self.job.id, timeout=END)
        super().clear()


def restart_machine(training: Any) -> None:
    training.fall()
    time.sleep(random.uniform(0.0, DOWN))
    training.rise()


def kill_driver(training: Any) -> None:
    """The one that has come after the machine's restart, and whom nobody looks at: a minder has come with it."""
    restart_machine(training)
    training.await_steps(0)
    training.kill_driver()


OPTIONS = ("--detach", "--lease", str(LEASE))
KINDS = {
    "the driver's machine is restarted, and attach follows": Kind(
        restart_machine, OPTIONS, most=2, training=Away
    ),
    "the same of an elastic job": Kind(restart_machine, (*OPTIONS, "--min-np", "8"), most=2, training=Away),
    "the same, and then its driver is killed": Kind(kill_driver, OPTIONS, most=2, training=Away),
}

if __name__ == "__main__":
    outlived.KINDS.clear()
    outlived.KINDS.update(KINDS)
    sys.exit(outlived.main())
