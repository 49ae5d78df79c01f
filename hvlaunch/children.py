"""Child processes that end with this process, and blocks that an interrupt does not split."""

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
"""Its stdin ends when this process ends, even by SIGKILL."""


class Sweeper:
    """Kills process groups once this process has ended. Thread-safe.

    It is a shell that starts with the first group. A signal that the kernel sends (PR_SET_PDEATHSIG) would come
    when the thread that started a process ends, and only to that process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shell: Popen[bytes] | None = None

    def add(self, group: int) -> None:
        """Kill the group later. Best effort: the system may lack processes or descriptors."""
        with self._lock, suppress(OSError):
            if self._shell is None:
                self._shell = Popen(
                    ["/bin/sh", "-c", _SHELL],
                    stdin=PIPE,
                    stdout=DEVNULL,
                    stderr=DEVNULL,
                    # Ctrl-C in the terminal must not end the shell before this process.
                    start_new_session=True,
                    bufsize=0,
                )
            self._tell(self._shell, b"+ %d\n" % group)

    def forget(self, group: int) -> None:
        """Forget a group that has ended, because its number may be reused."""
        with self._lock, suppress(OSError):
            if self._shell is not None:
                self._tell(self._shell, b"- %d\n" % group)

    @staticmethod
    def _tell(shell: "Popen[bytes]", command: bytes) -> None:
        if shell.stdin is not None:
            shell.stdin.write(command)

    def close(self) -> None:
        """Kill the remaining groups."""
        with self._lock:
            shell, self._shell = self._shell, None
        if shell is not None:
            shell.communicate()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay an interrupt until the end of the block.

    Only the main thread is interrupted, and only it may change handlers. An interrupt in the middle of
    subprocess.Popen leaves a process with an unknown number (https://github.com/python/cpython/issues/69622).
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    # The handler only records the signal; the previous handler gets it after the block.
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])
