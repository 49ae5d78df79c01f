"""A machine that hvlaunch is started on, and which restarts: with another boot, another monotonic clock, and its files as they were."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.cluster.jobs import HVLAUNCH
from tests.testhosts.hosts import Host, Process, TestHosts

__all__ = ["DriverMachine"]

OLD, YOUNG = 1_000_000, 3
"""Seconds that it has been up for at first, which is more than any machine has that runs this; and after a restart."""


class DriverMachine:
    """One of the hosts. What runs there has clocks of its own (time namespaces, which need Linux 5.6)."""

    def __init__(self, hosts: TestHosts, host: Host, state: Path) -> None:
        """`state`: where jobs have their directories; it must not be below /tmp, of which each boot has its own."""
        self.host = host
        self.boots = 1
        self._ahead = OLD
        self.env = {**host.env, "XDG_STATE_HOME": str(state)}
        keys = host.home / "root" / ".ssh"
        if not keys.exists():
            shutil.copytree(hosts.driver.home / ".ssh", keys)

    def popen(self, *words: object, **options: Any) -> "subprocess.Popen[Any]":
        """Start hvlaunch there."""
        return self.host.popen(self._line(words), **self._common(), **options)

    def do(self, *words: object, timeout: float) -> "subprocess.CompletedProcess[str]":
        """Run hvlaunch there."""
        return self.host.run(self._line(words), timeout=timeout, **self._common())

    def drivers(self) -> list[Process]:
        """Those that have taken a job over."""
        return [
            one for one in self.host.user_processes() if any("run_successor" in word for word in one.argv)
        ]

    def detach(self) -> None:
        """Ctrl-C for the one that looks on."""
        here = self.host.user_processes()
        [looking] = [one for one in here if "attach" in one.argv and one.argv[0] == sys.executable]
        self.host.run(["kill", "-INT", str(looking.pid)], check=True)

    def kill(self, process: Process) -> None:
        self.host.run(["kill", "-9", str(process.pid)], check=True)

    def fall(self) -> None:
        """It has no power any more: no process ends in order, and no packet tells anyone."""
        self.host.kill()

    def rise(self) -> None:
        """It has booted, at the same address."""
        self.host.restore()
        self.boots += 1
        self._ahead = YOUNG - int(time.clock_gettime(time.CLOCK_BOOTTIME))

    def _line(self, words: tuple[object, ...]) -> list[str]:
        clocks = [f"--{name}={self._ahead}" for name in ("monotonic", "boottime")]
        return ["unshare", "--time", *clocks, "--fork", "--", *HVLAUNCH, *map(str, words)]

    def _common(self) -> dict[str, Any]:
        return {"env": self.env, "cwd": os.fspath(Path(__file__).parents[2]), "stdin": subprocess.DEVNULL}
