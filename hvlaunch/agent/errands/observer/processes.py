"""Figures of workers, each with all its descendants.

Every sample lists /proc, but only new processes are opened to find their parents. A process once seen below a worker
stays the worker's, even if its parent ends. psutil does the same, but opens the files anew each time.
"""

from __future__ import annotations

import errno
import os

from hvlaunch.agent.proc import ProcFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

__all__ = ["Processes"]

_STATE, _PARENT, _UTIME, _CSTIME, _THREADS, _RSS = 0, 1, 11, 14, 17, 21  # proc(5), stat, behind the name
_STATES = {"R": "R", "D": "D", "T": "T", "t": "T", "Z": "Z", "X": "Z"}
"""States of /proc that are no sleep."""
_MOST_THREADS, _MOST_PROCESSES = 32, 8
"""Limits of the threads of a process, and processes of a worker, for the time spent in queues for a processor."""
_LOOKED_AT_AGAIN = 60
"""Every sample looks again at 1 of 60 foreign processes: their pids may have new owners."""


class _Process:
    """A worker's process at its last reading."""

    def __init__(self, proc: str, pid: int, root: int) -> None:
        self.root = root
        self._at = "%s/%d" % (proc, pid)
        self._stat = ProcFile(self._at + "/stat")
        self._io = ProcFile(self._at + "/io")
        self._may_read_io = True
        self.ticks: Optional[int] = None
        self.used = 0
        """Ticks since the previous reading."""
        self.state = "S"
        self.threads = self.pages = self.io = 0

    def read(self) -> None:
        """Read the figures. Raises OSError if the process is gone."""
        words = self._stat.read().rpartition(b")")[2].split(None, _RSS + 1)
        ticks = sum(map(int, words[_UTIME : _CSTIME + 1]))
        self.used = 0 if self.ticks is None else max(0, ticks - self.ticks)
        self.ticks = ticks
        self.state = _STATES.get(words[_STATE].decode(), "S")
        self.threads = int(words[_THREADS])
        self.pages = int(words[_RSS])
        if self._may_read_io:
            try:
                words_of_io = self._io.read().split(None, 4)
                self.io = int(words_of_io[1]) + int(words_of_io[3])
            except (OSError, IndexError, ValueError):
                self._may_read_io = False  # it may not be known, or the kernel counts none

    def waits_in(self) -> Optional[str]:
        """Return the kernel function in which it waits, if the kernel tells."""
        try:
            with open(self._at + "/wchan", "rb") as file:
                name = file.read(64).decode("ascii", "replace")
        except OSError:
            return None
        return name if name and name != "0" else None

    def waited(self) -> float:
        """Return the longest time of a thread in queues for a processor, in seconds."""
        try:
            threads = os.listdir(self._at + "/task")[:_MOST_THREADS]
        except OSError:
            return 0.0
        return max((_waited("%s/task/%s/schedstat" % (self._at, thread)) for thread in threads), default=0.0)

    def close(self) -> None:
        self._stat.close()
        self._io.close()


def _waited(path: str) -> float:
    """Return the seconds of a thread in queues for a processor; 0 if the kernel does not tell."""
    try:
        with open(path, "rb", buffering=0) as file:
            return int(file.read(64).split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


class Processes:
    """The processes of this host's workers. `proc` is the folder of /proc."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._own: Dict[int, _Process] = {}
        """Processes of workers by pid."""
        self._others: Set[int] = set()
        self._turn = 0
        self._workers: Dict[int, int] = {}
        """Ranks by pid."""
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._tick = os.sysconf("SC_CLK_TCK")

    def sample(self, workers: Sequence[Tuple[int, int]], seconds: float) -> List[Dict[str, Any]]:
        """Return the workers' figures, `seconds` after the last sample. Raises OSError without /proc."""
        ranks = {pid: rank for rank, pid in workers}
        if ranks != self._workers:
            self._forget(ranks)
        self._find(ranks)
        families: Dict[int, List[Tuple[int, _Process]]] = {}
        for pid, process in list(self._own.items()):
            try:
                process.read()
            except (OSError, ValueError) as error:
                process.close()
                del self._own[pid]
                # Without free descriptors every worker would seem to be gone.
                if getattr(error, "errno", None) == errno.EMFILE:
                    raise
                continue
            families.setdefault(process.root, []).append((pid, process))
        return [self._sum(ranks[root], root, family, seconds) for root, family in families.items()]

    def worker_of(self, pid: int) -> Optional[int]:
        """Return the pid of the worker that a process is or descends from; None for other processes."""
        process = self._own.get(pid)
        return None if process is None else process.root

    def _forget(self, ranks: Dict[int, int]) -> None:
        """Forget foreign processes and old workers: the workers have changed."""
        for pid in [pid for pid, process in self._own.items() if process.root not in ranks]:
            self._own.pop(pid).close()
        self._others.clear()
        self._workers = ranks

    def _find(self, ranks: Dict[int, int]) -> None:
        """Find the workers of new processes."""
        listed = {int(name) for name in os.listdir(self._proc) if name.isdigit()}
        self._turn = (self._turn + 1) % _LOOKED_AT_AGAIN
        self._others &= listed
        new = {pid for pid in listed if pid not in self._own}
        if self._turn:
            # To open every process at every sample would cost more than all else on a big host.
            new -= {pid for pid in self._others if pid % _LOOKED_AT_AGAIN != self._turn}
        parents = {pid: self._parent_of(pid) for pid in new}
        for pid in new:
            root = self._root_of(pid, parents, ranks)
            if root is None:
                self._others.add(pid)
            else:
                self._others.discard(pid)
                self._own[pid] = _Process(self._proc, pid, root)

    def _root_of(self, pid: int, parents: Dict[int, int], ranks: Dict[int, int]) -> Optional[int]:
        # Bounded: pids that change hands while they are read could form a circle.
        for _ in range(len(parents) + 1):
            if pid in ranks:
                return pid
            if pid in self._own:
                return self._own[pid].root
            pid = parents.get(pid, 0)
        return None

    def _parent_of(self, pid: int) -> int:
        """Return the parent's pid; 0 if the process is gone or hidden."""
        try:
            with open("%s/%d/stat" % (self._proc, pid), "rb", buffering=0) as file:
                return int(file.read().rpartition(b")")[2].split(None, 2)[_PARENT])
        except (OSError, IndexError, ValueError):
            return 0

    def _sum(
        self, rank: int, root: int, family: List[Tuple[int, _Process]], seconds: float
    ) -> Dict[str, Any]:
        # On a tie the worker itself: its stack is the one to show.
        pid, busiest = max(family, key=lambda entry: (entry[1].used, entry[0] == root))
        return {
            "rank": rank,
            "pid": root,
            "processes": len(family),
            "cpu": round(sum(process.used for _, process in family) / self._tick / seconds, 3),
            "cpu_time": sum(process.ticks or 0 for _, process in family) / self._tick,
            "memory": sum(process.pages for _, process in family) * self._page,
            "busiest": pid,
            "state": busiest.state,
            "threads": sum(process.threads for _, process in family),
            "waits_in": None if busiest.state == "R" else busiest.waits_in(),
            "io": sum(process.io for _, process in family),
            "waited": max(process.waited() for _, process in family[:_MOST_PROCESSES]),
        }
