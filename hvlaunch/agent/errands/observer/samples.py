"""Samples: the figures of a host, its workers and its GPUs at one moment.

The figures of a worker are those of all its descendants. Every sample lists /proc, but only new processes are opened to find
their parents. A process once seen below a worker stays the worker's, even if its parent ends. psutil does the same, but opens the
files anew each time.
"""

from __future__ import annotations

import _thread
import errno
import os
import time

from hvlaunch.agent.proc import ProcFile, allow_many_files
from hvlaunch.agent.quick import has_own_proc, in_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

    Found = List[Dict[str, Any]]

__all__ = ["Gpus", "Machine", "Processes", "Samples", "Strain"]

_FIRST = 0.2
"""Seconds from the first measurement, which gives no rates, to the second."""
_LEAST = 0.05


class Samples:
    """Takes samples; keeps the figures that the next sample needs for its rates."""

    def __init__(self) -> None:
        allow_many_files()
        self._processes = Processes()
        self._machine = Machine()
        self._gpus = Gpus()
        self._last: Optional[float] = None
        self._workers: List[Any] = []

    def take(self, workers: Sequence[Tuple[int, int]], paths: Dict[str, str]) -> Dict[str, Any]:
        """Take a sample. `workers` are pairs of rank and pid; `paths` are the places, by name, to find the free space of."""
        now = time.monotonic()
        # Rates need two measurements of the same workers.
        if self._last is None or self._workers != workers:
            self._measure(workers, paths, now)
            time.sleep(_FIRST)
            now = time.monotonic()
        return self._measure(workers, paths, now)

    def _measure(
        self, workers: Sequence[Tuple[int, int]], paths: Dict[str, str], now: float
    ) -> Dict[str, Any]:
        seconds = max(_LEAST, now - (self._last or 0.0))
        self._last, self._workers = now, list(workers)
        sample = self._machine.sample(seconds, now, paths)
        problems = sample["problems"]
        sample["commits"] = _memory_of_commits(paths.get("scratch", ""))
        try:
            if not has_own_proc():
                raise FileNotFoundError(errno.ENOENT, "it shows another PID namespace")
            sample["workers"] = self._processes.sample(workers, seconds)
        except OSError as error:
            sample["workers"] = []
            problems.append("/proc: %s" % error.strerror)
        sample["gpus"], problem = self._gpus.now(now)
        if problem:
            problems.append(problem)
        for worker in sample["workers"]:
            worker["gpus"] = [
                gpu["index"]
                for gpu in sample["gpus"]
                if any(self._processes.worker_of(pid) == worker["pid"] for pid in gpu["pids"])
            ]
        return sample


def _memory_of_commits(scratch: str) -> int:
    """Return the bytes of the workers' commits and of copies; agent/commits/__init__.py has the places of their files."""
    # Not imported: this errand runs in most jobs that are watched, and few of them have commits.
    directory = "/dev/shm/%s.kept" % os.path.basename(scratch)  # noqa: S108 (as there)
    size = 0
    for folder in (directory, directory + "/copies"):
        try:
            with os.scandir(folder) as entries:
                size += sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries)
        except OSError:  # noqa: PERF203 (there are two)
            continue
    return size


_WITHIN = 0.3
"""Seconds to wait for a reading; a later result counts for the next sample."""
_HANGS_AFTER = 5.0
_DEVICE = "/dev/nvidiactl"


class Gpus:
    """The GPUs' figures, read in a thread of their own since the driver's library may hang."""

    def __init__(self, is_there: Callable[[], bool] = lambda: os.path.exists(_DEVICE)) -> None:
        self._is_there = is_there
        self._read: Optional[Callable[[], Found]] = None
        self._found: Found = []
        self._problem: Optional[str] = None
        self._since: Optional[float] = None
        """Start of the current reading."""
        self._done = _thread.allocate_lock()
        # Locked: the reading releases it at its end.
        self._done.acquire()

    def now(self, now: float) -> Tuple[Found, Optional[str]]:
        """Return the newest figures, and the problem if there are none. `now` is time.monotonic()."""
        if self._since is None:
            if not self._is_there():
                return [], None
            self._since = now
            try:
                _thread.start_new_thread(self._look, ())
            except RuntimeError as error:
                self._since = None
                return [], "GPUs: %s" % error
        # A quick library answers within the sample; a slow one never holds it up.
        if self._done.acquire(timeout=_WITHIN):
            self._since = None
            return self._found, self._problem
        if time.monotonic() - self._since < _HANGS_AFTER:
            return self._found, self._problem
        return [], "the GPUs' driver has not answered for %d s" % (time.monotonic() - self._since)

    def _look(self) -> None:
        try:
            if self._read is None:
                self._read = _reader()
            self._found, self._problem = self._read(), None
        except Exception as error:  # noqa: BLE001 (a library's, a program's: whatever it is, it is told)
            self._found, self._problem = [], "GPUs: %s" % (error or type(error).__name__)
        self._done.release()


def _reader() -> Callable[[], Found]:
    """Load NVML. Raises NoGpus."""
    from hvlaunch.agent.errands.observer.nvml import Library  # noqa: PLC0415 (only where there is a GPU)

    return Library().read


_SECTOR = 512
_SPACE_EVERY = 10.0
_SPACE_WITHIN = 0.2
_RECEIVED, _SENT = 0, 8  # proc(5), net/dev, behind the interface's name
_SECTORS_READ, _SECTORS_WRITTEN = 5, 9  # diskstats of the kernel's iostats.rst
# Devices on top of other disks, or in memory: their transfers would be counted twice, or are none.
_PRESSURES = ("cpu", "io", "memory")
_MOST_CLOCKS = 16
_BUSY_NETWORK = 50.0
"""Least TCP segments per second: a single lost segment of few would be much."""
_NO_DISKS = ("loop", "ram", "zram", "dm-", "md")


class Machine:
    """Figures of the host; rates are since the last sample. `root` is the folder of /proc and /sys."""

    def __init__(self, root: str = "") -> None:
        self._root = root
        self._files = {
            name: ProcFile("%s/proc/%s" % (root, name))
            for name in ("stat", "meminfo", "loadavg", "net/dev", "diskstats", "net/snmp")
        }
        self._strain = Strain(root)
        self._interfaces = _devices(root + "/sys/class/net")
        self._disks = _devices(root + "/sys/block")
        self._counts: Dict[str, float] = {}
        self._space = Space()
        self._cgroup = _cgroup_memory(root)

    def sample(self, seconds: float, now: float, paths: Dict[str, str]) -> Dict[str, Any]:
        """Take a sample, `seconds` after the last. `paths` are the places to find the free space of."""
        problems: List[str] = []
        cores = os.cpu_count() or 1
        used, total = self._read("meminfo", _memory, problems) or (0, 0)
        if self._cgroup is not None:
            used, total = self._cgroup(used, total)
        received, sent = self._read("net/dev", self._traffic, problems) or (0, 0)
        read, written = self._read("diskstats", self._transfers, problems) or (0, 0)
        busy = self._read("stat", _busy, problems) or 0.0
        load = self._read("loadavg", lambda text: float(text.split()[0]), problems) or 0.0
        space, more = self._space.now(paths, now)
        stolen = self._read("stat", _stolen, []) or 0.0
        sent_segments, resent = self._read("net/snmp", _segments, []) or (0, 0)
        segments = self._rate("segments", sent_segments, seconds)
        again = self._rate("resent", resent, seconds)
        return {
            **self._strain.now(seconds),
            "stolen": self._rate("stolen", stolen, seconds),
            "resent": min(1.0, round(again / segments, 4)) if segments >= _BUSY_NETWORK else 0.0,
            "cores": cores,
            "cpu": min(float(cores), self._rate("cpu", busy, seconds)),
            "load": load,
            "memory_used": used,
            "memory_total": total,
            "network_in": self._rate("received", received, seconds),
            "network_out": self._rate("sent", sent, seconds),
            "disk_read": self._rate("read", read, seconds),
            "disk_write": self._rate("written", written, seconds),
            "free": space,
            "problems": problems + more,
        }

    def _read(self, name: str, parse: Callable[[bytes], Any], problems: List[str]) -> Any:
        try:
            return parse(self._files[name].read())
        except (OSError, ValueError, IndexError, KeyError) as error:
            cause = os.strerror(error.errno or 0).lower() if isinstance(error, OSError) else "unknown form"
            problems.append("/proc/%s: %s" % (name, cause))
            return None

    def _rate(self, name: str, count: float, seconds: float) -> float:
        before = self._counts.get(name, count)
        self._counts[name] = count
        return round(max(0.0, count - before) / seconds, 3)

    def _traffic(self, text: bytes) -> Any:
        """Sum up received and sent bytes of hardware devices; of all but the loopback if no device is known."""
        received = sent = 0
        for line in text.splitlines()[2:]:
            name, _, columns = line.partition(b":")
            interface = name.strip().decode()
            if interface in self._interfaces or (not self._interfaces and interface != "lo"):
                words = columns.split(None, _SENT + 1)
                received += int(words[_RECEIVED])
                sent += int(words[_SENT])
        return received, sent

    def _transfers(self, text: bytes) -> Any:
        read = written = 0
        for line in text.splitlines():
            words = line.split(None, _SECTORS_WRITTEN + 1)
            disk = words[2].decode()
            if disk in self._disks or (not self._disks and not disk.startswith(_NO_DISKS)):
                read += int(words[_SECTORS_READ])
                written += int(words[_SECTORS_WRITTEN])
        return read * _SECTOR, written * _SECTOR


class Strain:
    """Clock of a host's processors, CPU limits of the job's cgroups, and pressure. Figures may be missing."""

    def __init__(self, root: str) -> None:
        self._clocks: List[ProcFile] = []
        at = root + "/sys/devices/system/cpu"
        try:
            # A few processors tell as much as hundreds.
            names = sorted(name for name in os.listdir(at) if name[3:].isdigit())[:_MOST_CLOCKS]
            paths = ["%s/%s/cpufreq/scaling_cur_freq" % (at, name) for name in names]
            self._clocks = [ProcFile(path) for path in paths if os.path.exists(path)]
        except OSError:
            pass
        self._pressure = {kind: ProcFile("%s/proc/pressure/%s" % (root, kind)) for kind in _PRESSURES}
        self._limits = [ProcFile(path) for path in _cpu_limits(root)]
        self._stopped: Dict[int, float] = {}

    def now(self, seconds: float) -> Dict[str, Any]:
        """Return the figures, `seconds` after the last call."""
        clocks: List[float] = []
        pressure: Dict[str, float] = {}
        limited = 0.0
        for file in self._clocks:
            clocks += _maybe(file, lambda text: float(text) / 1000)
        for kind, file in self._pressure.items():
            for value in _maybe(file, _some):
                pressure[kind] = value
        for number, file in enumerate(self._limits):
            for stopped in _maybe(file, _stopped):
                limited = max(limited, stopped - self._stopped.get(number, stopped))
                self._stopped[number] = stopped
        return {
            "clock": round(sum(clocks) / len(clocks), 1) if clocks else None,
            "pressure": pressure,
            "limited": round(min(1.0, limited / seconds), 3),
        }


def _maybe(file: ProcFile, parse: Callable[[bytes], float]) -> List[float]:
    """Return the figure of a file, if any."""
    try:
        return [parse(file.read())]
    except (OSError, ValueError, IndexError):
        return []


def _some(text: bytes) -> float:
    """Read the percentage over 10 s of pressure, `some avg10=1.23 ...`."""
    return float(text.split(b"avg10=", 1)[1].split(None, 1)[0])


def _stopped(text: bytes) -> float:
    """Read the seconds during a limit's stops from a cgroup's cpu.stat; version 1 counts nanoseconds."""
    words = text.split()
    name, scale = (b"throttled_usec", 1e6) if b"throttled_usec" in words else (b"throttled_time", 1e9)
    return int(words[words.index(name) + 1]) / scale


def _cpu_limits(root: str) -> List[str]:
    """Return the cpu.stat of this process's cgroup and of its parents, of version 2 or 1."""
    paths = []
    try:
        with open(root + "/proc/self/cgroup") as file:
            for line in file:
                _, controllers, path = line.rstrip("\n").split(":", 2)
                if controllers and "cpu" not in controllers.split(","):
                    continue
                top = root + "/sys/fs/cgroup" + ("/cpu" if controllers else "")
                while path.strip("/"):
                    paths.append("%s%s/cpu.stat" % (top, path.rstrip("/")))
                    path = path.rstrip("/").rpartition("/")[0]
    except (OSError, ValueError):
        pass
    return [path for path in paths if os.path.exists(path)]


class Space:
    """Free and total bytes of file systems. A file system may hang, so it is asked rarely and with a timeout."""

    def __init__(self, look: Callable[[str], Any] = os.statvfs) -> None:
        self._look = look
        self._found: Dict[str, List[int]] = {}
        self._hanging: Set[str] = set()
        self._problems: List[str] = []
        self._next = 0.0

    def now(self, paths: Dict[str, str], now: float) -> Any:
        """Return the newest figures by name, and the reasons for missing figures."""
        if now >= self._next:
            self._next = now + _SPACE_EVERY
            self._problems = []
            for name, path in paths.items():
                if not self._renew(name, path):
                    self._problems.append("%s (%s) does not answer" % (name, path))
        return dict(self._found), self._problems

    def _renew(self, name: str, path: str) -> bool:
        if name in self._hanging:  # its thread hangs still
            return False
        # Before the look: a thread that hangs must not get a second one beside it.
        self._hanging.add(name)

        def look() -> bool:
            try:
                status = self._look(path)
                self._found[name] = [status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize]
            except OSError:
                self._found.pop(name, None)
            self._hanging.discard(name)
            return True

        is_answered = in_time(look, _SPACE_WITHIN, otherwise=False)
        if not is_answered:
            self._found.pop(name, None)
        return is_answered


def _devices(directory: str) -> Set[str]:
    """List hardware devices and virtual machines' devices. A bond or bridge would be counted twice."""
    try:
        return {name for name in os.listdir(directory) if os.path.exists("%s/%s/device" % (directory, name))}
    except OSError:
        return set()


def _busy(text: bytes) -> float:
    """Read the seconds of work of all processors, for this system and for its guests."""
    words = [int(word) for word in text[: text.index(b"\n")].split()[1:9]]
    # A guest's time is part of user and nice: adding it would count it twice.
    user, nice, system, _idle, _iowait, irq, softirq, _steal = words
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _stolen(text: bytes) -> float:
    """Read the seconds for which a hypervisor ran other machines, summed over the processors."""
    return int(text[: text.index(b"\n")].split()[8]) / os.sysconf("SC_CLK_TCK")


def _segments(text: bytes) -> Any:
    """Read the numbers of TCP segments sent, and sent again."""
    names, values = [line.split() for line in text.splitlines() if line.startswith(b"Tcp:")]
    return int(values[names.index(b"OutSegs")]), int(values[names.index(b"RetransSegs")])


def _memory(text: bytes) -> Any:
    """Read used and total bytes."""
    kib = {line.split(b":")[0]: int(line.split()[1]) for line in text.splitlines()[:8]}
    total = kib[b"MemTotal"]
    return (total - kib.get(b"MemAvailable", kib[b"MemFree"])) * 1024, total * 1024


def _cgroup_memory(root: str) -> Optional[Callable[[int, int], Any]]:
    """Return a function for used and total bytes if the job's cgroup (version 2) may limit memory below the host's."""
    try:
        with open(root + "/proc/self/cgroup") as file:
            path = next(line.rstrip("\n")[3:] for line in file if line.startswith("0::"))
        at = "%s/sys/fs/cgroup%s/" % (root, path.rstrip("/"))
        with open(at + "memory.max") as file:
            limit = int(file.read())
    except (OSError, ValueError, StopIteration):
        return None
    current, details = ProcFile(at + "memory.current"), ProcFile(at + "memory.stat")

    def measure(used: int, total: int) -> Any:
        # A limit above the host's memory is no limit.
        if limit >= total > 0:
            return used, total
        try:
            cache = details.read().partition(b"inactive_file ")[2].split(None, 1)
            # Cache of files goes first when memory is short, so it is not in use.
            return max(0, int(current.read()) - int(cache[0])), limit
        except (OSError, ValueError, IndexError):
            return used, total

    return measure


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
