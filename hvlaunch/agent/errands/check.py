"""Values of this host for the comparison with other hosts. Nothing of the user's is started.

The driver sends lines while the values are read: `clock` is answered with the time of this host, `open` with the seconds
for opening the script. The end of the input asks for the result; a line `pairs` for the same, and for measures of the
network to other hosts from then on: another errand would take 10 ms more on each host.
"""

from __future__ import annotations

import _thread
import os
import resource
import time

from hvlaunch.agent.errands import pairs, write_line
from hvlaunch.agent.errands.network import FABRIC, read_fabric
from hvlaunch.agent.errands.observer.versions import driver_version, versions_of
from hvlaunch.agent.facts import interface_networks
from hvlaunch.agent.proc import (
    LEAST_ROOM,
    cgroup_memory,
    cgroup_words,
    command_of,
    commit_room,
    memory_of_host,
    read_text,
)
from hvlaunch.agent.quick import fingerprint, in_time
from hvlaunch.agent.wire.frames import flag, mapping, number, or_null, plain, record, several, text, whole
from hvlaunch.agent.workers import CannotStart, find

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

    from hvlaunch.agent.errands import ErrandStream

__all__ = [
    "ARGUMENTS",
    "RESULT",
    "read_files",
    "read_gpus",
    "read_machine",
    "read_network",
    "run",
]

_PATH = text(4096, raw=True)
ARGUMENTS = record(
    {
        "directory": _PATH,  # where workers would start
        "scratch": _PATH,
        "program": or_null(_PATH),  # the job's Python; None for a command without one
        "script": or_null(_PATH),  # from the directory on
        "address": or_null(text(64)),  # of this host, as the driver reached it
        "env": mapping(text(1 << 16, raw=True), text(1 << 20, raw=True), 1 << 16),
        "compares_files": flag,  # a job with a copy of the project has the same files everywhere
        "pairs": or_null(pairs.ARGUMENTS),  # None for a driver that won't ask for measures
    }
)
_SECONDS = 15.0
"""Seconds for each part: a file system or a driver's library may hang."""


def run(arguments: Dict[str, Any], stream: ErrandStream) -> Dict[str, Any]:
    """Answer the driver's lines, and return the parts."""
    deadline = time.monotonic() + _SECONDS
    result: Dict[str, Any] = {"problems": {}}
    waits = {name: _begin(name, read, arguments, result) for name, (read, _) in _PARTS.items()}
    measures_pairs = _answer(arguments, stream)
    for name, is_done in waits.items():
        if not is_done.acquire(timeout=max(0.0, deadline - time.monotonic())):
            result["problems"][name] = "no answer within %d s" % _SECONDS
    # A copy: a part that is late must not change what is being sent.
    values = {"problems": dict(result["problems"]), **{name: result.get(name) for name in _PARTS}}
    if measures_pairs:
        write_line(stream, values)
        pairs.run(arguments["pairs"], stream)
    return values


def _begin(
    name: str, read: Callable[[Dict[str, Any]], Any], arguments: Dict[str, Any], result: Dict[str, Any]
) -> _thread.LockType:
    """Read a part in a thread; return a lock that is released at its end."""
    is_done = _thread.allocate_lock()
    is_done.acquire()

    def work() -> None:
        try:
            result[name] = read(arguments)
        except Exception as error:  # noqa: BLE001 (one part must not hide the others)
            result["problems"][name] = plain("%s: %s" % (type(error).__name__, error), 300)
        is_done.release()

    try:
        _thread.start_new_thread(work, ())
    except RuntimeError as error:
        result["problems"][name] = plain("it can't start a thread: %s" % error, 300)
        is_done.release()
    return is_done


def _answer(arguments: Dict[str, Any], stream: ErrandStream) -> bool:
    """Answer the driver's lines; return True if it asks for the pairs."""
    script = os.path.join(arguments["directory"], arguments["script"] or "")
    while True:
        try:
            line = stream.read_line()
        except EOFError:
            return False
        if line == b"pairs\n":
            return True
        answer = (
            time.time() if line == b"clock\n" else in_time(lambda: _seconds_to_open(script), _SECONDS, None)
        )
        write_line(stream, answer)


def _seconds_to_open(path: str) -> float:
    """Return the seconds that opening and reading the beginning of a file took; of listing, for a directory."""
    begin = time.monotonic()
    try:
        if os.path.isdir(path):
            os.listdir(path)
        else:
            with open(path, "rb", buffering=0) as file:
                file.read(1 << 16)
    except OSError:
        pass  # a missing file is a value of its own
    return time.monotonic() - begin


_SIZE = whole(0, 1 << 62)
_WORDS = text(200)
_MACHINE = record(
    {
        "processor": _WORDS,
        "architecture": _WORDS,
        "kernel": _WORDS,
        "cpus": whole(1, 1 << 20),  # that the process may run on
        "cpu_quota": or_null(number(0, 1 << 20)),  # processors that its cgroup may use
        "load": number(0, 1 << 40),
        "memory": _SIZE,  # of the host, or of the cgroup if it may use less
        "memory_available": _SIZE,
        "nofile": _SIZE,  # a worker's soft limits; 1 << 62 is unlimited
        "memlock": _SIZE,
        "shm": or_null(_SIZE),
        "shm_free": or_null(_SIZE),
        "commit_room": _SIZE,
        "commit_least": _SIZE,  # for each worker
    }
)
_UNLIMITED = 1 << 62
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 (it is measured, not written)


def read_machine(arguments: Dict[str, Any], root: str = "") -> Dict[str, Any]:  # noqa: ARG001 (every part has them)
    """Return the part. `root` is the folder of /proc and /sys."""
    total, free = memory_of_host(root)
    available = free or 0
    limits = cgroup_memory(root)
    if limits is not None and limits[0] < total:
        total, available = limits[0], min(available, limits[1])
    try:
        shared = os.statvfs(_SHARED_MEMORY)
        room = commit_room(root).size
    except OSError:
        shared, room = None, 0
    return {
        "processor": plain(_processor(root), 200),
        "architecture": plain(os.uname().machine, 200),
        "kernel": plain(os.uname().release, 200),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_quota": _cpu_quota(root),
        "load": float((read_text(root + "/proc/loadavg") or "0").split()[0]),
        "memory": total,
        "memory_available": available,
        "nofile": _limit(resource.RLIMIT_NOFILE),
        "memlock": _limit(resource.RLIMIT_MEMLOCK),
        "shm": None if shared is None else shared.f_blocks * shared.f_frsize,
        "shm_free": None if shared is None else shared.f_bavail * shared.f_frsize,
        "commit_room": room,
        "commit_least": LEAST_ROOM,
    }


def _limit(kind: int) -> int:
    soft = resource.getrlimit(kind)[0]
    return _UNLIMITED if soft == resource.RLIM_INFINITY else min(soft, _UNLIMITED)


def _processor(root: str) -> str:
    text = read_text(root + "/proc/cpuinfo") or ""
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return os.uname().machine


def _cpu_quota(root: str) -> Optional[float]:
    """Return the processors that the narrowest cgroup may use; None without a limit."""
    limits = [words for words in cgroup_words("cpu", "cpu.max", root) if len(words) > 1]
    # Version 1 of cgroups has a file for each of both numbers.
    quotas = cgroup_words("cpu", "cpu.cfs_quota_us", root)
    periods = cgroup_words("cpu", "cpu.cfs_period_us", root)
    limits += [quota + period for quota, period in zip(quotas, periods) if quota and period]  # noqa: B905 (Python 3.10)
    numbers = [int(quota) / int(period) for quota, period in limits if quota.isdigit() and int(period)]
    return round(min(numbers), 3) if numbers else None


_VERSION = or_null(text(200))
_SOFTWARE = record(
    {
        "executable": _VERSION,
        "missing": or_null(text(300)),  # why the job's program can't be started
        "python": _VERSION,
        "torch": _VERSION,
        "cuda": _VERSION,  # for which torch was built
        "nccl": _VERSION,
        "driver": _VERSION,
        "system": _VERSION,
    }
)


def _read_software(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Return the part."""
    part: Dict[str, Any] = dict.fromkeys(("executable", "missing", "python", "torch", "cuda", "nccl"))
    part["driver"] = driver_version()
    part["system"] = plain(_system(read_text("/etc/os-release") or ""), 200) or None
    if arguments["program"] is None:
        return part
    environ = dict(os.environ, **arguments["env"])
    # From the job's directory on: the user's path may be relative.
    name = os.path.join(arguments["directory"], arguments["program"])
    try:
        path = find(
            name if "/" in arguments["program"] else arguments["program"], environ.get("PATH", os.defpath)
        )
    except CannotStart as error:
        part["missing"] = plain(error.cause, 300)
        return part
    part["executable"] = plain(path, 200)
    part.update(versions_of(path, environ))
    if part["python"] is None:
        problem = "it does not start as a Python" if os.access(path, os.X_OK) else "there is no such program"
        part["missing"] = plain("%s: %s" % (arguments["program"], problem), 300)
    return part


def _system(os_release: str) -> str:
    """Return the name of the distribution from os-release(5); empty if unknown."""
    for line in os_release.splitlines():
        name, _, value = line.partition("=")
        if name == "PRETTY_NAME":
            return value.strip("\"'")
    return ""


_COUNT = or_null(_SIZE)
_MOST_GPUS, _MOST_USERS = 64, 16
_GPUS = record(
    {
        "problem": or_null(text(300)),  # why there are none, with a library but no GPUs
        "driver_cuda": or_null(text(64)),  # the newest CUDA that the driver can run
        "gpus": several(
            record(
                {
                    "name": text(96),
                    "memory": whole(0, 1 << 62),
                    "memory_used": whole(0, 1 << 62),
                    "users": several(text(300), _MOST_USERS),  # processes of others
                    "clock": _COUNT,  # MHz of its processors
                    "clock_set": _COUNT,
                    "is_idle": flag,
                    "slowed": several(text(64), 16),
                    "ecc": or_null(flag),
                    "ecc_errors": _COUNT,
                    "remap_pending": _COUNT,
                    "remap_failed": _COUNT,
                    "xids": several(whole(0, 1 << 16), 16),
                    "pcie_width": _COUNT,
                    "pcie_width_max": _COUNT,
                    "pcie_generation_max": _COUNT,
                }
            ),
            _MOST_GPUS,
        ),
    }
)
_KERNEL_LOG = "/dev/kmsg"
_XID = r"(?i)NVRM: Xid \(PCI:([0-9a-f:.]+)\): (\d{1,4})\b"
_LIBRARY = "libnvidia-ml.so.1"
_MOST_RECORDS = 100000


def read_gpus(
    arguments: Dict[str, Any],  # noqa: ARG001 (every part has them)
    library: Any = None,
    kernel_log: str = _KERNEL_LOG,
) -> Dict[str, Any]:
    """Return the part; no GPUs on a host without NVIDIA's library. `library` replaces NVML."""
    absence = None if library is not None else _absence()
    if absence is not None:
        # A host without the driver is no news: only the comparison with others tells.
        return _none(absence)
    from hvlaunch.agent.errands.observer.nvml import Library, NoGpus  # noqa: PLC0415 (the driver needs no ctypes)

    try:
        nvml = library or Library(_LIBRARY)
    except NoGpus as error:
        return _none(str(error))
    xids = _xids(kernel_log)
    gpus = [_gpu(health, xids) for health in nvml.health()]
    return {"problem": None, "driver_cuda": nvml.driver_cuda(), "gpus": gpus[:_MOST_GPUS]}


def _absence() -> Optional[str]:
    """Return why NVIDIA's library can't be loaded; None if it can."""
    # NVML's module takes 3 ms, and most hosts without GPUs have no such library.
    try:
        import _ctypes  # noqa: PLC0415 (some builds of Python lack it)

        _ctypes.dlopen(_LIBRARY, 0)
    except (ImportError, AttributeError):
        return None  # as above: nvml tells
    except OSError as error:
        return str(error)
    return None


def _none(problem: str) -> Dict[str, Any]:
    return {"problem": plain(problem, 300), "driver_cuda": None, "gpus": []}


def _gpu(health: Dict[str, Any], xids: Dict[str, List[int]]) -> Dict[str, Any]:
    users = [plain(_user(pid), 300) for pid in health.pop("pids")]
    pci = _bus(health.pop("pci"))
    return dict(
        health,
        name=plain(health["name"], 96),
        users=users[:_MOST_USERS],
        xids=sorted(set(xids.get(pci, ())))[:16],
    )


def _bus(pci: str) -> str:
    """Return bus and device of `00000000:17:00.0`, of which the kernel's messages have fewer digits of the domain."""
    return ":".join(pci.lower().partition(".")[0].split(":")[-2:])


def _xids(path: str) -> Dict[str, List[int]]:
    """Return the Xid errors since boot by bus and device, as far as the kernel lets this user read its log."""
    import re  # noqa: PLC0415 (5 ms, and only for hosts with GPUs)

    xids: Dict[str, List[int]] = {}
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return xids
    try:
        for _ in range(_MOST_RECORDS):
            try:
                # Each read is one message of the kernel.
                data = os.read(log, 8192)
            except BrokenPipeError:
                continue  # messages were overwritten meanwhile
            if not data:
                break
            for bus, number in re.findall(_XID, data.decode("utf-8", "replace")):
                xids.setdefault(_bus(bus), []).append(int(number))
    except OSError:
        pass  # the end of the messages
    finally:
        os.close(log)
    return xids


def _user(pid: int) -> str:
    """Return user, pid and command of a process."""
    import pwd  # noqa: PLC0415 (as re)

    try:
        uid = os.stat("/proc/%d" % pid).st_uid
    except OSError:
        return "pid %d, which this host does not show" % pid
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = "user %d" % uid
    return "%s, pid %d: %s" % (name, pid, command_of(pid))


_PLACE = record(
    {
        "problem": or_null(text(300)),
        "free": or_null(_SIZE),
        "inodes_free": or_null(_SIZE),  # None where the file system has no limit
        "type": or_null(text(64)),
        "source": or_null(text(300)),
        "options": or_null(text(500)),
    }
)
_FILES = record(
    {
        "cwd": _PLACE,
        "scratch": _PLACE,
        "script": or_null(text(64)),  # a hash of the script
        "script_problem": or_null(text(300)),
        "code": or_null(text(64)),  # a hash of the Python files below the directory
        "code_files": or_null(_SIZE),
        "commit": or_null(text(64)),
    }
)
_MOST_FILES, _MOST_BYTES, _MOST_SECONDS = 2000, 32 << 20, 2.0
_MOST_DIRECTORIES = 500
_NO_CODE = ("__pycache__", "node_modules", "site-packages")
_FEW = 16


def read_files(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Return the part."""
    directory = arguments["directory"]
    part: Dict[str, Any] = {
        "cwd": _place(directory, writes=False),
        "scratch": _place(arguments["scratch"], writes=True),
        **dict.fromkeys(("script", "script_problem", "code", "code_files", "commit")),
    }
    if part["cwd"]["problem"] is None and arguments["script"] is not None:
        try:
            script = _bytes_of(os.path.join(directory, arguments["script"]))
            part["script"] = _hash(script)
        except OSError as error:
            part["script_problem"] = plain(error.strerror or str(error), 300)
    if part["cwd"]["problem"] is None and arguments["compares_files"]:
        part["commit"] = _commit(directory)
        part["code"], part["code_files"] = _code(directory)
    return part


def _place(path: str, *, writes: bool) -> Dict[str, Any]:
    place: Dict[str, Any] = dict.fromkeys(("problem", "free", "inodes_free", "type", "source", "options"))
    try:
        status = os.statvfs(path)
        place["free"] = status.f_bavail * status.f_frsize
        place["inodes_free"] = status.f_favail if status.f_files else None
        if not os.access(path, os.R_OK | os.X_OK | (os.W_OK if writes else 0)):
            place["problem"] = "permission denied"
    except OSError as error:
        place["problem"] = plain((error.strerror or str(error)).lower(), 300)
        return place
    source, kind, options = _mount(os.path.realpath(path))
    place["source"], place["type"], place["options"] = (
        plain(source, 300),
        plain(kind, 64),
        plain(options, 500),
    )
    return place


def _mount(path: str) -> Tuple[str, str, str]:
    """Return source, type and options of the mount with this path; proc(5), mountinfo."""
    best = ("", "", "", "")
    for line in (read_text("/proc/self/mountinfo") or "").splitlines():
        words = line.split(" ")
        separator = words.index("-")
        point = words[4].replace("\\040", " ")
        # A later mount on the same point hides the earlier one.
        if (path + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best[0]):
            best = (point, words[separator + 2], words[separator + 1], words[separator + 3])
    return best[1:]


def _bytes_of(path: str) -> bytes:
    # O_NONBLOCK: a FIFO would block here.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        # Python takes memory for all that a read may bring.
        return os.read(fd, min(os.fstat(fd).st_size, _MOST_BYTES))
    finally:
        os.close(fd)


def _code(directory: str) -> Tuple[Optional[str], Optional[int]]:
    """Return a hash of names and contents of the Python files, and their number; nothing of a tree that is too large."""
    deadline = time.monotonic() + _MOST_SECONDS
    hashes: List[str] = []
    count = size = 0
    for path in _python_files(directory):
        if path is None:
            return None, None
        contents = _contents(path)
        count += 1
        size += len(contents)
        # Not a part of them: hosts differ in speed, and their hashes must not differ for this reason.
        if count > _MOST_FILES or size > _MOST_BYTES or time.monotonic() > deadline:
            return None, None
        hashes.append("%s %s" % (os.path.relpath(path, directory), _hash(contents)))
    return _hash("\n".join(hashes).encode("utf-8", "surrogateescape")), count


def _hash(data: bytes) -> str:
    return fingerprint(data, _FEW // 2)


def _contents(path: str) -> bytes:
    try:
        return _bytes_of(path)
    except OSError:
        return b""  # a link to nothing, which hosts should have in common too


def _python_files(directory: str) -> Iterator[Optional[str]]:
    """Yield the paths in alphabetical order; None for too many directories."""
    for count, (place, folders, names) in enumerate(os.walk(directory)):
        if count > _MOST_DIRECTORIES:
            yield None
            return
        folders[:] = sorted(
            folder
            for folder in folders
            # Environments belong to a host, and are compared by the versions in them.
            if not folder.startswith(".")
            and folder not in _NO_CODE
            and not os.path.exists(os.path.join(place, folder, "pyvenv.cfg"))
        )
        for name in sorted(names):
            if name.endswith(".py"):
                yield os.path.join(place, name)


def _commit(directory: str) -> Optional[str]:
    """Return the commit of the git work tree around the directory."""
    while not os.path.exists(os.path.join(directory, ".git")):
        parent = os.path.dirname(directory)
        if parent == directory:
            return None
        directory = parent
    git = os.path.join(directory, ".git")
    # A further work tree has a file here, and shares the branches of the first.
    git = os.path.join(directory, (read_text(git) or "gitdir: .git").partition("gitdir: ")[2].strip())
    common = os.path.join(git, (read_text(os.path.join(git, "commondir")) or ".").strip())
    head = (read_text(os.path.join(git, "HEAD")) or "").strip()
    if head.startswith("ref: "):
        name = head[len("ref: ") :]
        head = (read_text(os.path.join(common, name)) or "").strip()
        for line in (read_text(os.path.join(common, "packed-refs")) or "").splitlines():
            if not head and line.endswith(" " + name):
                head = line.split(" ")[0]
    return plain(head, 64)[:12] or None


_NETWORK = record(
    {
        "interface": or_null(text(64)),
        "address": or_null(text(64)),
        "fabric": FABRIC,
        "proxies": mapping(text(64), text(300), 16),
    }
)
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy", "no_proxy")


def read_network(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Return the part."""
    address = arguments["address"]
    networks = interface_networks()
    names = [
        name
        for name, listed in networks.items()
        if any(network.partition("/")[0] == address for network in listed)
    ]
    environ = dict(os.environ, **arguments["env"])
    proxies = {
        name: plain(_without_password(environ[name]), 300)
        for lower in _PROXIES
        for name in (lower, lower.upper())
        if environ.get(name)
    }
    return {
        "interface": names[0] if names else None,
        "address": address if names else None,
        "fabric": read_fabric("", networks),
        "proxies": proxies,
    }


def _without_password(url: str) -> str:
    scheme, marks, address = url.rpartition("://")
    return scheme + marks + address.rpartition("@")[2]


_PARTS: Mapping[str, Any] = {
    "machine": (read_machine, _MACHINE),
    "software": (_read_software, _SOFTWARE),
    "gpus": (read_gpus, _GPUS),
    "files": (read_files, _FILES),
    "network": (read_network, _NETWORK),
}
"""For each part the function that reads it, and its form. A new value is a field of a part."""
RESULT = record(
    {
        **{name: or_null(shape) for name, (_, shape) in _PARTS.items()},
        "problems": mapping(text(64), text(300), len(_PARTS)),  # why a part is null
    }
)
