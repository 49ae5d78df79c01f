"""Figures of the whole host: processors, memory, network, disks and free space."""

from __future__ import annotations

import os

from hvlaunch.agent.proc import ProcFile
from hvlaunch.agent.quick import in_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Set

__all__ = ["Machine", "Strain"]

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
