"""A fork server, and command lines whose drivers it forks."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

import hvlaunch
from hvlaunch import __version__
from hvlaunch.engine.codec import encode
from hvlaunch.job import Host, SSHOptions
from hvlaunch.outside.directory import JobDirectory
from hvlaunch.outside.forked import SOCKET
from hvlaunch.pool.forks import Forks

__all__ = ["DEADLINE", "HVLAUNCH", "OTHER_SETTING", "PARENTS", "ROOT", "Place", "new_place", "wait_until"]

HVLAUNCH = f"{sys.executable} -m hvlaunch --prefix ''"
ROOT = Path(hvlaunch.__file__).resolve().parents[1]
"""Of the hvlaunch that is tested, which may be installed beside this checkout. All of a place have it from there."""
DEADLINE = 100.0
OTHER_SETTING = {"PYTHONHASHSEED": "1"}
"""With this a driver must be started."""
PARENTS = "python -c 'import psutil; print(*(each.name() for each in psutil.Process().parents()))'"


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class Place:
    """A pool without hosts of its own: its jobs are on this machine. What is its own is the fork server."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HVLAUNCH")},
            "XDG_STATE_HOME": str(state),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        about = {
            "version": __version__,
            "hosts": encode(tuple[Host, ...], (Host("localhost", slots=8),)),
            "ssh": encode(SSHOptions, SSHOptions()),
            "remote_python": None,
        }
        self.directory = JobDirectory(state / "hvlaunch/pools", "p", about)
        self.forks = self.begin()

    def begin(self) -> Forks:
        (self.directory.path / SOCKET).unlink(missing_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "path", [str(ROOT), *sys.path])
            forks = Forks(self.directory.path, "p")
        wait_until(self.is_forked, "the fork server is ready")
        return forks

    def is_forked(self) -> bool:
        return "hvl-driver" in self.run(f"{HVLAUNCH} --pool p {PARENTS}").stdout

    @property
    def server(self) -> psutil.Process:
        assert self.forks._process is not None
        return psutil.Process(self.forks._process.pid)

    def popen(self, script: str, env: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["sh", "-c", script],
            env={**self.env, **(env or {})},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        process = self.popen(script, env)
        stdout, stderr = process.communicate(timeout=DEADLINE)
        return subprocess.CompletedProcess([], process.returncode, stdout, stderr)

    def drivers(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return [each for each in self.server.children() if each.name() == "hvl-driver"]
        return []


@contextmanager
def new_place() -> Iterator[Place]:
    """One that ends with the block."""
    with TemporaryDirectory(prefix="hvlaunch-forked-", dir="/var/tmp") as state:
        one = Place(Path(state))
        with closing(one.directory):
            yield one
            one.forks.close()
