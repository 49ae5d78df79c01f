"""Child processes that end with this one, and blocks that an interrupt does not cut in two."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from subprocess import DEVNULL, PIPE, Popen
from types import FrameType

__all__ = ["Sweeper", "uninterrupted"]

_SHELL = """
groups=
while read -r what group; do
    case $what in
    +) groups="$groups $group" ;;
    -) rest=; for each in $groups; do [ $each = $group ] || rest="$rest $each"; done; groups=$rest ;;
    esac
done
for each in $groups; do kill -9 -$each; done
"""
"""Its stdin ends when we do: by SIGKILL, too, when nobody else could tell it."""


class Sweeper:
    """A shell that kills the process groups that it was told of once this process is gone. Thread-safe.

    It starts with the first of them. A signal that the kernel sends for us (PR_SET_PDEATHSIG) would come with the
    end of the thread that started a process, and only to that process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shell: Popen[bytes] | None = None

    def add(self, group: int) -> None:
        """From now on; as well as it goes, where no process or descriptor is left."""
        with self._lock, suppress(OSError):
            if self._shell is None:
                self._shell = Popen(
                    ["/bin/sh", "-c", _SHELL],
                    stdin=PIPE,
                    stdout=DEVNULL,
                    stderr=DEVNULL,
                    start_new_session=True,
                    bufsize=0,
                )
            self._tell(self._shell, b"+ %d\n" % group)

    def forget(self, group: int) -> None:
        """The group has ended: others may get its number."""
        with self._lock, suppress(OSError):
            if self._shell is not None:
                self._tell(self._shell, b"- %d\n" % group)

    @staticmethod
    def _tell(shell: "Popen[bytes]", line: bytes) -> None:
        if shell.stdin is not None:
            shell.stdin.write(line)

    def close(self) -> None:
        """Kill those that are still there."""
        with self._lock:
            shell, self._shell = self._shell, None
        if shell is not None:
            shell.communicate()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """An interrupt that comes within this block is one at its end.

    Only the main thread is interrupted, and only it may say so. An interrupt in the middle of subprocess.Popen leaves a process
    whose number nobody knows (https://github.com/python/cpython/issues/69622).
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])
