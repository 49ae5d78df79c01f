"""Cgroups of this machine, for processes of tests that must not fill it, or that are to be frozen."""

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.unit.agent.harness import until

__all__ = ["BOMB", "LIMIT", "Group"]

CGROUPS = Path("/sys/fs/cgroup")
LIMIT = 100
BOMB = """if True:
    import os, sys, time
    last = time.monotonic() + 30
    os.write(1, b'going')
    while os.path.exists(sys.argv[1]) and time.monotonic() < last:
        try:
            if os.fork() == 0:
                os.setsid()
        except OSError:
            os.nice(19)
"""
"""Forks without end, each in a session of its own, as long as a file is there, and 30 s at most."""


class Group:
    """A cgroup of version 1 or 2, for processes that are started by `shell`."""

    def __init__(self, controller: str) -> None:
        root = CGROUPS / controller
        self.path = (root if root.is_dir() else CGROUPS) / f"hvlaunch-test-{os.getpid()}"
        self.shell = ["/bin/sh", "-c", f'echo $$ >{self.path}/cgroup.procs && exec /bin/sh -c "$0"']
        try:
            self.path.mkdir()
        except OSError as error:
            pytest.skip(f"no cgroup can be made here: {error}")

    def set(self, name: str, value: object) -> None:
        if not (self.path / name).exists():
            pytest.skip(f"this machine's cgroups have no {name}")
        (self.path / name).write_text(str(value))

    def freeze(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self.set("cgroup.procs", pid)
        self.set("freezer.state", "FROZEN")

    def pids(self) -> list[int]:
        """Those that live; who has ended may not be reaped yet, where nobody is its parent but a machine's init."""
        found = []
        for pid in map(int, (self.path / "cgroup.procs").read_text().split()):
            with suppress(OSError):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                found += [pid] if state not in "ZX" else []
        return found

    def close(self) -> None:
        until(self._kill, "the group's processes end")
        until(self._remove, "the group can be removed")

    def _kill(self) -> bool:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        return not self.pids()

    def _remove(self) -> bool:
        with suppress(OSError):
            self.path.rmdir()
        return not self.path.exists()
