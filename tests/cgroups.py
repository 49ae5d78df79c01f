"""Cgroups of this machine, for processes of tests that must not fill it, or that are to be frozen."""

import os
import signal
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.testhosts.places import wait_until

__all__ = ["BOMB", "LIMIT", "Group", "outside_pid"]

CGROUPS = Path("/sys/fs/cgroup")
LIMIT = 60
BOMB = """if True:
    import os, signal, sys, time
    last = time.monotonic() + 40
    refused = False
    while time.monotonic() < last:
        try:
            if os.fork() == 0:
                signal.alarm(int(last + 2 - time.monotonic()))
                os.setsid()
                refused = False
        except OSError:
            if not refused:
                os.write(1, b'refused\\n')
                os.nice(19)
            refused = True
            time.sleep(float(sys.argv[1]))
"""
"""For a `limited` group alone: forks without end, each in a session of its own, for 40 s at most; says when it may no more. Its argument is how long
each of its processes then waits before it tries again: though that is 20 ms, a place that gets free is filled at once, by one of so many.
"""
_SETTINGS = {"freezer.state": "THAWED", "pids.max": "0"}
"""Of a group whose processes are to be killed: version 1 keeps what is frozen, and a bomb forks faster than one kills."""
_GUARD = """\
read -r _
for each in freezer.state:THAWED pids.max:0; do [ ! -e $0/${each%:*} ] || echo ${each#*:} >$0/${each%:*}; done
for _ in $(seq 100); do
    [ -d $0 ] || exit
    kill -KILL $(cat $0/cgroup.procs)
    rmdir $0 && exit
    sleep 0.1
done
"""
"""Ends the group's processes when its stdin ends: none outlives a test, though that is killed."""


class Group:
    """A cgroup of version 1 or 2, for processes that are started by `shell`, until its `with` block ends."""

    def __init__(self, controller: str) -> None:
        root = CGROUPS / controller
        self.path = (root if root.is_dir() else CGROUPS) / f"hvlaunch-test-{os.getpid()}"
        self.shell = ["/bin/sh", "-c", f'echo $$ >{self.path}/cgroup.procs && exec /bin/sh -c "$0"']
        try:
            self.path.mkdir()
        except OSError as error:
            pytest.skip(f"no cgroup can be made here: {error}")
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> "Group":  # noqa: PYI034 - typing.Self is Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        """Kill what is in it, and remove it."""
        for name, value in _SETTINGS.items():
            if (self.path / name).exists():
                (self.path / name).write_text(value)
        wait_until(self._kill, "the group's processes end")
        wait_until(self._remove, "the group can be removed")
        self._guard.communicate()

    def _kill(self) -> bool:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not self.pids()

    def _remove(self) -> bool:
        with suppress(OSError):
            self.path.rmdir()
        return not self.path.exists()


def outside_pid(first: int, pid: int) -> int:
    """Return a process's number on this machine, by its number within the host of process `first`."""
    namespace = Path(f"/proc/{first}/ns/pid").readlink()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                numbers = (folder / "status").read_text().partition("\nNSpid:")[2].partition("\n")[0].split()
                if (folder / "ns/pid").readlink() == namespace and int(numbers[-1]) == pid:
                    return int(folder.name)
            except (OSError, IndexError):
                continue
    raise LookupError(pid)
