"""Binding: the processors, memory and GPUs of each worker, from /sys, for --bind and --gpus-per-worker.

Reading, deciding and acting are apart: read_topology() reads below any root, bindings() is pure, and Binder starts workers.
A kernel that refuses a step costs the step and no worker: notes tell the driver.
"""

from __future__ import annotations

import os

from hvlaunch.agent.quick import dumps
from hvlaunch.agent.workers import CannotStart

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

    from hvlaunch.agent.workers import WorkerProcess

    Device = Tuple[str, Optional["Gpu"]]

__all__ = [
    "LEDGER",
    "Binder",
    "Gpu",
    "Topology",
    "WorkerBinding",
    "bindings",
    "parsed",
    "ranges",
    "read_topology",
]

LEDGER = "bindings"
"""File in the job's private directory: a line of JSON for each bound worker."""

_VARIABLES = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "intel": ("ZE_AFFINITY_MASK",),
}
"""Variables for choosing GPUs, by maker; the first variable with a value counts."""
_BELOW = "ROCR_VISIBLE_DEVICES"
"""This variable leaves some of AMD's GPUs, and HIP counts the rest from 0."""
_THREADS = "OMP_NUM_THREADS"
_CANNOT = 126
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "s390x": 269}
"""Numbers of the system call by machine: libc has no function for the call."""
_DEFAULT, _PREFERRED, _PREFERRED_MANY = 0, 1, 5  # set_mempolicy(2); the last since Linux 5.15
_MOST_NODES = 1024
_INTEL, _DISPLAY = "0x8086", "0x0380"


class Gpu:
    """A GPU. `address` is its PCI address, `node` its NUMA node, -1 if the firmware does not tell, and `near` its processors."""

    def __init__(self, maker: str, address: str, uuid: str, node: int, near: Set[int]) -> None:
        self.maker = maker
        self.address = address
        self.uuid = uuid
        self.node = node
        self.near = near


class Topology:
    """The parts of a host for this process."""

    def __init__(self, allowed: Set[int], nodes: Dict[int, Set[int]]) -> None:
        self.allowed = allowed
        self.nodes = nodes
        """Allowed processors by NUMA node; nodes without any are left out."""
        self.memory: Set[int] = set()
        """NUMA nodes with memory."""
        self.packages: Dict[int, int] = {}
        """Socket by processor."""
        self.cores: Dict[int, int] = {}
        """Lowest processor of the same core, by processor."""
        self.caches: Dict[int, int] = {}
        """Lowest processor with the same last cache, by processor."""
        self.gpus: List[Gpu] = []
        """In the order of the GPUs' own library."""
        self.quota: Optional[float] = None
        """Limit of the cgroup in processors; None without a limit."""


class WorkerBinding:
    """A worker's share. `cpus` is None for an unbound worker."""

    def __init__(self, devices: Sequence[Device], variables: Dict[str, str]) -> None:
        self.cpus: Optional[Set[int]] = None
        self.memory: List[int] = []
        """NUMA nodes to prefer; empty to leave the choice to the kernel."""
        self.threads = 1
        self.devices = devices
        self.variables = variables
        self.notes: List[Tuple[str, str]] = []
        """Failed steps: the driver's word for the step, and a detail."""


def parsed(text: str) -> Set[int]:
    """Return the numbers of a list such as `0-2,4`."""
    numbers: Set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.strip():
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as a list such as `0-2,4`."""
    spans: List[List[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join("%d" % first if first == last else "%d-%d" % (first, last) for first, last in spans)


# Reading


def read_topology(mode: str, allowed: Set[int], root: str = "") -> Topology:
    """Read the facts for `mode` from the files below `root`. Missing files make less of a topology, and no error."""
    system = root + "/sys/devices/system"
    nodes = {}
    for name in _listed(system + "/node"):
        if name.startswith("node") and name[4:].isdigit():
            nodes[int(name[4:])] = _numbers("%s/node/%s/cpulist" % (system, name)) & allowed
    nodes = {node: cpus for node, cpus in sorted(nodes.items()) if cpus}
    topology = Topology(allowed, nodes or {0: set(allowed)})
    topology.memory = _numbers(system + "/node/has_memory") & set(topology.nodes)
    kinds = {
        "socket": (topology.packages, _package),
        "core": (topology.cores, _siblings),
        "cache": (topology.caches, _cache),
    }
    if mode in kinds:
        groups, group_of = kinds[mode]
        for cpu in sorted(allowed):
            if cpu not in groups:
                number, members = group_of("%s/cpu/cpu%d" % (system, cpu))
                # A single file for the processors of a group: a host may have hundreds of processors.
                groups.update(dict.fromkeys(members | {cpu}, cpu if number is None else number))
    topology.gpus = _nvidia(root) or _amd(root) or _intel(root)
    topology.quota = _quota(root)
    return topology


def _package(cpu: str) -> Tuple[Optional[int], Set[int]]:
    number = _numbers(cpu + "/topology/physical_package_id")
    return (min(number) if number else 0), set()


def _siblings(cpu: str) -> Tuple[Optional[int], Set[int]]:
    siblings = _numbers(cpu + "/topology/thread_siblings_list")
    return (min(siblings) if siblings else None), siblings


def _cache(cpu: str) -> Tuple[Optional[int], Set[int]]:
    last, shared = 0, set()
    for name in _listed(cpu + "/cache"):
        kind = _text("%s/cache/%s/type" % (cpu, name))
        level = _numbers("%s/cache/%s/level" % (cpu, name)) if kind in ("Unified", "Data") else set()
        if level and max(level) > last:
            last, shared = max(level), _numbers("%s/cache/%s/shared_cpu_list" % (cpu, name))
    return (min(shared) if shared else None), shared


def _nvidia(root: str) -> List[Gpu]:
    # The driver's own list, in the order of PCI addresses: in a container /sys has more GPUs than the container.
    folder = root + "/proc/driver/nvidia/gpus"
    gpus = []
    for address in _listed(folder):
        uuid = _text("%s/%s/information" % (folder, address)).partition("GPU UUID:")[2].partition("\n")[0]
        gpus.append(_gpu(root, "nvidia", address.lower(), uuid.strip()))
    return gpus


def _amd(root: str) -> List[Gpu]:
    folder = root + "/sys/class/kfd/kfd/topology/nodes"
    gpus = []
    for number in sorted(int(name) for name in _listed(folder) if name.isdigit()):
        lines = _text("%s/%d/properties" % (folder, number)).splitlines()
        facts = {
            words[0]: int(words[1])
            for words in map(str.split, lines)
            if len(words) > 1 and words[1].isdigit()
        }
        if facts.get("simd_count"):
            place = facts.get("location_id", 0)
            address = "%04x:%02x:%02x.%d" % (facts.get("domain", 0), place >> 8, place >> 3 & 31, place & 7)
            gpus.append(_gpu(root, "amd", address, ""))
    return gpus


def _intel(root: str) -> List[Gpu]:
    folder = root + "/sys/bus/pci/devices"
    return [
        _gpu(root, "intel", address, "")
        for address in _listed(folder)
        if _text("%s/%s/vendor" % (folder, address)) == _INTEL
        # Graphics within a processor are of another class.
        and _text("%s/%s/class" % (folder, address)).startswith(_DISPLAY)
    ]


def _gpu(root: str, maker: str, address: str, uuid: str) -> Gpu:
    device = "%s/sys/bus/pci/devices/%s" % (root, address)
    node = _text(device + "/numa_node")
    return Gpu(maker, address, uuid, int(node) if node.isdigit() else -1, _numbers(device + "/local_cpulist"))


def _quota(root: str) -> Optional[float]:
    """Return the smallest limit of this process's cgroup and the cgroups around, as a number of processors."""
    folder, limits = root + "/sys/fs/cgroup", []
    # In a container the path may be the host's: the last two are the container's own.
    for line in [*_text(root + "/proc/self/cgroup").splitlines(), "0::/", "1:cpu:/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        names = [""] + [path[:end] for end in range(1, len(path) + 1) if path[end : end + 1] in ("", "/")]
        for name in names:
            if controllers:
                group = "%s/cpu%s" % (folder, name)
                words = [_text(group + "/cpu.cfs_quota_us"), _text(group + "/cpu.cfs_period_us")]
            else:
                words = _text("%s%s/cpu.max" % (folder, name)).split()
            if len(words) > 1 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
                limits.append(int(words[0]) / int(words[1]))
    return min(limits) if limits else None


def _listed(path: str) -> List[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _numbers(path: str) -> Set[int]:
    try:
        return parsed(_text(path))
    except ValueError:
        return set()


# Deciding


def bindings(
    topology: Topology,
    mode: str,
    per_worker: Optional[int],
    count: int,
    env: Mapping[str, str],
    gpus: Optional[Sequence[Optional[int]]] = None,
) -> List[WorkerBinding]:
    """Return the bindings of `count` workers, in the order of their slots. Pure.

    `per_worker` is the number of GPUs for each; None leaves the choice to the program, which takes the GPU of its local
    rank, and all GPUs if it is its host's only worker. `gpus` has a number for each slot instead, for workers of roles.
    """
    maker, variable, devices = _visible(topology, env)
    shares = []
    first = 0
    for slot in range(count):
        if gpus is not None:
            per_worker = gpus[slot]
        mine = devices[slot % len(devices) :][:1] if devices else []
        variables = {}
        if per_worker is not None:
            mine = devices[first : first + per_worker]
            first += per_worker
            variables[variable] = ",".join(word for word, _ in mine)
            if maker == "nvidia" and "CUDA_DEVICE_ORDER" not in env and variable not in env:
                # As nvidia-smi numbers GPUs; CUDA's own order begins with the fastest GPU.
                variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        elif count == 1:
            mine = devices
        shares.append(WorkerBinding(mine, variables))
    if mode != "none":
        _bind(topology, mode, shares)
    # Workers with the same processors divide their number.
    for share in shares:
        cpus = topology.allowed if share.cpus is None else share.cpus
        around = [other for other in shares if other.cpus is None or other.cpus & cpus]
        share.threads = max(1, len(cpus) // len(around))
        if topology.quota is not None:
            share.threads = max(1, min(share.threads, int(topology.quota / count)))
    return shares


def _visible(topology: Topology, env: Mapping[str, str]) -> Tuple[str, str, List[Device]]:
    """Return the maker of the GPUs, the maker's variable, and the chosen GPUs with their names in the variable."""
    maker = topology.gpus[0].maker if topology.gpus else ""
    for name, variables in _VARIABLES.items():
        # A container may hide the GPUs' files and have only the variable.
        if not maker and any(variable in env for variable in variables):
            maker = name
    if not maker:
        return "", "CUDA_VISIBLE_DEVICES", []
    devices: List[Device] = [(str(index), gpu) for index, gpu in enumerate(topology.gpus)]
    if maker == "amd" and _BELOW in env:
        devices = [(str(index), gpu) for index, (_, gpu) in enumerate(_chosen(devices, env[_BELOW]))]
    variable = next((name for name in _VARIABLES[maker] if name in env), _VARIABLES[maker][0])
    return maker, variable, _chosen(devices, env[variable]) if variable in env else devices


def _chosen(devices: List[Device], text: str) -> List[Device]:
    """Return the GPUs by number or UUID, up to the first name without meaning, as CUDA reads its variable."""
    chosen: List[Device] = []
    for word in map(str.strip, text.split(",")):
        number = word.partition(".")[0]
        if number.isdigit() and (int(number) < len(devices) or not devices):
            chosen.append((word, devices[int(number)][1] if devices else None))
        elif word.startswith(("GPU-", "MIG-")):
            chosen.append(
                (word, next((gpu for _, gpu in devices if gpu and gpu.uuid.startswith(word)), None))
            )
        else:
            break
    return chosen


def _bind(topology: Topology, mode: str, shares: List[WorkerBinding]) -> None:
    homes = [_home(topology, share, slot, len(shares), mode) for slot, share in enumerate(shares)]
    for slot, (share, home) in enumerate(zip(shares, homes)):  # noqa: B905 (Python 3.8 has no strict=)
        cpus: Set[int] = set()
        for node in home:
            # Workers of the same node, by slot.
            mates = [index for index, other in enumerate(homes) if node in other]
            limit = None if topology.quota is None else topology.quota / len(shares)
            cpus |= _part(topology, mode, node, mates.index(slot), len(mates), limit)
        if mode == "gpu" and home:
            near = {cpu for _, gpu in share.devices if gpu for cpu in gpu.near} & topology.allowed
            cpus = near or cpus
        if not cpus or cpus == topology.allowed:
            continue
        share.cpus = cpus
        nodes = {node for node, members in topology.nodes.items() if members & cpus} & topology.memory
        if nodes != topology.memory:
            share.memory = sorted(nodes)


def _home(topology: Topology, share: WorkerBinding, slot: int, count: int, mode: str) -> List[int]:
    """Return the NUMA nodes of a worker: its GPUs', else an equal share by slot."""
    nodes = sorted(topology.nodes)
    homes: Set[int] = set()
    is_whole = bool(share.devices)
    for word, gpu in share.devices:
        node = -1 if gpu is None else gpu.node
        # Firmware of hosts with a single node often gives no number.
        node = nodes[0] if node < 0 and len(nodes) == 1 else node
        if node in topology.nodes:
            homes.add(node)
        else:
            is_whole = False
            share.notes.append(("unknown", word) if node < 0 else ("outside", "%d" % node))
    if is_whole or mode == "gpu":
        return sorted(homes)
    if count >= len(nodes):
        return [nodes[slot * len(nodes) // count]]
    return nodes[slot * len(nodes) // count : (slot + 1) * len(nodes) // count]


def _part(
    topology: Topology, mode: str, node: int, index: int, count: int, limit: Optional[float]
) -> Set[int]:
    """Return the processors of a node for worker `index` of `count`."""
    cpus = topology.nodes[node]
    if mode == "socket":
        sockets = {topology.packages[cpu] for cpu in cpus}
        return {cpu for cpu in topology.allowed if topology.packages[cpu] in sockets}
    if mode == "core":
        return _exclusive(list(_grouped(cpus, topology.cores).values()), index, count, limit)
    if mode == "cache":
        # The largest first: a cpuset may have cut some.
        parts = sorted(_grouped(cpus, topology.caches).items(), key=lambda part: (-len(part[1]), part[0]))
        return parts[index % len(parts)][1]
    return cpus


def _grouped(cpus: Iterable[int], key: Mapping[int, int]) -> Dict[int, Set[int]]:
    groups: Dict[int, Set[int]] = {}
    for cpu in sorted(cpus, key=lambda cpu: (key[cpu], cpu)):
        groups.setdefault(key[cpu], set()).add(cpu)
    return groups


def _exclusive(cores: List[Set[int]], index: int, count: int, limit: Optional[float]) -> Set[int]:
    """Return an equal share of the cores; the first workers may have a core more. `limit` is in processors."""
    if len(cores) < count:
        cores = [{cpu} for core in cores for cpu in sorted(core)]
    if len(cores) < count:
        return cores[index % len(cores)]
    size, more = divmod(len(cores), count)
    start = index * size + min(index, more)
    cpus: Set[int] = set()
    for core in cores[start : start + size + (index < more)]:
        if limit is None or len(cpus) + len(core) <= max(limit, len(core)):
            cpus |= core
    return cpus


# Acting


class Binder:
    """Starts workers with their bindings. `order` is the driver's, `env` has the common variables of the job's workers."""

    def __init__(self, order: Dict[str, Any], env: Mapping[str, str], root: str = "") -> None:
        self._allowed = os.sched_getaffinity(0)
        topology = read_topology(order["mode"], self._allowed, root)
        # The job's variables win over the host's.
        all_env = {**os.environ, **env}
        self._count = len(_visible(topology, all_env)[2])
        gpus: List[Optional[int]] = order.get("gpus") or [order["gpus_per_worker"]] * order["slots"]
        self._gpus = gpus
        self._origin = "its role, x%d" if "gpus" in order else "--gpus-per-worker %d"
        self._bindings = bindings(topology, order["mode"], None, order["slots"], all_env, gpus)

    def start(
        self, slot: int, env: Dict[str, str], job_env: Mapping[str, str], start: Callable[[], WorkerProcess]
    ) -> WorkerProcess:
        """Call `start` with this thread bound: the new process inherits the binding. Raises CannotStart.

        `env`, the worker's environment, gets more variables; `job_env` are the variables of the user and hvlaunch.
        """
        binding = self._bindings[slot]
        per_worker = self._gpus[slot]
        if per_worker is not None and len(binding.devices) < per_worker:
            first = sum(number or 0 for number in self._gpus[:slot])
            gpus = ranges(range(first, first + per_worker))
            cause = "%s: slot %d is to have GPU %s; visible GPUs: %d" % (
                self._origin % per_worker,
                slot,
                gpus,
                self._count,
            )
            raise CannotStart(_CANNOT, cause)
        env.update(binding.variables)
        if _THREADS not in os.environ and _THREADS not in job_env:
            env[_THREADS] = str(binding.threads)
        notes = list(binding.notes)
        try:
            notes += self._enter(binding)
            worker = start()
        finally:
            self._leave(binding)
        self._note(env.get("HVLAUNCH_SCRATCH", ""), worker.pid, binding, notes)
        return worker

    def _enter(self, binding: WorkerBinding) -> List[Tuple[str, str]]:
        notes = []
        if binding.cpus is not None:
            try:
                os.sched_setaffinity(0, binding.cpus)
            except OSError as error:  # the cpuset has just changed, or seccomp forbids the call
                notes.append(("affinity", os.strerror(error.errno or 0)))
        if binding.memory:
            cause = set_memory_policy(binding.memory)
            if cause is not None:
                notes.append(("memory", cause))
        return notes

    def _leave(self, binding: WorkerBinding) -> None:
        """Restore the binding of this thread."""
        if binding.cpus is not None:
            for cpus in (self._allowed, range(os.cpu_count() or 1)):
                try:
                    os.sched_setaffinity(0, cpus)
                    break
                except OSError:  # the cpuset has changed: the kernel cuts any mask to the cpuset
                    continue
        if binding.memory:
            set_memory_policy([])

    @staticmethod
    def _note(scratch: str, pid: int, binding: WorkerBinding, notes: Sequence[Tuple[str, str]]) -> None:
        """Append the binding to the file for the observer, which compares the order with /proc."""
        line = {
            "pid": pid,
            "cpus": None if binding.cpus is None else ranges(binding.cpus),
            "gpus": [gpu.address for _, gpu in binding.devices if gpu],
            "notes": notes,
        }
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            fd = os.open(os.path.join(scratch, LEDGER), flags, 0o600)
        except OSError:
            return  # the table will lack the notes
        try:
            os.write(fd, dumps(line).encode("ascii") + b"\n")
        except OSError:
            pass
        finally:
            os.close(fd)


def set_memory_policy(nodes: Sequence[int]) -> Optional[str]:
    """Prefer memory of these NUMA nodes for this thread and its children, by default without any node; return an error."""
    # Preferred and not bound: a full node would otherwise end workers while others have memory.
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        return "this machine's call is not known"
    try:
        import ctypes  # noqa: PLC0415 (few workers have a memory policy)

        libc = ctypes.CDLL(None, use_errno=True)
    except (ImportError, OSError) as error:
        return "no ctypes: %s" % error
    words = ctypes.c_ulong * (_MOST_NODES // (8 * ctypes.sizeof(ctypes.c_ulong)))
    cause = ""
    for policy in (_PREFERRED_MANY, _PREFERRED) if nodes else (_DEFAULT,):
        mask = words()
        for node in nodes if policy == _PREFERRED_MANY else nodes[:1]:
            mask[node // (8 * ctypes.sizeof(ctypes.c_ulong))] |= 1 << node % (
                8 * ctypes.sizeof(ctypes.c_ulong)
            )
        size = _MOST_NODES if nodes else 0
        if (
            libc.syscall(
                ctypes.c_long(number), ctypes.c_long(policy), mask if nodes else None, ctypes.c_ulong(size)
            )
            == 0
        ):
            return None
        cause = os.strerror(ctypes.get_errno())
    return cause
