"""Whether this host has a module or a file that a worker of another host did not find."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

from hvlaunch.agent.observer.proc import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List, Optional

__all__ = ["Search"]

_THERE, _NOT_THERE = 10, 11
"""Exit codes that nothing else has."""
_FILE = "import os, sys; sys.exit(%d if os.path.exists(sys.argv[1]) else %d)" % (_THERE, _NOT_THERE)
_MODULE = """
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
sys.path[:0] = sys.argv[2:]
first, *rest = sys.argv[1].split(".")
spec, name = find_spec(first), first
for part in rest:
    path = getattr(spec, "submodule_search_locations", None)
    name += "." + part
    spec = PathFinder.find_spec(name, path) if path else None
sys.exit(%d if spec else %d)
""" % (_THERE, _NOT_THERE)
"""It imports nothing of the name: finding the parts of a package would run the package."""


class Search:
    """Begins at once, in a process of its own: a file system may hang, and modules are those of the worker's own Python.

    `what` is `module` or `file`; `pid` is that of a worker here.
    """

    def __init__(self, what: str, name: str, pid: int) -> None:
        self._process: Optional[subprocess.Popen[bytes]] = None
        words = (
            _module_search(name, pid) if what == "module" else [sys.executable, "-I", "-S", "-c", _FILE, name]
        )
        if words is None:
            return
        try:
            self._process = subprocess.Popen(
                words,
                cwd="/proc/%d/cwd" % pid,
                env=_environment(pid) if what == "module" else {},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except (OSError, ValueError):
            pass

    def result(self, deadline: float) -> Optional[bool]:
        """None where that is not known by then, of time.monotonic()."""
        if self._process is None:
            return None
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            return None
        return {_THERE: True, _NOT_THERE: False}.get(code)


def _module_search(name: str, pid: int) -> Optional[List[str]]:
    """The command, by the Python that the process runs; None where it runs none."""
    words = (read_text("/proc/%d/cmdline" % pid) or "").split("\0")[:-1]
    try:
        runs = os.readlink("/proc/%d/exe" % pid)
        cwd = os.readlink("/proc/%d/cwd" % pid)
    except OSError:
        return None
    if not words or not os.path.basename(runs).startswith(("python", "pypy")):
        return None
    # By the name that it was called by, it finds its virtual environment.
    called = shutil.which(words[0], path=_environment(pid).get("PATH"))
    python = called if called and os.path.realpath(called) == runs else runs
    scripts = [word for word in words[1:] if not word.startswith("-") and word.endswith(".py")]
    beside = [os.path.dirname(os.path.join(cwd, scripts[0]))] if scripts else []
    return [python, "-c", _MODULE, name, *beside]


def _environment(pid: int) -> Dict[str, str]:
    lines = (read_text("/proc/%d/environ" % pid) or "").split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line[1:])
