"""What a session must never do to the machine that it runs on, and whatever its threads and loops raise."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvlaunch.errors import Problem

__all__ = ["OUTPUT", "check_line", "check_problem", "files_below", "nothing_else"]

OUTPUT = Path("output")
"""The directory of --output-filename, in the current one."""
OUTPUT_FILES = frozenset(f"rank.{rank}/{stream}" for rank in range(3) for stream in ("stdout", "stderr"))
"""What a driver may write, below it."""
_OPENED = {name for path in OUTPUT_FILES for name in path.split("/")}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_NEVER = frozenset(
    [
        "os.chmod",
        "os.chown",
        "os.exec",
        "os.fork",
        "os.kill",
        "os.killpg",
        "os.link",
        "os.posix_spawn",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.symlink",
        "os.system",
        "os.truncate",
        "os.chdir",
        "shutil.rmtree",
        "subprocess.Popen",
        "pickle.find_class",
    ]
)
_LONGEST_LINE = 6000


class _Watch:
    """The interpreter's own record of what code does (sys.addaudithook), which can't be taken away again."""

    def __init__(self) -> None:
        self.is_on = False
        self.is_there = False
        self.found: list[str] = []

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.is_on and self._is_forbidden(event, args):
            self.found.append(f"{event}{args}")

    def _is_forbidden(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == "open":
            return self._writes(*args)
        if event == "socket.connect":
            return bool(args[1][0] != "127.0.0.1")  # where a session's workers find the relay
        return event in _NEVER

    @staticmethod
    def _writes(path: object, _mode: object, flags: object) -> bool:
        return isinstance(flags, int) and bool(flags & _WRITES) and str(path) not in _OPENED


_watch = _Watch()


def files_below(directory: Path) -> set[str]:
    """Which are there that no driver may write."""
    found = {str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir()}
    return {path for path in found if path.removeprefix(f"{OUTPUT}/") not in OUTPUT_FILES}


@contextmanager
def nothing_else() -> Iterator[None]:
    """While in the block, no file is made but OUTPUT_FILES, no program run, and no thread ends by an exception.

    Raises AssertionError.
    """
    if not _watch.is_there:
        sys.addaudithook(_watch.hook)
        _watch.is_there = True
    _watch.found.clear()
    raised: list[str] = []
    before, threading.excepthook = threading.excepthook, lambda args: raised.append(repr(args.exc_value))
    _watch.is_on = True
    try:
        yield
    finally:
        _watch.is_on = False
        threading.excepthook = before
    assert not raised, raised
    assert not _watch.found, _watch.found


def check_line(text: str) -> None:
    """One line, and of a length that one reads. Raises AssertionError."""
    assert text.isprintable(), text
    assert len(text) <= _LONGEST_LINE, text


def check_problem(problem: Problem) -> None:
    """It is the hostile host's, and no defect of hvlaunch's. Raises AssertionError."""
    assert problem.host == "a", problem
    assert problem.kind != "HostFault", problem
    check_line(str(problem))
